/* For the thread sanitizer's build: shows the sanitizer what a critical section of free-threaded CPython orders. The
 * interpreter is not compiled with the sanitizer, which so sees neither the lock nor its owner. Included before
 * everything else in each module.
 */
#ifndef FOREBAY_CRITICAL_SECTIONS_H
#define FOREBAY_CRITICAL_SECTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef Py_GIL_DISABLED

void __tsan_acquire(void *address);
void __tsan_release(void *address);

static inline void forebay_seen_begin(PyCriticalSection *section, PyObject *object) {
    PyCriticalSection_Begin(section, object);
    __tsan_acquire(&object->ob_mutex);
}

static inline void forebay_seen_end(PyCriticalSection *section) {
    /* NULL if an outer section of the same thread has the lock, which then releases. */
    if (section->_cs_mutex != NULL) __tsan_release(section->_cs_mutex);
    PyCriticalSection_End(section);
}

#define PyCriticalSection_Begin forebay_seen_begin
#define PyCriticalSection_End forebay_seen_end

#endif
#endif
