/* The host's monotonic clocks, read through the vDSO. */
#ifndef FOREBAY_CLOCK_H
#define FOREBAY_CLOCK_H

#include <stdint.h>
#include <time.h>

#include "platform.h"

#ifdef FOREBAY_EXPLORE
#include "explored_atomics.h"

static inline uint64_t forebay_monotonic_ns(void) { return explore_clock(); }
#else
static inline uint64_t forebay_monotonic_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}
#endif

/* Some milliseconds late, and a third of the cost. */
static inline uint64_t forebay_coarse_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

#endif
