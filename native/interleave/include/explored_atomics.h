/* forebay's atomic operations as the interleaving explorer sees them: every access to shared memory is a step. */
#ifndef FOREBAY_EXPLORED_ATOMICS_H
#define FOREBAY_EXPLORED_ATOMICS_H

#include "../explore.h"
#include "forebay/layout.h"

static inline uint64_t forebay_load_relaxed(const uint64_t *p) { return explore_load(p, EXPLORE_RELAXED); }

static inline uint64_t forebay_load_acquire(const uint64_t *p) { return explore_load(p, EXPLORE_ACQUIRE); }

static inline uint64_t forebay_load_seq_cst(const uint64_t *p) { return explore_load(p, EXPLORE_SEQ_CST); }

static inline void forebay_store_relaxed(uint64_t *p, uint64_t value) { explore_store(p, value, false); }

static inline void forebay_store_release(uint64_t *p, uint64_t value) { explore_store(p, value, true); }

static inline uint64_t forebay_fetch_add_relaxed(uint64_t *p, uint64_t value) {
    return explore_update(p, EXPLORE_ADD, value, false);
}

static inline void forebay_set_bits_acq_rel(uint64_t *p, uint64_t bits) { explore_update(p, EXPLORE_OR, bits, true); }

static inline void forebay_clear_bits_acq_rel(uint64_t *p, uint64_t bits) {
    explore_update(p, EXPLORE_AND, ~bits, true);
}

static inline bool forebay_cas_acq_rel(uint64_t *p, uint64_t expected, uint64_t desired) {
    return explore_cas(p, expected, desired);
}

static inline void forebay_prefetch(const void *p) { (void)p; }

static inline ForebayCell forebay_load128_acquire(ForebayCell *cell) {
    uint64_t value[2];
    explore_load128(&cell->tag, value);
    return (ForebayCell){value[0], value[1]};
}

static inline bool forebay_cas128(ForebayCell *cell, ForebayCell expected, ForebayCell desired, ExploreOrder order) {
    const uint64_t from[2] = {expected.tag, expected.state}, to[2] = {desired.tag, desired.state};
    return explore_cas128(&cell->tag, from, to, order);
}

static inline bool forebay_cas128_acq_rel(ForebayCell *cell, ForebayCell expected, ForebayCell desired) {
    return forebay_cas128(cell, expected, desired, EXPLORE_ACQUIRE);
}

static inline bool forebay_cas128_seq_cst(ForebayCell *cell, ForebayCell expected, ForebayCell desired) {
    return forebay_cas128(cell, expected, desired, EXPLORE_SEQ_CST);
}

#endif
