/* 128-bit products, bit search and a hint to the compiler: what Cython has no words for. */
#ifndef FOREBAY_ARITHMETIC_H
#define FOREBAY_ARITHMETIC_H

#include <stdbool.h>
#include <stdint.h>

#include "platform.h"

static inline bool forebay_likely(bool condition) { return __builtin_expect(condition, 1); }

/* The high half of the product: spreads `a` evenly over 0 to b - 1 (Lemire, "Fast random integer generation in an
 * interval", 2019). */
static inline uint64_t forebay_multiply_high(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b >> 64);
}

/* a * b / divisor, rounded up or down. The caller knows that the quotient fits. */
static inline uint64_t forebay_multiply_divide_up(uint64_t a, uint64_t b, uint64_t divisor) {
    return (uint64_t)(((unsigned __int128)a * b + (divisor - 1)) / divisor);
}

static inline uint64_t forebay_multiply_divide_down(uint64_t a, uint64_t b, uint64_t divisor) {
    return (uint64_t)((unsigned __int128)a * b / divisor);
}

/* The position of the lowest or highest bit that is set; there must be one. */
static inline int forebay_lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }

static inline int forebay_highest_bit(uint64_t bits) { return 63 - __builtin_clzll(bits); }

static inline int forebay_count_ones(uint64_t bits) { return __builtin_popcountll(bits); }

/* Whether a * b is below c * d. */
static inline bool forebay_product_below(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return (unsigned __int128)a * b < (unsigned __int128)c * d;
}

#endif
