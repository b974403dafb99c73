"""Deciding many keys in one call: some keys' cells are prefetched while other keys are decided.

Cache misses dominate the time of a large batch, so they overlap. Each key passes three stages:

1. Hash the key and prefetch its home line.
2. Half way to the decision, find its cell in that line, or prefetch the other lines of its probe set.
3. Decide.
"""

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t

from forebay.core.limiter cimport Charge, AfterCharge
from forebay.core.table.keys cimport hash_ascii_text, hash_key_of, is_ascii_text
from forebay.core.table.native cimport ForebayCell, ForebayHashKey, list_items, prefetch, show_to_collector
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, DENIED, UNDECIDED, Decide, Events, Outcome, Table, Verdict, find_in_line, fingerprint_of,
    home_line, no_events, prefetch_away, table_decide, table_now, table_peek, table_try_cell,
)


cdef enum:
    KEYS_AHEAD = 16                  # how far the next keys' objects are fetched ahead of hashing
    CELLS_AHEAD = 32                 # how many keys ahead of the decision the prefetch runs
    KEYS_PER_READING = 256           # a batch reads the clock once per this many keys: about every 10 microseconds


# A running batch. Each array has `size` elements.
cdef struct Batch:
    Py_ssize_t size
    PyObject** keys              # the caller holds references; NULL if all tags are already computed
    uint64_t* tags               # the result of a key replaces its tag
    Charge* charges                  # NULL: every request is `unit`
    const Charge* unit
    Table* table
    ForebayHashKey hash_key
    uint64_t kind
    PyObject* yes                # True and False
    PyObject* no
    uint64_t counter_line        # with its sequence; the limiter's own may change during the batch
    uint64_t* claim_sequence


cdef inline bint all_ascii_text(list keys, Py_ssize_t size) noexcept:
    """Whether `decide_batch_by` may hash these keys itself, while it waits for memory: that runs no Python code."""
    cdef PyObject** items = list_items(keys)
    cdef Py_ssize_t i
    if PyList_GET_SIZE(keys) < size:
        return False
    for i in range(size):
        if not is_ascii_text(items[i]):
            return False
    return True


cdef inline int hash_batch(list keys, const Batch* batch) except -1:
    """Compute the tag of every key."""
    cdef PyObject* key
    cdef object odd_key
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
            # With a reference: hashing an odd key may run Python code, and that may remove the key from the list.
            odd_key = <object>key
            batch.tags[i] = fingerprint_of(hash_key_of(odd_key, batch.hash_key)) | batch.kind
    return 0


cdef inline void own_results(list results, uint64_t allowed) noexcept:
    """Take the references of a list that holds `allowed` times True, and else False."""
    cdef uint64_t _
    for _ in range(allowed):
        Py_INCREF(True)
    for _ in range(<uint64_t>PyList_GET_SIZE(results) - allowed):
        Py_INCREF(False)
    show_to_collector(results)


cdef inline void fetch_home(const Table* table, const Batch* batch, Py_ssize_t i) noexcept nogil:
    """Hash key i, if its tag is not computed yet, and prefetch its home line."""
    if batch.keys != NULL:
        batch.tags[i] = fingerprint_of(hash_ascii_text(batch.keys[i], batch.hash_key)) | batch.kind
    prefetch(home_line(table, batch.tags[i]))


cdef inline ForebayCell* find_home(const Table* table, const Batch* batch, Py_ssize_t i) noexcept nogil:
    """Key i's cell in its home line; or NULL, after a prefetch of the other lines of its probe set."""
    cdef ForebayCell* cell = find_in_line(home_line(table, batch.tags[i]), batch.tags[i])
    if cell == NULL:
        prefetch_away(batch.table, batch.tags[i])
    return cell


cdef inline uint64_t decide_batch_by(
    const Batch* given, Events* events, Decide take, AfterCharge after_charge
) noexcept nogil:
    """Decide the batch without counting it; return how many were allowed. Inlined, with constant functions."""
    # Copies stay in registers, as no call gets their address.
    cdef Batch batch = given[0]
    cdef Table table = batch.table[0]
    cdef ForebayCell* cells[CELLS_AHEAD]        # a ring: the keys between the second stage and the third
    cdef uint64_t* tags = batch.tags
    cdef const Charge* charge = batch.unit
    cdef uint64_t now_ns = 0
    cdef uint64_t allowed = 0
    cdef Verdict verdict
    cdef ForebayCell* cell
    cdef Outcome outcome
    cdef Py_ssize_t i
    events[0] = no_events()
    for i in range(min(batch.size, CELLS_AHEAD)):
        fetch_home(&table, &batch, i)
    for i in range(min(batch.size, CELLS_AHEAD // 2)):
        cells[i] = find_home(&table, &batch, i)
    for i in range(batch.size):
        if i + CELLS_AHEAD < batch.size:
            fetch_home(&table, &batch, i + CELLS_AHEAD)
        if i + CELLS_AHEAD // 2 < batch.size:
            cells[(i + CELLS_AHEAD // 2) % CELLS_AHEAD] = find_home(&table, &batch, i + CELLS_AHEAD // 2)
        if i % KEYS_PER_READING == 0:
            now_ns = table_now(&table)
        if batch.charges != NULL:
            charge = &batch.charges[i]
        if charge.amount == 0:
            outcome = ALLOWED if table_peek(batch.table, tags[i], now_ns, take, charge, &verdict) else DENIED
        else:
            cell = cells[i % CELLS_AHEAD]
            outcome = UNDECIDED
            if cell != NULL:
                outcome = table_try_cell(&table, cell, tags[i], now_ns, take, charge, &verdict)
            verdict.now_ns = now_ns
            if outcome > ALLOWED:
                events.cas_retries += outcome == CAS_FAILED
                table_decide(
                    batch.table, tags[i], batch.counter_line, batch.claim_sequence, take, charge, &verdict, events)
                # An insertion has read the clock again; the key's next request must not be judged by an older reading.
                now_ns = max(now_ns, verdict.now_ns)
                outcome = verdict.outcome
            if after_charge != NULL and outcome == ALLOWED:
                after_charge(charge, &verdict)
        tags[i] = <uint64_t>(batch.yes if outcome == ALLOWED else batch.no)
        allowed += outcome == ALLOWED
    return allowed
