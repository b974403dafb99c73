/* A limiter's counter lines as this process sees them, and the addition to one of a line's counters.
 *
 * With the GIL, one thread of a process counts at a time, so a limiter has one line. Without it (Py_GIL_DISABLED), each
 * thread has a line of its own for each limiter: see core/table/threads.pyx, where the argument stands.
 */
#ifndef FOREBAY_COUNTING_H
#define FOREBAY_COUNTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "atomics.h"
#include "layout.h"

#ifdef Py_GIL_DISABLED
enum { FOREBAY_FREE_THREADED = 1 };
#else
enum { FOREBAY_FREE_THREADED = 0 };
#endif

enum {
    FOREBAY_THREADS = 128 /* thread slots of a process */
};

/* A thread slot; slot 0 stands for all threads that have none. In a cache line of its own. */
typedef struct ForebayThread {
    uint64_t generation; /* lines that were taken in another one are not the thread's any more */
    uint64_t counting;   /* 1 while the thread may store to a line */
    uint64_t fences;     /* 1: the thread needs a full barrier before it reads its generation */
    uint64_t number;
} __attribute__((aligned(64))) ForebayThread;

/* A counter line in use. One thread at a time uses it, with the GIL or of its slot. */
typedef struct ForebayLine {
    ForebayCounterLine *counters;
    const uint64_t *generation;   /* the thread's, or the process's */
    uint64_t attached_generation; /* when that was compared last; 0 if the next decision must attach again */
    uint64_t line_generation;     /* in which `counters` was taken; 0: not yet */
    uint64_t number;              /* of the line, part of claim ids */
    bool is_shared;               /* with other processes and threads */
    bool is_plain;                /* not shared, and no key is noted: see core/table/hot_keys.pxd */
    bool checks_name;             /* the next decision first checks the name of the segment's file */
    ForebayThread *thread;        /* NULL: all that hold the GIL */
    ForebayCounterLine *shared;   /* the limiter's shared line, for counts that come too late */
    uint64_t turn;                /* of allowed requests, of which some have their keys noted */
} ForebayLine;

typedef struct ForebayLines {
    /* With the GIL the only line. Without it the shared line of threads that have not attached. */
    ForebayLine common;
#ifdef Py_GIL_DISABLED
    ForebayLine *by_thread[FOREBAY_THREADS + 1];
#endif
} ForebayLines;

/* The words of a counter line that are counters. */
typedef enum ForebayCounter {
    FOREBAY_COUNTER_ALLOWED = offsetof(ForebayCounterLine, allowed) / sizeof(uint64_t),
    FOREBAY_COUNTER_DENIED = offsetof(ForebayCounterLine, denied) / sizeof(uint64_t),
    FOREBAY_COUNTER_INSERTED = offsetof(ForebayCounterLine, inserted) / sizeof(uint64_t),
    FOREBAY_COUNTER_EVICTED = offsetof(ForebayCounterLine, evicted) / sizeof(uint64_t),
    FOREBAY_COUNTER_FULL = offsetof(ForebayCounterLine, full) / sizeof(uint64_t),
    FOREBAY_COUNTER_CAS_RETRIES = offsetof(ForebayCounterLine, cas_retries) / sizeof(uint64_t)
} ForebayCounter;

/* Add to a counter of a line that the calling thread has by its slot, and that isn't shared. False: it has it no more.
 */
static inline bool forebay_count_by_thread(const ForebayLine *line, ForebayCounter counter, uint64_t n) {
    ForebayThread *thread = line->thread;
    uint64_t *word = (uint64_t *)line->counters + counter;
    /* SYNC counting -> generation: this store comes before the load. A close executes the barrier for both. */
    __atomic_store_n(&thread->counting, 1, __ATOMIC_RELAXED);
    if (__builtin_expect(thread->fences != 0, 0)) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    } else {
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
    }
    bool is_own = __atomic_load_n(&thread->generation, __ATOMIC_RELAXED) == line->line_generation;
    if (is_own) forebay_store_relaxed(word, forebay_load_relaxed(word) + n);
    __atomic_store_n(&thread->counting, 0, __ATOMIC_RELEASE);
    return is_own;
}

/* Add to a counter of the line that `forebay_line_here` has returned to this thread. */
static inline void forebay_count(const ForebayLine *line, ForebayCounter counter, uint64_t n) {
#ifdef Py_GIL_DISABLED
    if (line->is_shared || !forebay_count_by_thread(line, counter, n)) {
        forebay_fetch_add_relaxed((uint64_t *)line->shared + counter, n);
    }
#else
    uint64_t *word = (uint64_t *)line->counters + counter;
    if (__builtin_expect(line->is_shared, 0)) {
        forebay_fetch_add_relaxed(word, n);
    } else {
        forebay_store_relaxed(word, forebay_load_relaxed(word) + n);
    }
#endif
}

/* Count one decision in such a line, if it is plain. */
static inline void forebay_count_plain(const ForebayLine *line, ForebayCounter counter) {
#ifdef Py_GIL_DISABLED
    if (!forebay_count_by_thread(line, counter, 1)) {
        forebay_fetch_add_relaxed((uint64_t *)line->shared + counter, 1);
    }
#else
    uint64_t *word = (uint64_t *)line->counters + counter;
    forebay_store_relaxed(word, forebay_load_relaxed(word) + 1);
#endif
}

/* The line of the calling thread, whose slot `here` returns. Until the thread attaches, its attached_generation is 0.
 */
static inline ForebayLine *forebay_line_here(ForebayLines *lines, ForebayThread *(*here)(void)) {
#ifdef Py_GIL_DISABLED
    ForebayThread *thread = here();
    if (__builtin_expect(thread != NULL, 1)) {
        /* The slot's former owner may have stored it: taking the slot has acquired that. */
        ForebayLine *line = __atomic_load_n(&lines->by_thread[thread->number], __ATOMIC_ACQUIRE);
        if (__builtin_expect(line != NULL, 1)) return line;
    }
#else
    (void)here;
#endif
    return &lines->common;
}

/* The line of a thread that attaches, made if need be; NULL if there is no memory. */
static inline ForebayLine *forebay_line_of(ForebayLines *lines, ForebayThread *thread) {
#ifdef Py_GIL_DISABLED
    ForebayLine **place = &lines->by_thread[thread->number];
    ForebayLine *line = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    if (line != NULL) return line;
    ForebayLine *made = aligned_alloc(64, (sizeof(ForebayLine) + 63) / 64 * 64);
    if (made == NULL) return NULL;
    *made = lines->common;
    made->thread = thread;
    made->generation = &thread->generation;
    /* Threads without a slot may be several here. */
    if (__atomic_compare_exchange_n(place, &line, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return made;
    free(made);
    return line;
#else
    (void)thread;
    return &lines->common;
#endif
}

/* Whether something is due, and the calling thread is the one that does it. It is due again after the interval. */
static inline bool forebay_take_due(uint64_t *due_ns, uint64_t now_ns, uint64_t interval_ns) {
    uint64_t seen = __atomic_load_n(due_ns, __ATOMIC_RELAXED);
    return now_ns >= seen &&
           __atomic_compare_exchange_n(due_ns, &seen, now_ns + interval_ns, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Free the lines of a limiter that no thread uses any more. */
static inline void forebay_free_lines(ForebayLines *lines) {
#ifdef Py_GIL_DISABLED
    for (int i = 0; i <= FOREBAY_THREADS; i++)
        free(lines->by_thread[i]);
#else
    (void)lines;
#endif
}

#endif
