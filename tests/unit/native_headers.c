/* Runs the headers of native/include for test_native_headers.py: one question per run, the answer on stdout. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "forebay/arithmetic.h"
#include "forebay/atomics.h"
#include "forebay/clock.h"
#include "forebay/hash.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: not %s\n", __LINE__, #condition);                                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Hashes the bytes 0, 1, 2, ... at every length up to `most`. Each message lies once directly before an unreadable page
 * and once directly behind one, so a read outside of the message ends the process. */
static void hash(ForebayHashKey key, size_t most) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *pages = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + page, page, PROT_READ | PROT_WRITE) == 0);
    for (size_t size = 0; size <= most; size++) {
        uint64_t hashes[2];
        for (int at_end = 0; at_end < 2; at_end++) {
            uint8_t *message = at_end ? pages + 2 * page - size : pages + page;
            for (size_t i = 0; i < size; i++)
                message[i] = (uint8_t)i;
            hashes[at_end] = forebay_siphash13(key, message, size);
        }
        CHECK(hashes[0] == hashes[1]);
        printf("%016" PRIx64 "\n", hashes[0]);
    }
}

/* Computes the products and quotients of each line "a b divisor". */
static void arithmetic(void) {
    uint64_t a, b, divisor;
    while (scanf("%" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &divisor) == 3)
        printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", forebay_multiply_high(a, b),
               forebay_multiply_divide_up(a, b, divisor), forebay_multiply_divide_down(a, b, divisor));
}

static void semantics(void) {
    ForebayCell cells[3] = {{1, 2}, {3, 4}, {5, 6}};
    ForebayCell *cell = &cells[1];
    CHECK((uintptr_t)cell % 16 == 0);
    ForebayCell seen = forebay_load128_acquire(cell);
    CHECK(seen.tag == 3 && seen.state == 4);
    /* One matching half is not enough, and a failed CAS changes nothing. */
    CHECK(!forebay_cas128_acq_rel(cell, (ForebayCell){3, 5}, (ForebayCell){7, 8}));
    CHECK(!forebay_cas128_acq_rel(cell, (ForebayCell){4, 4}, (ForebayCell){7, 8}));
    CHECK(!forebay_cas128_acq_rel(cell, (ForebayCell){4, 3}, (ForebayCell){7, 8}));
    CHECK(cell->tag == 3 && cell->state == 4);
    CHECK(forebay_cas128_acq_rel(cell, (ForebayCell){3, 4}, (ForebayCell){UINT64_MAX, UINT64_MAX - 1}));
    CHECK(cell->tag == UINT64_MAX && cell->state == UINT64_MAX - 1);
    seen = forebay_load128_acquire(cell);
    CHECK(seen.tag == UINT64_MAX && seen.state == UINT64_MAX - 1);
    CHECK(forebay_cas128_acq_rel(cell, seen, seen));
    CHECK(forebay_cas128_seq_cst(cell, seen, seen));
    CHECK(cells[0].tag == 1 && cells[0].state == 2 && cells[2].tag == 5 && cells[2].state == 6);

    uint64_t words[3] = {1, UINT64_MAX, 3};
    CHECK(forebay_load_relaxed(&words[1]) == UINT64_MAX && forebay_load_acquire(&words[1]) == UINT64_MAX);
    CHECK(forebay_load_seq_cst(&words[1]) == UINT64_MAX);
    CHECK(forebay_fetch_add_relaxed(&words[1], 5) == UINT64_MAX && words[1] == 4);
    CHECK(!forebay_cas_acq_rel(&words[1], 5, 6) && words[1] == 4);
    CHECK(forebay_cas_acq_rel(&words[1], 4, 6) && words[1] == 6);
    forebay_store_relaxed(&words[1], 7);
    CHECK(words[1] == 7);
    forebay_store_release(&words[1], 8);
    CHECK(words[1] == 8 && words[0] == 1 && words[2] == 3);
    forebay_prefetch(words);
    CHECK(forebay_likely(true) && !forebay_likely(false));
    uint64_t before = forebay_monotonic_ns();
    CHECK(before != 0 && forebay_monotonic_ns() >= before);
}

/* Writers move a cell from (n, ~n) to (n + 1, ~(n + 1)); a reader must never see halves of two writes. */
enum { WRITERS = 2, STEPS = 100000 };
static ForebayCell shared;
static uint64_t failures;
static int writing;

static void *write_cell(void *unused) {
    (void)unused;
    for (int step = 0; step < STEPS; step++) {
        ForebayCell seen;
        while (seen = forebay_load128_acquire(&shared),
               !forebay_cas128_acq_rel(&shared, seen, (ForebayCell){seen.tag + 1, ~(seen.tag + 1)}))
            forebay_fetch_add_relaxed(&failures, 1);
    }
    __atomic_fetch_sub(&writing, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void race(void) {
    uint64_t rounds = 0;
    shared = (ForebayCell){0, ~UINT64_C(0)};
    /* Repeat until a CAS has failed: then the writers raced. */
    while (forebay_load_relaxed(&failures) == 0 && rounds < 1000) {
        pthread_t threads[WRITERS];
        uint64_t last = 0;
        rounds++;
        __atomic_store_n(&writing, WRITERS, __ATOMIC_SEQ_CST);
        for (int i = 0; i < WRITERS; i++)
            CHECK(pthread_create(&threads[i], NULL, write_cell, NULL) == 0);
        while (__atomic_load_n(&writing, __ATOMIC_SEQ_CST)) {
            ForebayCell seen = forebay_load128_acquire(&shared);
            CHECK(seen.state == ~seen.tag);
            CHECK(seen.tag >= last);
            last = seen.tag;
        }
        for (int i = 0; i < WRITERS; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(shared.tag == rounds * WRITERS * STEPS && shared.state == ~shared.tag);
    }
    printf("%" PRIu64 "\n", failures);
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    char question = argv[1][0];
    if (question == 'h') {
        CHECK(argc == 5);
        hash((ForebayHashKey){strtoull(argv[2], NULL, 16), strtoull(argv[3], NULL, 16)}, strtoull(argv[4], NULL, 10));
    } else if (question == 'a') {
        arithmetic();
    } else {
        /* "narrow": use the code for processors whose 16-byte loads are not atomic. */
        if (argc == 3) forebay_wide_loads_are_atomic = false;
        if (question == 's')
            semantics();
        else
            race();
    }
    return 0;
}
