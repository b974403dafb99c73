/* 128-bit products, and a hint to the compiler: what Cython has no words for. */
#ifndef PENSTOCK_ARITHMETIC_H
#define PENSTOCK_ARITHMETIC_H

#include <stdbool.h>
#include <stdint.h>

#include "platform.h"

static inline bool penstock_likely(bool condition) { return __builtin_expect(condition, 1); }

/* The high half of the product: spreads `a` evenly over 0 to b - 1 (Lemire, "Fast random integer generation in an
 * interval", 2019). */
static inline uint64_t penstock_multiply_high(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b >> 64);
}

/* a * b / divisor, rounded up or down. The caller knows that the quotient fits. */
static inline uint64_t penstock_multiply_divide_up(uint64_t a, uint64_t b, uint64_t divisor) {
    return (uint64_t)(((unsigned __int128)a * b + (divisor - 1)) / divisor);
}

static inline uint64_t penstock_multiply_divide_down(uint64_t a, uint64_t b, uint64_t divisor) {
    return (uint64_t)((unsigned __int128)a * b / divisor);
}

#endif
