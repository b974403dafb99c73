"""The work of a batch on Python's lists, before and after its decisions."""

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t

from forebay.core.table.keys cimport hash_ascii_text, hash_key_of, is_ascii_text
from forebay.core.table.native cimport list_items, prefetch, show_to_collector
from forebay.core.table.table cimport fingerprint_of


cdef enum:
    KEYS_AHEAD = 16                  # how far the next keys' objects are fetched ahead of hashing


cdef bint all_ascii_text(list keys, Py_ssize_t size) noexcept:
    cdef PyObject** items = list_items(keys)
    cdef Py_ssize_t i
    if PyList_GET_SIZE(keys) < size:
        return False
    for i in range(size):
        if not is_ascii_text(items[i]):
            return False
    return True


cdef int hash_batch(list keys, const Batch* batch) except -1:
    cdef PyObject* key
    cdef Py_ssize_t i
    for i in range(batch.size):
        # Reading the costs may have run Python code, and hashing an odd key may: it may have shortened the list.
        if i + KEYS_AHEAD < PyList_GET_SIZE(keys):
            prefetch(<const char*>PyList_GET_ITEM(keys, i + KEYS_AHEAD))
            prefetch(<const char*>PyList_GET_ITEM(keys, i + KEYS_AHEAD) + 63)
        elif i >= PyList_GET_SIZE(keys):
            raise RuntimeError("the list of keys was shortened while it was read")
        key = PyList_GET_ITEM(keys, i)
        # Without taking a reference, which would write to every key's memory: no Python code runs in between.
        if is_ascii_text(key):
            batch.tags[i] = fingerprint_of(hash_ascii_text(key, batch.hash_key)) | batch.kind
        else:
            batch.tags[i] = fingerprint_of(hash_key_of(<object>key, batch.hash_key)) | batch.kind
    return 0


cdef void own_results(list results, uint64_t allowed) noexcept:
    cdef uint64_t _
    for _ in range(allowed):
        Py_INCREF(True)
    for _ in range(<uint64_t>PyList_GET_SIZE(results) - allowed):
        Py_INCREF(False)
    show_to_collector(results)
