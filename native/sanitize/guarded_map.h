/* For a fuzzer's build: reading or writing past an extent is noticed, whatever is mapped behind it. The pages
 * around it are inaccessible, and the address sanitizer guards the rest of its last page. Included before
 * everything else in each module; the one that maps is called with the GIL held.
 *
 * Not around the segment itself: that is mapped into a larger reservation, at an address of its own.
 */
#ifndef FOREBAY_GUARDED_MAP_H
#define FOREBAY_GUARDED_MAP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* as Python.h, which comes later: mremap */
#endif
#include <stddef.h>
#include <sys/mman.h>

void __asan_poison_memory_region(void const volatile *address, size_t size);
void __asan_unpoison_memory_region(void const volatile *address, size_t size);

enum { GUARD_BYTES = 4096, MOST_GUARDED = 1024 };

static void *guarded[MOST_GUARDED];

/* The place of a guarded mapping in the list; of NULL, a free one. MOST_GUARDED if there is none. */
static inline int guarded_place(const void *address) {
    int place = 0;
    while (place < MOST_GUARDED && guarded[place] != address)
        place++;
    return place;
}

static inline size_t guarded_pages(size_t size) { return (size + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES; }

static inline void *guarded_mmap(void *wanted, size_t size, int protection, int flags, int fd, off_t offset) {
    int place = guarded_place(NULL);
    if (wanted != NULL || fd < 0 || place == MOST_GUARDED) return mmap(wanted, size, protection, flags, fd, offset);
    size_t pages = guarded_pages(size);
    char *guard = mmap(NULL, pages + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (guard == MAP_FAILED) return guard;
    char *address = guard + GUARD_BYTES;
    if (mmap(address, size, protection, flags | MAP_FIXED, fd, offset) == MAP_FAILED) {
        munmap(guard, pages + 2 * GUARD_BYTES);
        return MAP_FAILED;
    }
    __asan_poison_memory_region(address + size, pages - size);
    guarded[place] = address;
    return address;
}

static inline int guarded_munmap(void *address, size_t size) {
    int place = guarded_place(address);
    if (place == MOST_GUARDED) return munmap(address, size);
    guarded[place] = NULL;
    size_t pages = guarded_pages(size);
    __asan_unpoison_memory_region((char *)address + size, pages - size);
    return munmap((char *)address - GUARD_BYTES, pages + 2 * GUARD_BYTES);
}

#define mmap guarded_mmap
#define munmap guarded_munmap

#endif
