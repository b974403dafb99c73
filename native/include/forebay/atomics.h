/* The atomic operations on a segment, the memory order in each name.
 *
 * The 128-bit operations are written out because compilers turn the portable builtins into calls to libatomic,
 * which may take a lock: that would be neither lock-free nor, with a lock per process, atomic between processes.
 */
#ifndef FOREBAY_ATOMICS_H
#define FOREBAY_ATOMICS_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"
#include "platform.h"

/* For the lists of limiters and extents, which the explorer doesn't cover. */
static inline uint32_t forebay_load_acquire32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

static inline void forebay_store_release32(uint32_t *p, uint32_t value) {
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

#ifdef FOREBAY_EXPLORE
#include "explored_atomics.h" /* of native/interleave, which runs every interleaving of these */
#else

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#else
#include <sys/auxv.h>
#endif

static inline uint64_t forebay_load_relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

static inline uint64_t forebay_load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

/* Never older than the value of the last `..._seq_cst` operation on that word. */
static inline uint64_t forebay_load_seq_cst(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

static inline void forebay_store_relaxed(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }

static inline void forebay_store_release(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

static inline uint64_t forebay_fetch_add_relaxed(uint64_t *p, uint64_t value) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

static inline void forebay_set_bits_acq_rel(uint64_t *p, uint64_t bits) {
    __atomic_fetch_or(p, bits, __ATOMIC_ACQ_REL);
}

static inline void forebay_clear_bits_acq_rel(uint64_t *p, uint64_t bits) {
    __atomic_fetch_and(p, ~bits, __ATOMIC_ACQ_REL);
}

static inline bool forebay_cas_acq_rel(uint64_t *p, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* For reading, even where a write may follow: fetching a line for writing takes it away from the other cores, and a
 * denial, which is not known yet, must not do that. */
static inline void forebay_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

/* Whether one 16-byte load is one access on this processor: AVX says so on x86-64 (Intel SDM volume 3, 9.1.1;
 * AMD has confirmed the same), LSE2 on aarch64. Set once, when the extension that includes this is loaded. */
static bool forebay_wide_loads_are_atomic;
#if defined(__aarch64__)
static bool forebay_has_lse;
#endif

__attribute__((constructor)) static void forebay_detect_processor(void) {
#if defined(__x86_64__)
    unsigned int eax, ebx, ecx = 0, edx;
    forebay_wide_loads_are_atomic = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_AVX);
#else
    unsigned long features = getauxval(AT_HWCAP);
    forebay_wide_loads_are_atomic = features & (1UL << 25); /* HWCAP_USCAT */
    forebay_has_lse = features & (1UL << 8);                /* HWCAP_ATOMICS */
#endif
}

/* Compare and swap of a whole cell. A full barrier on x86-64, acquire and release on aarch64. */
static inline bool forebay_cas128_acq_rel(ForebayCell *cell, ForebayCell expected, ForebayCell desired) {
#if defined(__SANITIZE_THREAD__)
    /* The thread sanitizer doesn't see into assembly; it has the builtins for itself. */
    unsigned __int128 old = (unsigned __int128)expected.state << 64 | expected.tag;
    unsigned __int128 new = (unsigned __int128)desired.state << 64 | desired.tag;
    return __atomic_compare_exchange_n((unsigned __int128 *)cell, &old, new, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
#elif defined(__x86_64__)
    bool swapped;
    __asm__ __volatile__("lock cmpxchg16b %1"
                         : "=@ccz"(swapped), "+m"(*cell), "+a"(expected.tag), "+d"(expected.state)
                         : "b"(desired.tag), "c"(desired.state)
                         : "memory");
    return swapped;
#else
    if (__builtin_expect(forebay_has_lse, 1)) {
        register uint64_t old_tag __asm__("x0") = expected.tag;
        register uint64_t old_state __asm__("x1") = expected.state;
        register uint64_t new_tag __asm__("x2") = desired.tag;
        register uint64_t new_state __asm__("x3") = desired.state;
        __asm__ __volatile__(".arch_extension lse\n\tcaspal x0, x1, x2, x3, [%[cell]]"
                             : "+r"(old_tag), "+r"(old_state)
                             : "r"(new_tag), "r"(new_state), [cell] "r"(cell)
                             : "memory");
        return old_tag == expected.tag && old_state == expected.state;
    }
    /* The exclusive pair is retried only when the reservation was lost, never because of the value. */
    uint64_t tag, state;
    uint32_t failed;
    do {
        __asm__ __volatile__("ldaxp %0, %1, %2" : "=&r"(tag), "=&r"(state) : "Q"(*cell) : "memory");
        bool same = tag == expected.tag && state == expected.state;
        ForebayCell stored = same ? desired : (ForebayCell){tag, state};
        /* Storing back what was read proves that both halves belong together (Arm ARM, LDXP). */
        __asm__ __volatile__("stlxp %w0, %2, %3, %1"
                             : "=&r"(failed), "=Q"(*cell)
                             : "r"(stored.tag), "r"(stored.state)
                             : "memory");
        if (!failed) return same;
    } while (true);
#endif
}

/* The same, and ordered before every later `..._seq_cst` load, on any word. It needs no other instructions: on x86-64 a
 * locked instruction is a full barrier; on aarch64 a load by LDAR is not reordered before an earlier store with release
 * (Arm ARM, B2.3, barrier-ordered-before). */
static inline bool forebay_cas128_seq_cst(ForebayCell *cell, ForebayCell expected, ForebayCell desired) {
    return forebay_cas128_acq_rel(cell, expected, desired);
}

/* Both halves of a cell as they were at one instant. Where the processor has no such load, a CAS of the cell
 * with itself: correct, but a write. */
static inline ForebayCell forebay_load128_acquire(ForebayCell *cell) {
    ForebayCell value;
#if defined(__SANITIZE_THREAD__)
    unsigned __int128 both = __atomic_load_n((unsigned __int128 *)cell, __ATOMIC_ACQUIRE);
    return (ForebayCell){(uint64_t)both, (uint64_t)(both >> 64)};
#endif
    if (__builtin_expect(forebay_wide_loads_are_atomic, 1)) {
#if defined(__x86_64__)
        __m128i both;
        __asm__ __volatile__("movdqa %1, %0" : "=x"(both) : "m"(*cell) : "memory");
        value.tag = (uint64_t)_mm_cvtsi128_si64(both);
        value.state = (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(both, both));
#else
        __asm__ __volatile__("ldp %0, %1, %2\n\tdmb ishld"
                             : "=&r"(value.tag), "=&r"(value.state)
                             : "Q"(*cell)
                             : "memory");
#endif
        return value;
    }
    do {
        value.tag = forebay_load_acquire(&cell->tag);
        value.state = forebay_load_acquire(&cell->state);
    } while (!forebay_cas128_acq_rel(cell, value, value));
    return value;
}

#endif

#endif
