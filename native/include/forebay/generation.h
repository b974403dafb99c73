/* The generation of this process: a number that changes when its counter lines and mappings may no longer be its own,
 * in the child of a fork and when a store is closed. Limiters compare it once per decision. Forks have a counter of
 * their own, because files opened before a fork are shared with the parent. */
#ifndef FOREBAY_GENERATION_H
#define FOREBAY_GENERATION_H

#include <pthread.h>
#include <stdint.h>

static uint64_t forebay_generation = 1;

static uint64_t forebay_forks = 0;

static void forebay_next_generation(void) { forebay_generation++; }

static void forebay_forked(void) {
    forebay_forks++;
    forebay_generation++;
}

/* pthread_atfork and not os.register_at_fork: servers written in C fork without telling Python. */
static int forebay_watch_forks(void) { return pthread_atfork(NULL, NULL, forebay_forked); }

#endif
