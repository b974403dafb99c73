/* Runs counting.h and threads.h, compiled as for an interpreter without the GIL, for test_native_threads.py. */
#define _GNU_SOURCE
#define Py_GIL_DISABLED 1
#include <linux/membarrier.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* The calls of membarrier pass through here. */
static long barriers;
static long counted_syscall(long number, long command, long flags, long cpu) {
    barriers += number == SYS_membarrier && command == MEMBARRIER_CMD_PRIVATE_EXPEDITED;
    return (syscall)(number, command, flags, cpu);
}
#define syscall(...) counted_syscall(__VA_ARGS__)
#include "forebay/threads.h"
#undef syscall

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: not %s\n", __LINE__, #condition);                                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { ROUNDS = 60, LAST_ROUND = ROUNDS + 1, OVERLAPS = 200 };

static ForebayCounterLine owned __attribute__((aligned(64)));
static ForebayCounterLine shared __attribute__((aligned(64)));

static uint64_t current_round, attached_round, counted, overlaps;

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

/* In each round take the line, and count until the round is over. */
static void *count_in_rounds(void *nothing) {
    ForebayThread *thread = forebay_take_slot();
    ForebayLine line = {
        .counters = &owned, .shared = &shared, .thread = thread, .generation = &thread->generation, .is_shared = false};
    CHECK(thread->number != 0);
    for (;;) {
        uint64_t round = load(&current_round);
        if (round == LAST_ROUND) return nothing;
        line.line_generation = forebay_load_acquire(line.generation);
        store(&attached_round, round);
        while (load(&current_round) == round) {
            for (int i = 0; i < 16; i++)
                forebay_count(&line, FOREBAY_COUNTER_ALLOWED, 1);
            store(&counted, counted + 16);
        }
    }
}

/* A thread counts, another closes, and then the line's next owner counts. */
static void close_beside_counts(void) {
    pthread_t counter;
    uint64_t by_next_owner = 0;
    store(&current_round, 1);
    CHECK(pthread_create(&counter, NULL, count_in_rounds, NULL) == 0);
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        while (load(&attached_round) != round)
            sched_yield();
        uint64_t before = load(&counted);
        while (load(&counted) == before)
            sched_yield();
        long barriers_before = barriers;
        forebay_next_generation();
        forebay_wait_for_counts();
        CHECK(barriers == barriers_before + forebay_has_membarrier);
        for (int i = 0; i < 200; i++) {
            uint64_t seen = forebay_load_relaxed(&owned.allowed);
            by_next_owner++;
            forebay_store_relaxed(&owned.allowed, seen + 1);
        }
        store(&current_round, round + 1);
    }
    CHECK(pthread_join(counter, NULL) == 0);
    CHECK(owned.allowed + shared.allowed == counted + by_next_owner);
}

/* A thread without a slot counts in the shared line. */
static void *count_in_shared_line(void *nothing) {
    ForebayLine line = {.counters = &shared,
                        .shared = &shared,
                        .thread = &forebay_threads[0],
                        .generation = &forebay_generation,
                        .is_shared = true};
    /* Until the threads have often counted at one time. */
    uint64_t mine = 0;
    while (load(&overlaps) < OVERLAPS) {
        uint64_t before = load(&shared.denied);
        for (int i = 0; i < 16; i++)
            forebay_count(&line, FOREBAY_COUNTER_DENIED, 1);
        mine += 16;
        if (load(&shared.denied) != before + 16) __atomic_fetch_add(&overlaps, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_fetch_add(&counted, mine, __ATOMIC_SEQ_CST);
    return nothing;
}

static void share_a_line(void) {
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, count_in_shared_line, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(shared.denied == counted);
}

static uint64_t stopped_is_over;

/* Stands for a thread that the kernel stops while it counts. */
static void *stop_while_counting(void *nothing) {
    ForebayThread *thread = forebay_take_slot();
    store(&thread->counting, 1);
    store(&attached_round, thread->number);
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, NULL);
    store(&stopped_is_over, 1);
    store(&thread->counting, 0);
    return nothing;
}

static void close_waits(void) {
    pthread_t stopped;
    CHECK(pthread_create(&stopped, NULL, stop_while_counting, NULL) == 0);
    while (load(&attached_round) == 0)
        sched_yield();
    uint64_t generation = load(&forebay_threads[load(&attached_round)].generation);
    forebay_next_generation();
    CHECK(load(&forebay_threads[load(&attached_round)].generation) > generation);
    forebay_wait_for_counts();
    CHECK(load(&stopped_is_over) == 1);
    CHECK(pthread_join(stopped, NULL) == 0);
}

/* Takes a slot, and leaves it again if told so. Returns its generation. */
static void *take_and_leave(void *leaves) {
    ForebayThread *thread = forebay_take_slot();
    uint64_t generation = thread->generation;
    CHECK(forebay_thread_here() == thread);
    if (leaves != NULL) {
        forebay_leave_slot();
        CHECK(forebay_thread_here() == &forebay_threads[0]);
        forebay_give_slot_back(thread->number);
    }
    return (void *)generation;
}

static uint64_t generation_in_thread(bool leaves) {
    pthread_t thread;
    void *generation;
    CHECK(pthread_create(&thread, NULL, take_and_leave, leaves ? "leaves" : NULL) == 0);
    CHECK(pthread_join(thread, &generation) == 0);
    return (uint64_t)generation;
}

static void slots(void) {
    CHECK(!forebay_any_slot_taken());
    uint64_t first = generation_in_thread(true);
    CHECK(!forebay_any_slot_taken());
    /* The next owner of the slot has another generation, so the former owner's lines are not its own. */
    CHECK(generation_in_thread(true) > first);
    for (int i = 1; i <= FOREBAY_THREADS; i++) {
        uint64_t last = forebay_threads[i].generation;
        CHECK(generation_in_thread(false) > last);
        CHECK(forebay_threads[i].generation > last);
    }
    CHECK(forebay_take_slot()->number == 0);
    forebay_give_slot_back(70);
    CHECK(forebay_take_slot()->number == 70);
    forebay_leave_slot();
    forebay_give_slot_back(70);
}

static void fork_beside_counts(void) {
    /* Threads that have ended without leaving their slots, for the child as those of its parent. */
    for (int i = 1; i <= 70; i++)
        generation_in_thread(false);
    ForebayThread *own = forebay_take_slot();
    CHECK(own->number == 71);
    /* A thread of the parent that counts at the moment of the fork. */
    forebay_threads[1].counting = 1;
    uint64_t generation = own->generation, forks = forebay_forks;
    pid_t child = fork();
    if (child == 0) {
        CHECK(forebay_forks == forks + 1 && own->generation > generation && forebay_threads[1].generation > generation);
        CHECK(forebay_thread_here() == own);
        forebay_next_generation();
        forebay_wait_for_counts();
        forebay_thread = NULL;
        CHECK(forebay_take_slot()->number == 1);
        CHECK(forebay_slots_taken[0] == 1 && forebay_slots_taken[1] == UINT64_C(1) << 6);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(forebay_forks == forks && own->generation == generation);
}

int main(int argc, char **argv) {
    CHECK(argc >= 2 && forebay_begin_threads() == 0);
    if (argc == 3) {
        /* As where the kernel has no membarrier: each thread executes the barrier itself. */
        CHECK(strcmp(argv[2], "fences") == 0);
        forebay_has_membarrier = false;
        for (int i = 0; i <= FOREBAY_THREADS; i++)
            forebay_threads[i].fences = 1;
    }
    if (strcmp(argv[1], "close") == 0) {
        close_beside_counts();
    } else if (strcmp(argv[1], "shared") == 0) {
        share_a_line();
    } else if (strcmp(argv[1], "wait") == 0) {
        close_waits();
    } else if (strcmp(argv[1], "slots") == 0) {
        slots();
    } else {
        CHECK(strcmp(argv[1], "fork") == 0);
        fork_beside_counts();
    }
    return 0;
}
