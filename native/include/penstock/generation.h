/* A number that changes whenever what this process holds of its segments may have ceased to be its own: in the
 * child of a fork, and when a store is closed. Limiters compare it once per decision. The forks are also counted by
 * themselves: files opened before one are shared with the parent. */
#ifndef PENSTOCK_GENERATION_H
#define PENSTOCK_GENERATION_H

#include <pthread.h>
#include <stdint.h>

static uint64_t penstock_generation = 1;

static uint64_t penstock_forks = 0;

static void penstock_next_generation(void) { penstock_generation++; }

static void penstock_forked(void) {
    penstock_forks++;
    penstock_generation++;
}

/* pthread_atfork and not os.register_at_fork: servers written in C fork without telling Python. */
static int penstock_watch_forks(void) { return pthread_atfork(NULL, NULL, penstock_forked); }

#endif
