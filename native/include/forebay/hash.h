/* SipHash-1-3 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012), the variant that CPython and Rust
 * use for their tables: keyed, so that a client without the key can't craft keys that collide. */
#ifndef FOREBAY_HASH_H
#define FOREBAY_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "platform.h"

typedef struct ForebayHashKey {
    uint64_t k0, k1;
} ForebayHashKey;

static inline uint64_t forebay_rotl(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static inline void forebay_sip_round(uint64_t *restrict v0, uint64_t *restrict v1, uint64_t *restrict v2,
                                     uint64_t *restrict v3) {
    *v0 += *v1;
    *v2 += *v3;
    *v1 = forebay_rotl(*v1, 13) ^ *v0;
    *v3 = forebay_rotl(*v3, 16) ^ *v2;
    *v0 = forebay_rotl(*v0, 32);
    *v2 += *v1;
    *v0 += *v3;
    *v1 = forebay_rotl(*v1, 17) ^ *v2;
    *v3 = forebay_rotl(*v3, 21) ^ *v0;
    *v2 = forebay_rotl(*v2, 32);
}

/* The last 0 to 7 bytes of a message of `size` bytes, little-endian, without reading outside of it. */
static inline uint64_t forebay_tail(const uint8_t *data, size_t size) {
    size_t left = size & 7;
    uint64_t word = 0;
    if (left == 0) return 0;
    if (size >= 8) {
        memcpy(&word, data + size - 8, 8);
        return word >> (64 - 8 * left);
    }
    if (left >= 4) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + left - 4, 4);
        return low | (uint64_t)high << (8 * left - 32);
    }
    /* One to three bytes: first, middle and last cover them all. */
    return data[0] | (uint64_t)data[left >> 1] << (8 * (left >> 1)) | (uint64_t)data[left - 1] << (8 * (left - 1));
}

static inline uint64_t forebay_siphash13(ForebayHashKey key, const uint8_t *data, size_t size) {
    uint64_t v0 = key.k0 ^ UINT64_C(0x736f6d6570736575);
    uint64_t v1 = key.k1 ^ UINT64_C(0x646f72616e646f6d);
    uint64_t v2 = key.k0 ^ UINT64_C(0x6c7967656e657261);
    uint64_t v3 = key.k1 ^ UINT64_C(0x7465646279746573);
    uint64_t last = (uint64_t)size << 56 | forebay_tail(data, size);
    for (const uint8_t *end = data + (size & ~(size_t)7); data != end; data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        v3 ^= word;
        forebay_sip_round(&v0, &v1, &v2, &v3);
        v0 ^= word;
    }
    v3 ^= last;
    forebay_sip_round(&v0, &v1, &v2, &v3);
    v0 ^= last;
    v2 ^= 0xff;
    forebay_sip_round(&v0, &v1, &v2, &v3);
    forebay_sip_round(&v0, &v1, &v2, &v3);
    forebay_sip_round(&v0, &v1, &v2, &v3);
    return v0 ^ v1 ^ v2 ^ v3;
}

#endif
