/* The process's thread slots, its generation and its count of forks: the state of core/table/threads.pyx, which alone
 * includes this. */
#ifndef FOREBAY_THREADS_H
#define FOREBAY_THREADS_H

#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "counting.h"

/* Every generation's number is drawn from here, so none comes twice. */
static uint64_t forebay_generation = 1;

static uint64_t forebay_forks = 0;

static ForebayThread forebay_threads[FOREBAY_THREADS + 1];

/* A bit for each slot from 1 on. */
static uint64_t forebay_slots_taken[FOREBAY_THREADS / 64];

/* The slot of the calling thread; NULL before it attaches. */
static __thread ForebayThread *forebay_thread;

static bool forebay_has_membarrier;

static ForebayThread *forebay_thread_here(void) { return forebay_thread; }

static void forebay_renew(ForebayThread *thread) {
    uint64_t drawn = __atomic_add_fetch(&forebay_generation, 1, __ATOMIC_ACQ_REL);
    __atomic_store_n(&thread->generation, drawn, __ATOMIC_RELEASE);
}

/* No line that any thread of this process has is its own any more. */
static void forebay_next_generation(void) {
    __atomic_add_fetch(&forebay_generation, 1, __ATOMIC_ACQ_REL);
    for (int i = 0; i <= FOREBAY_THREADS; i++)
        forebay_renew(&forebay_threads[i]);
}

static bool forebay_any_slot_taken(void) {
    for (int i = 0; i < FOREBAY_THREADS / 64; i++) {
        if (__atomic_load_n(&forebay_slots_taken[i], __ATOMIC_ACQUIRE) != 0) return true;
    }
    return false;
}

/* A free slot, now the calling thread's; slot 0 if there is none. */
static ForebayThread *forebay_take_slot(void) {
    for (int i = 0; i < FOREBAY_THREADS / 64; i++) {
        uint64_t taken = __atomic_load_n(&forebay_slots_taken[i], __ATOMIC_RELAXED);
        while (~taken != 0) {
            uint64_t bit = ~taken & (taken + 1);
            /* SYNC slot -> slot: acquires all that the former owner stored. */
            if (__atomic_compare_exchange_n(&forebay_slots_taken[i], &taken, taken | bit, false, __ATOMIC_ACQUIRE,
                                            __ATOMIC_RELAXED)) {
                forebay_thread = &forebay_threads[64 * i + __builtin_ctzll(bit) + 1];
                forebay_renew(forebay_thread);
                return forebay_thread;
            }
        }
    }
    forebay_thread = &forebay_threads[0];
    return forebay_thread;
}

/* The calling thread counts in shared lines from now on, until its end. */
static void forebay_leave_slot(void) { forebay_thread = &forebay_threads[0]; }

/* Give back a slot that its owner has left. */
static void forebay_give_slot_back(uint64_t number) {
    uint64_t bit = UINT64_C(1) << ((number - 1) % 64);
    /* SYNC slot -> slot */
    __atomic_fetch_and(&forebay_slots_taken[(number - 1) / 64], ~bit, __ATOMIC_RELEASE);
}

/* A full barrier in every thread of the process that runs, and in this one. */
static void forebay_barrier_everywhere(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    /* Registered once more, in case that this is the child of a fork. */
    if (forebay_has_membarrier && (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0 ||
                                   syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0)) {
        /* A sandbox has forbidden it since. A store leaves its processor's buffer in far less than this. */
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
}

/* Return once each other thread has been seen not counting since the last `forebay_next_generation`. */
static void forebay_wait_for_counts(void) {
    /* SYNC counting -> generation */
    forebay_barrier_everywhere();
    for (int i = 1; i <= FOREBAY_THREADS; i++) {
        if (&forebay_threads[i] == forebay_thread) continue;
        while (__atomic_load_n(&forebay_threads[i].counting, __ATOMIC_ACQUIRE) != 0)
            sched_yield();
    }
}

/* In the child of a fork, which has one thread. */
static void forebay_forked(void) {
    forebay_forks++;
    for (int i = 0; i < FOREBAY_THREADS / 64; i++)
        forebay_slots_taken[i] = 0;
    for (int i = 0; i <= FOREBAY_THREADS; i++)
        forebay_threads[i].counting = 0;
    if (forebay_thread != NULL && forebay_thread->number != 0) {
        forebay_slots_taken[(forebay_thread->number - 1) / 64] = UINT64_C(1) << ((forebay_thread->number - 1) % 64);
    }
    forebay_next_generation();
}

/* Once, at import. pthread_atfork and not os.register_at_fork: servers written in C fork without telling Python. */
static int forebay_begin_threads(void) {
    forebay_has_membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
    for (int i = 0; i <= FOREBAY_THREADS; i++) {
        forebay_threads[i].number = (uint64_t)i;
        forebay_threads[i].fences = !forebay_has_membarrier;
        forebay_renew(&forebay_threads[i]);
    }
    return pthread_atfork(NULL, NULL, forebay_forked);
}

#endif
