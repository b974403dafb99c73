/* forebay from native code: decisions without the GIL, without allocation and without exceptions.
 *
 * Python makes the store and the limiters, as always. Native code gets a table of functions from the capsule
 * `forebay.core._C_API` (`forebay_import`, below), opens a limiter from its Python object, attaches each of its threads
 * to it, and decides:
 *
 *     const forebay_api *forebay = forebay_import();                    // with the GIL; NULL and an exception if not
 *     forebay_limiter *bucket;
 *     forebay_thread *mine;
 *     int32_t status = forebay->limiter_open(object, &bucket);          // with the GIL
 *     status = forebay->attach(bucket, &mine);                          // in each thread
 *     status = forebay->allow(mine, "user:42", 7);                      // without the GIL: 1, 0, or below 0
 *     forebay->detach(mine);
 *     forebay->limiter_close(bucket);
 *
 * `python -c 'import forebay; print(forebay.get_include())'` prints the directory of this file. docs/c-api.md has the
 * same with examples in C and in Cython.
 *
 * The header is C99 and C++. It has plain structs of fixed-width integers and pointers, no bit fields, and no macro
 * that a caller needs: another language declares the same structs.
 *
 * Status
 * ------
 * Every function that can fail returns an int32_t. A decision is FOREBAY_ALLOWED or FOREBAY_DENIED; `renew` and
 * `release` return FOREBAY_HELD or FOREBAY_NOT_HELD; other functions return FOREBAY_OK. A negative status is an error,
 * and then nothing was charged. `message` has a text for each.
 *
 * The GIL
 * -------
 * *needs the GIL*: the caller holds it (or, on free-threaded Python, has an attached thread state).
 * *takes the GIL*: the function takes it by itself. The caller may hold it or not.
 * All other functions never touch Python. They run beside a thread that holds the GIL for as long as it likes.
 *
 * Threads
 * -------
 * A `forebay_limiter` and a `forebay_rate` may be used by all threads at once. A `forebay_thread` is used by one thread
 * at a time: it has a counter line of its own, which it counts in by plain stores. It may move from one thread to
 * another if the program orders their uses. A thread that uses several limiters attaches to each. Decisions are
 * lock-free; a thread that is stopped or killed anywhere delays no other.
 *
 * If all counter lines of the store are taken (768 pairs of limiter and thread or process), a `forebay_thread` counts
 * in the limiter's shared line by atomic additions: as exact, and slower.
 *
 * Lifetime
 * --------
 * A `forebay_limiter` keeps the Python limiter, its store and the store's mapping alive until `limiter_close`. A
 * `forebay_thread` and a `forebay_rate` keep their limiter alive, so the order of closing doesn't matter. Each handle
 * is closed once; a closed one must not be used again.
 *
 * *The store is closed* (by Python, `store.close()`, at any time, in any thread): `attach` and every decision that
 * begins later return FOREBAY_CLOSED. Leases can still be released. A decision that is under way is completed. The
 * mapping and the file stay until the last handle is closed, and with them the locks on the counter lines: so no other
 * process counts in a line while a thread of this process may still do so.
 *
 * *A fork*: in the child, every `forebay_thread` of the parent returns FOREBAY_FORKED, and does nothing. The child
 * attaches its threads anew; limiters and rates stay as they are. Leases stay the parent's. It may also detach the
 * parent's: that doesn't touch the parent's counter line. A child that C code forked while another thread held the GIL
 * can't take the GIL; that is a rule of Python.
 *
 * *A thread ends without `detach`*: its counter line stays with the process until the process ends. No count is lost.
 * Its leases stay, too, until their end.
 *
 * *The interpreter ends*: before it does, it waits for calls that take the GIL; later ones return FOREBAY_FINALIZING,
 * or do nothing. Decisions work until the process ends.
 *
 * Time
 * ----
 * All durations are in nanoseconds. The clock is the store's: CLOCK_MONOTONIC, or a test's ManualClock.
 *
 * Only in Python
 * --------------
 * A limiter whose decision runs Python can't be opened (FOREBAY_NEEDS_PYTHON): one of a store with clock="time", a
 * FixedWindow with align="calendar", a TokenBucket with initial=, Credits, and one that is leased from Redis or synced
 * over it.
 * Limiters that Redis itself decides are none in this sense (FOREBAY_NOT_A_LIMITER). Python's decisions warn if the
 * store's file was removed; native ones leave that to `maintain`.
 */
#ifndef FOREBAY_H
#define FOREBAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of `forebay_api`. It changes only if a caller that was compiled with this header would go wrong. */
#define FOREBAY_API_VERSION 1

enum {
    FOREBAY_OK = 0,
    FOREBAY_DENIED = 0,
    FOREBAY_NOT_HELD = 0,
    FOREBAY_ALLOWED = 1,
    FOREBAY_HELD = 1,
    /* NULL where a value is needed, a negative number as a size or count, an unknown flag or kind of key */
    FOREBAY_INVALID_ARGUMENT = -1,
    FOREBAY_COST_EXCEEDS_LIMIT = -2, /* the cost is above the limit: the request can never be allowed */
    FOREBAY_CLOSED = -3,             /* the store was closed */
    FOREBAY_FORKED = -4,             /* the forebay_thread belongs to the parent of this process */
    FOREBAY_NOT_A_LIMITER = -5,      /* the object is no limiter of a Store */
    FOREBAY_NEEDS_PYTHON = -6,       /* the limiter's decisions run Python */
    FOREBAY_INVALID_RATE = -7,       /* not a rate, or not one for this limiter */
    FOREBAY_NO_MEMORY = -8,
    FOREBAY_FAILED = -9,      /* Python raised an exception; sys.unraisablehook has reported it */
    FOREBAY_FINALIZING = -10, /* the interpreter has ended */
    /* The limiter is of another kind than the call is for, in another store than the others, or not the lease's. */
    FOREBAY_WRONG_LIMITER = -11
};

typedef struct forebay_limiter forebay_limiter;
typedef struct forebay_thread forebay_thread;
typedef struct forebay_rate forebay_rate;

/* The type of a key in Python: keys of different types are never the same key. */
enum {
    FOREBAY_KEY_TEXT = 0,  /* str: its UTF-8 */
    FOREBAY_KEY_BYTES = 1, /* bytes: as they are */
    FOREBAY_KEY_INT = 2,   /* int within int64_t: 8 bytes, little-endian */
    /* Any other int: two's complement, little-endian, in (bits + 8) / 8 bytes, where the absolute value has so many. */
    FOREBAY_KEY_LARGE_INT = 3,
    /* tuple: for each part a letter ('s' for str, 'b' for bytes, 'i' for int), the length of what follows as 8 bytes,
     * little-endian, and that: UTF-8, the bytes, or the two's complement as above, also of a small int. */
    FOREBAY_KEY_PARTS = 4
};

/* In `forebay_request.flags`. */
enum {
    /* Book ahead, as Python's `reserve`: allow the request if it may proceed within `max_delay_ns`. Token and leaky
     * buckets and minimum intervals can; others allow it only now. */
    FOREBAY_BOOK = 1
};

/* One request. Set all fields; zero is right for those that aren't needed. */
typedef struct forebay_request {
    const void *key;          /* the key's bytes; NULL: `hash` is given */
    uint64_t key_size;        /* bytes; 0 without a key. A key of 0 bytes has any other pointer than NULL */
    uint64_t hash;            /* from `hash` of this limiter; read only if `key` is NULL */
    uint64_t cost;            /* permits; 0 checks whether the key is within its limit, and charges nothing */
    const forebay_rate *rate; /* NULL: the limiter's own */
    uint64_t max_delay_ns;    /* with FOREBAY_BOOK */
    uint32_t key_kind;        /* FOREBAY_KEY_... */
    uint32_t flags;           /* FOREBAY_BOOK, or 0 */
} forebay_request;

/* A decision's numbers, as in Python's `Decision`. */
typedef struct forebay_result {
    uint64_t limit;          /* the most permits that can be allowed at once */
    uint64_t remaining;      /* permits that would still be allowed right after this decision */
    uint64_t retry_after_ns; /* after that the same request is allowed if nothing else happens; 0 when allowed */
    uint64_t reset_after_ns; /* after that the key is as if it had never been seen */
    uint64_t delay_ns;       /* of a booking: the time until its permits may be used; else 0 */
    uint64_t charge;         /* identifies the charge, for `refund`; 0 if there is none */
    uint32_t allowed;        /* 1 or 0 */
    uint32_t full;           /* 1: the store had no room for the key, and its on_full decided */
    uint32_t binding;        /* of several limits: the index of the one that bound the request; else 0 */
    uint32_t reserved;
} forebay_result;

/* The most limits of one request. */
enum { FOREBAY_MOST_LIMITS = 16 };

/* Permits of a Concurrency that this process holds. The struct is the caller's; its fields are forebay's, except
 * `full` and `available`. All zero: it holds nothing. It may be moved; a copy is the same lease, so give back one of
 * them. */
typedef struct forebay_lease {
    uint64_t maker; /* which limiter made it */
    uint64_t key;   /* a hash */
    uint64_t cell;  /* where the key's slots are */
    uint64_t slot;  /* the first permit's */
    uint64_t permits;
    uint64_t owner;     /* this process */
    uint64_t end_ns;    /* in the store's time */
    uint32_t full;      /* 1: the store had no room for the key, and its on_full decided */
    uint32_t available; /* of a denied request: the permits that were free, fewer than its cost; else 0 */
} forebay_lease;

/* The table of functions. A later version of forebay appends to it and leaves the rest as it is: a function is there if
 * it lies within `size`. */
typedef struct forebay_api {
    uint32_t version; /* FOREBAY_API_VERSION */
    uint32_t reserved;
    uint64_t size; /* of this struct, in bytes, as forebay has it */

    /* A short text for a status, in static memory. Never NULL. */
    const char *(*message)(int32_t status);

    /* Open a limiter: `object` is a PyObject * of TokenBucket, LeakyBucket, MinInterval, FixedWindow, SlidingWindow,
     * SlidingLog, BucketedWindow or Concurrency. Takes a reference. Needs the GIL.
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_NOT_A_LIMITER, FOREBAY_NEEDS_PYTHON, FOREBAY_CLOSED, FOREBAY_NO_MEMORY,
     * FOREBAY_FAILED, FOREBAY_FINALIZING; then *limiter is NULL. */
    int32_t (*limiter_open)(void *object, forebay_limiter **limiter);

    /* Close the handle. NULL is ignored. Takes the GIL. */
    void (*limiter_close)(forebay_limiter *limiter);

    /* Attach the calling thread: take a counter line. Takes the GIL; some 10 us.
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_CLOSED, FOREBAY_NO_MEMORY, FOREBAY_FAILED, FOREBAY_FINALIZING; then *thread is
     * NULL. */
    int32_t (*attach)(forebay_limiter *limiter, forebay_thread **thread);

    /* Give the counter line back. NULL is ignored. Takes the GIL. */
    void (*detach)(forebay_thread *thread);

    /* Prepare a rate, for `forebay_request.rate`: `limit` permits per `period_ns`, with a burst of `burst`; 0: as many
     * as `limit`, or as the limiter has for every rate. A limiter takes here what its `hit(rate=, burst=)` takes
     * in Python. Works after a close. Takes the GIL. FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE,
     * FOREBAY_NO_MEMORY, FOREBAY_FAILED, FOREBAY_FINALIZING; then *rate is NULL. */
    int32_t (*rate_open)(forebay_limiter *limiter, uint64_t limit, uint64_t period_ns, uint64_t burst,
                         forebay_rate **rate);

    /* NULL is ignored. Takes the GIL. */
    void (*rate_close)(forebay_rate *rate);

    /* Do what Python's calls do beside the decision, and native ones can't: warn, once, if the store's file was
     * removed by others. For a Concurrency, also give back the permits of every process that has ended, of all keys,
     * in O(permits of the keys that there ever were). Call it about every 10 s, in any thread. Takes the GIL, but not
     * while it reads permits. FOREBAY_INVALID_ARGUMENT, FOREBAY_CLOSED, FOREBAY_NO_MEMORY, FOREBAY_FAILED,
     * FOREBAY_FINALIZING. */
    int32_t (*maintain)(forebay_limiter *limiter);

    /* The hash of a key, for requests by hash. It is the same in all processes, for limiters of one name in one store,
     * until the store is made anew; other limiters need another one. A text key hashes as the Python str of the same
     * UTF-8. FOREBAY_INVALID_ARGUMENT. */
    int32_t (*hash)(const forebay_limiter *limiter, uint32_t key_kind, const void *key, size_t size, uint64_t *hash);

    /* Charge one permit of a text key: the fast path of `decide`. `key` may be NULL if `size` is 0. */
    int32_t (*allow)(forebay_thread *thread, const void *key, size_t size);

    /* The same for a key whose `hash` is known. */
    int32_t (*allow_hash)(forebay_thread *thread, uint64_t hash);

    /* Read the clock for this thread's calls of `allow_at_tick`: an event loop does so once, and decides all requests
     * that it has received. `attach` reads it the first time. FOREBAY_INVALID_ARGUMENT, FOREBAY_WRONG_LIMITER,
     * FOREBAY_CLOSED, FOREBAY_FORKED. */
    int32_t (*tick)(forebay_thread *thread);

    /* As `allow`, at the time of the thread's last `tick`: saves reading the clock, more than half of a decision. The
     * request counts as if it had come at the tick. So if ticks are up to L late, the requests of any time t may be as
     * many as the limit allows in t + L: call `tick` each time that the loop wakes. */
    int32_t (*allow_at_tick)(forebay_thread *thread, const void *key, size_t size);

    /* Charge the request if it is allowed, as Python's `hit`, or `reserve` with FOREBAY_BOOK. `result` may be NULL.
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_INVALID_RATE, FOREBAY_CLOSED, FOREBAY_FORKED; then
     * `result` isn't written. */
    int32_t (*decide)(forebay_thread *thread, const forebay_request *request, forebay_result *result);

    /* The decision that `decide` would return now. Charges and counts nothing. */
    int32_t (*peek)(forebay_thread *thread, const forebay_request *request, forebay_result *result);

    /* Give back the charge of an allowed request with the same key, cost and rate. `charge` is that of its result: then
     * no more is given back than still counts. 0, as Python's `refund`: some earlier charge, at most the limit. Once
     * for each charge: a second call gives back permits of others. FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE,
     * FOREBAY_CLOSED, FOREBAY_FORKED. */
    int32_t (*refund)(forebay_thread *thread, const forebay_request *request, uint64_t charge);

    /* Forget the key: its next request finds a fresh key. Reads only the key of the request. */
    int32_t (*reset)(forebay_thread *thread, const forebay_request *request);

    /* Decide `count` requests in order, and write 1 or 0 for each to `allowed`: as `decide` for each, but faster for
     * many keys, because it prefetches. Not atomic: requests of others may be decided in between. A request with
     * FOREBAY_BOOK is refused. With a negative status none is charged, and nothing is written. */
    int32_t (*decide_many)(forebay_thread *thread, const forebay_request *requests, size_t count, uint8_t *allowed);

    /* Decide one request to several limits, all or none, as Python's `AllOf`: each of the `count` limits charges its
     * own request, or none does. `threads` are the calling thread's, one for each limit, of limiters of one store; the
     * same may come again. If it does for the same key, and the costs together are above its limit, each call denies,
     * and `retry_after_ns` is wrong. A request with FOREBAY_BOOK is refused.
     *
     * First it checks all limits. If one denies, nothing was written. Then it charges them in order; if another request
     * has taken the permits of a later limit meanwhile, it gives the earlier charges back. During that moment others
     * may be denied for want of them. A process that is killed during it leaves the first limits charged. A leaky
     * bucket can't take back a place behind which others already stand, nor a bucketed window a charge in a bucket that
     * is over: such a limit belongs last.
     *
     * `binding` gets the decision of the limit that bound the request, with its index in `binding->binding`: of those
     * that denied the one with the longest retry_after_ns, of an allowed request the one with the fewest remaining. Its
     * `remaining` is the least and its `reset_after_ns` the longest of all limits. `each` gets one result per limit, in
     * order; if the request is allowed, each with its own `charge`. Either may be NULL. With both NULL the call is
     * faster, and the first limit that denies ends it. O(count), lock-free.
     *
     * FOREBAY_INVALID_ARGUMENT (also if `count` is 0 or above FOREBAY_MOST_LIMITS), FOREBAY_COST_EXCEEDS_LIMIT,
     * FOREBAY_INVALID_RATE, FOREBAY_WRONG_LIMITER, FOREBAY_CLOSED, FOREBAY_FORKED; then nothing is written. */
    int32_t (*decide_all)(forebay_thread **threads, const forebay_request *requests, size_t count,
                          forebay_result *binding, forebay_result *each);

    /* The calls for a Concurrency, whose threads take no others: those above return FOREBAY_WRONG_LIMITER for them, and
     * these three for any other thread. */

    /* Hold `cost` permits of a key, all or none, as Python's `acquire`. FOREBAY_ALLOWED: `lease` holds them, until
     * `release`, until the end of the limiter's lease, or until this process has ended. Anything else: `lease` holds
     * nothing. It also holds nothing if the cost is 0, or if a key without room was let in by on_full="allow". The
     * request has no rate and no flags.
     *
     * Usually O(cost). Before it denies, it reads a bit per permit of the limit, and at most every tenth of a
     * millisecond the permits themselves. Then it also asks the kernel which of their owners no longer exist, and takes
     * their permits. An owner that has ended counts as existing until its parent has waited for it, or while another
     * process has its pid; `maintain` and Python's calls find those, too.
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_INVALID_RATE, FOREBAY_WRONG_LIMITER,
     * FOREBAY_CLOSED, FOREBAY_FORKED. */
    int32_t (*acquire)(forebay_thread *thread, const forebay_request *request, forebay_lease *lease);

    /* Restart the lease: FOREBAY_HELD. FOREBAY_NOT_HELD if it has ended and others hold its permits, or was given back;
     * if it has lost only some of its permits, it holds the others on. In any thread of the process that took it, one
     * at a time. O(1) for one permit, else O(limit).
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_WRONG_LIMITER, FOREBAY_CLOSED, FOREBAY_FORKED. */
    int32_t (*renew)(forebay_thread *thread, forebay_lease *lease);

    /* Give the permits back: FOREBAY_HELD if any were still held. Then the lease holds nothing, and a repeated call
     * returns FOREBAY_NOT_HELD, as does a call for a lease of this process's parent. Works after a close. In any thread
     * of the process, one at a time. A thread of Python that waits for a permit finds it within 50 ms. O(1) for one
     * permit, else O(limit).
     * FOREBAY_INVALID_ARGUMENT, FOREBAY_WRONG_LIMITER, FOREBAY_FORKED. */
    int32_t (*release)(forebay_thread *thread, forebay_lease *lease);
} forebay_api;

#ifdef Py_PYTHON_H /* include Python.h first */
/* The table; NULL with an ImportError if this forebay has another version or misses functions of this header. Needs the
 * GIL. The table is valid until the process ends. */
static inline const forebay_api *forebay_import(void) {
    const forebay_api *api = (const forebay_api *)PyCapsule_Import("forebay.core._C_API", 0);
    if (api == NULL) return NULL;
    if (api->version != FOREBAY_API_VERSION || api->size < sizeof(forebay_api)) {
        PyErr_Format(PyExc_ImportError,
                     "compiled for version %d of forebay's C API with %d bytes, found version %d with %d",
                     FOREBAY_API_VERSION, (int)sizeof(forebay_api), (int)api->version, (int)api->size);
        return NULL;
    }
    return api;
}
#endif

#ifdef __cplusplus
}
#endif

#endif
