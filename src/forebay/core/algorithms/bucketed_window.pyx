"""Bucketed window: the sum of the newest sub-windows, decided by one CAS.

State
-----
The cell's state is of KIND_COUNT (see counts.pxd). The record has one *mark* per bucket of the window, at the bucket's
number modulo `buckets`:

              63                          low_bits                     0
    state      +------------------------------+------------------------+
               | when the newest bucket leaves| running total          |
               +------------------------------+------------------------+
    mark       | number of its bucket         | total at its beginning |
               +------------------------------+------------------------+

The *newest bucket* is the one in which the key was last allowed something; the state has the time at which it leaves
the window. The *running total*, modulo ``2**low_bits``, is of all permits so far. A bucket has a mark if the key was
allowed something in it. The window's sum is the running total less the mark of its first bucket that has one.

Transitions
-----------
* *mark*: a request in a bucket without a mark, before its CAS of the state. Mark -> (bucket, total that it has read),
  only if that is later or larger. acq_rel CAS. "bucketed window: hits"
* *charge*: a request whose window has room. State -> (newest bucket, total + n). 128-bit acq_rel CAS. If the CAS fails
  because the total has grown, the next attempt raises the mark with it. "bucketed window: two each"
* *give back*: a refund. Raises marks, from the newest bucket's down, by what is given back, but the newest one at most
  to the total. acq_rel CAS. "bucketed window: hits and a refund"
* *start afresh*: a request that finds nothing in the window, because the cell's time has come or another key moves in.
  It raises all marks in the window to the total. acq_rel CAS. "bucketed window: a clean start after an eviction"

Marks only grow, to a later bucket or a larger total. So does the total, which belongs to the cell: it goes on when a
key's time has come and another key moves in.

Invariant
---------
Every allowed request was judged by the window's sum.

Proof
-----
When a CAS moves the state into a bucket, the bucket's mark is the total that the CAS replaced. It is not less, because
the CAS's process had written it. It is not more, because any other process had written an earlier total of the same
cell. The CAS fails unless the state is the one that was judged. Marks of past buckets grow only by permits given back.
A clock reading from before the state's bucket counts as a reading in that bucket (I-7).

SYNC mark -> state: a process that reads a state by an acquire load sees the mark of its bucket. The process that wrote
the state had written that mark before, by a CAS, and its CAS of the state released it. So had every process before it,
for the buckets before.

*A denial* reads marks after the state. It holds only if the state is still the same then, which the table checks (a
seqlock read).

*Giving back.* A window that holds the newest bucket holds that much less, and the marks never fall from one bucket to
the next.

*A stale clock.* The mark of a bucket takes the place of the mark of the bucket `buckets` before it, which may still be
in the window of a process whose reading is older. That process finds the mark of a later bucket in a place of its
window. Then it takes that bucket for the current one (I-7).

Crash and stall
---------------
A mark that is too small is the safe side: the sum is too large. A crash or a stall can leave no more than that: a mark
for a bucket that the state never came to, with the total of some earlier time. A process that is killed while it gives
back leaves something that is not given back to windows that reach further back.

Not handled
-----------
A process that is stopped while half of what low_bits hold is allowed: it takes an old total for a new one
(docs/arithmetic.md).
"""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport count_time, low_mask, low_of, time_of
from forebay.core.cell_limiter cimport CellLimiter, allow_by
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams, record_of
from forebay.core.table.native cimport (
    FOREBAY_KIND_COUNT, ForebayCell, cas_acq_rel, load128_acquire, load_acquire,
)
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport TIME_BITS, Events, Next, Verdict, table_find, table_now

from forebay.core.limiter_arguments import bucket_bits, bucketed_shape
from forebay.rate import as_rate
from forebay.segment import layout
from forebay.segment.extents import Purpose, open_extent


# A state, decoded at a given time.
cdef struct Summed:
    uint64_t bucket              # the number of the current bucket
    uint64_t newest              # the number of the bucket in which the key was last allowed a permit
    bint fresh                   # nothing in the window; then `newest` means nothing
    uint64_t total               # the running total
    uint64_t sum                 # the window's sum


cdef inline uint64_t begin_ns(const LimitParams* params, uint64_t bucket) noexcept nogil:
    return bucket * params.period_ns - params.phase_ns


cdef inline uint64_t bucket_of(const LimitParams* params, uint64_t state) noexcept nogil:
    """The bucket of a state's last allowed request. Rounding up, by less than half a bucket, doesn't change it."""
    return (time_of(state, params.low_bits) + params.phase_ns) // params.period_ns - params.buckets


cdef inline uint64_t first_of(const LimitParams* params, uint64_t bucket) noexcept nogil:
    """The oldest bucket of the window that ends with `bucket`."""
    return bucket + 1 - params.buckets if bucket + 1 > <uint64_t>params.buckets else 0


cdef inline uint64_t base_of(
    const LimitParams* params, uint64_t* marks, uint64_t first, uint64_t last, uint64_t total, uint64_t* later
) noexcept nogil:
    """The running total before bucket `first`; `total` if nothing was allowed from it to `last`.

    If a bucket has lost its place to a later one, that is left in `later`, else 0.
    """
    cdef uint64_t bucket, mark
    cdef uint64_t slot = first % params.buckets
    later[0] = 0
    for bucket in range(first, last + 1):
        # SYNC mark -> state: the acquire load of the state came first, so the mark of its bucket is visible.
        mark = load_acquire(&marks[slot])
        if mark >> params.low_bits == bucket:
            return low_of(mark, params.low_bits)
        # One within the window but in a place that isn't its own is damage, like one at the end of time.
        if first + params.buckets <= mark >> params.low_bits <= (<uint64_t>1 << TIME_BITS) // params.period_ns:
            later[0] = mark >> params.low_bits
            return total
        slot = slot + 1 if slot + 1 < <uint64_t>params.buckets else 0
    return total


cdef inline Summed summed(
    const LimitParams* params, const ForebayCell* cell, uint64_t state, uint64_t now_ns
) noexcept nogil:
    cdef Summed summed
    cdef uint64_t leaves_ns = time_of(state, params.low_bits)
    cdef uint64_t later
    summed.bucket = (now_ns + params.phase_ns) // params.period_ns
    summed.total = low_of(state, params.low_bits)
    summed.fresh = cell == NULL or leaves_ns <= now_ns
    summed.sum = 0
    summed.newest = 0
    if not summed.fresh:
        summed.newest = bucket_of(params, state)
        summed.bucket = max(summed.bucket, summed.newest)
        while True:
            summed.sum = low_of(summed.total - base_of(
                params, record_of(params, cell), first_of(params, summed.bucket), summed.newest, summed.total, &later,
            ), params.low_bits)
            if later == 0:
                break
            summed.bucket = later
        summed.fresh = summed.bucket >= summed.newest + params.buckets
    return summed


cdef inline bint is_behind(const LimitParams* params, uint64_t mark, uint64_t total) noexcept nogil:
    """Whether a mark's total is less than this one. Totals that meet differ by less than half of what low_bits hold:
    more than are allowed while a process is stopped."""
    cdef uint64_t ahead = low_of(total - mark, params.low_bits)
    return ahead != 0 and ahead <= low_mask(params.low_bits) >> 1


cdef inline void raise_mark(
    const LimitParams* params, uint64_t* marks, uint64_t bucket, uint64_t total, bint new
) noexcept nogil:
    """Raise the bucket's mark to `total`, unless it is larger; write a missing mark only if it may be `new`."""
    cdef uint64_t* place = &marks[bucket % params.buckets]
    cdef uint64_t seen = load_acquire(place)
    while (
        is_behind(params, seen, total) if seen >> params.low_bits == bucket
        else new and seen >> params.low_bits < bucket
    ) and not cas_acq_rel(place, seen, bucket << params.low_bits | total):
        seen = load_acquire(place)


cdef void raise_marks(
    const LimitParams* params, uint64_t* marks, uint64_t first, uint64_t last, uint64_t total
) noexcept nogil:
    """Raise the marks of the buckets from `last` down to `first` to `total`."""
    cdef uint64_t bucket = last + 1
    while bucket > first:
        bucket -= 1
        raise_mark(params, marks, bucket, total, False)


cdef bint bucketed_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef Summed now = summed(params, cell, state, now_ns)
    if now.sum > charge.room:
        return False
    next.state = count_time(begin_ns(params, now.bucket + params.buckets), params.low_bits) | low_of(
        now.total + charge.amount, params.low_bits)
    return True


cdef void bucketed_prepare(
    ForebayCell* cell, uint64_t state, const Next* next, const void* parameters
) noexcept nogil:
    """Write the mark of a bucket before the first state in it."""
    cdef const LimitParams* params = (<const Charge*>parameters).params
    cdef uint64_t* marks = record_of(params, cell)
    cdef uint64_t total = low_of(state, params.low_bits)
    cdef uint64_t bucket = bucket_of(params, next.state)
    if (state ^ next.state) & ~low_mask(params.low_bits) == 0:
        return
    if time_of(state, params.low_bits) == 0 or bucket >= bucket_of(params, state) + params.buckets:
        raise_marks(params, marks, first_of(params, bucket), bucket, total)
    # SYNC mark -> state: the mark is written before the CAS that moves the state into its bucket.
    raise_mark(params, marks, bucket, total, True)


cdef bint bucketed_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Give back at most what the newest bucket holds; the state doesn't change."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef Summed now = summed(params, cell, state, now_ns)
    cdef uint64_t* marks = record_of(params, cell)
    cdef uint64_t bucket, first, mark, raised, raised_newer, amount
    cdef uint64_t ceiling = now.total            # of the mark
    cdef uint64_t newer_bucket = 0
    cdef uint64_t* newer = NULL                  # the mark that was raised before, of that bucket
    cdef uint64_t* place
    cdef ForebayCell seen
    if now.fresh:
        return False
    if charge.charged_state != 0 and (charge.charged_state ^ state) & ~low_mask(params.low_bits) != 0:
        return False
    first = first_of(params, now.bucket)
    bucket = now.newest + 1
    amount = charge.amount
    while bucket > first and amount != 0:
        bucket -= 1
        place = &marks[bucket % params.buckets]
        mark = load_acquire(place)
        while mark >> params.low_bits == bucket:
            raised = low_of(mark + amount, params.low_bits)
            if bucket == now.newest:
                # Read after the mark: other processes may have charged and given back since the first reading.
                seen = load128_acquire(cell)
                if seen.tag == tag and (seen.state ^ state) & ~low_mask(params.low_bits) == 0:
                    ceiling = low_of(seen.state, params.low_bits)
            elif newer != NULL:
                # Marks never fall from one bucket to the next. Another process may have raised the newer mark further.
                raised_newer = load_acquire(newer)
                if raised_newer >> params.low_bits == newer_bucket:
                    ceiling = low_of(raised_newer, params.low_bits)
            if is_behind(params, ceiling, raised):
                raised = ceiling
            if bucket == now.newest:
                amount = low_of(raised - mark, params.low_bits)
            if not is_behind(params, mark, raised) or cas_acq_rel(place, mark, bucket << params.low_bits | raised):
                ceiling = raised
                newer = place
                newer_bucket = bucket
                break
            mark = load_acquire(place)
            if bucket == now.newest:
                amount = charge.amount
    return False


cdef uint64_t until_sum(
    const LimitParams* params, const Verdict* verdict, const Summed* now, uint64_t most
) noexcept nogil:
    """The time until the window's sum is at most `most`, if nothing else is allowed.

    That is when the last bucket leaves at whose beginning the total was further behind than that.
    """
    cdef uint64_t bucket = now.newest + 1
    cdef uint64_t first = first_of(params, now.bucket)
    cdef uint64_t mark
    if verdict.cell == NULL:
        return begin_ns(params, now.newest + params.buckets) - verdict.now_ns
    while bucket > first:
        bucket -= 1
        mark = load_acquire(&record_of(params, verdict.cell)[bucket % params.buckets])
        if mark >> params.low_bits == bucket and low_of(now.total - mark, params.low_bits) > most:
            return begin_ns(params, bucket + params.buckets) - verdict.now_ns
    return 0


cdef void describe_buckets(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef Summed now = summed(params, verdict.cell, verdict.state, verdict.now_ns)
    if verdict.full:
        # Allowed because the table is full: describe it as if it had been counted.
        now.sum = charge.amount
        now.newest = now.bucket
    outlook.available = params.limit - now.sum if now.sum < params.limit else 0
    if not allowed:
        outlook.retry_after_ns = until_sum(params, verdict, &now, charge.room)
    if now.sum != 0:
        outlook.reset_after_ns = until_sum(params, verdict, &now, 0)


cdef uint64_t bucketed_used(ForebayCell* cell, uint64_t state, uint64_t now_ns, const void* context) noexcept nogil:
    """The window's sum, less one."""
    return max(summed(<const LimitParams*>context, cell, state, now_ns).sum, <uint64_t>1) - 1


@cython.final
cdef class BucketedWindow(CellLimiter):
    """At most as many permits as the rate allows, in the newest `buckets` sub-windows together.

    ``BucketedWindow(store, "api", "500/hour", buckets=60)``. A request is counted for the bucket it falls in, a
    period's `buckets`-th part (rounded up to the nanosecond) that begins at a multiple of its length by the wall
    clock.

    `keys` is how many keys can be live at once, that is, have a permit in the window; by default as many as half a
    megabyte holds, but at least 64. Each takes 8 bytes for every bucket. Room to find a key's place at once adds a
    third of that from 49 keys on, and up to two thirds for some dozens of keys.
    ``BucketedWindow.bytes_needed(buckets, keys=...)`` returns the total. The memory is taken when the limiter is first
    made, behind the store's table, and kept until the store is unlinked.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``, and ``SegmentSpaceError`` with the bytes needed if
    there is no room. Threads, processes, fork: see ``Limiter``.

    A decision takes one CAS, and a second one for a bucket's first; a denied one writes nothing shared. It reads the
    mark of the window's oldest bucket, and on to the first bucket in which the key was allowed something: at most
    all. Guarantee: never more than the limit in `buckets` buckets that follow each other; so at most that in any span
    of a period less one bucket, and at worst twice that in a whole period. A refund gives back at most what the
    newest bucket holds. A limit is below 2**30; up to a quarter of a bucket's length in ns it is accepted, above half
    of that refused.
    """

    cdef readonly object rate
    cdef readonly int buckets
    cdef Extent extent

    def __cinit__(self, store, name, rate, buckets=60, *, keys=None):
        self.rate = as_rate(rate)
        extent_shape = bucketed_shape(buckets, keys, name)
        self.kind = FOREBAY_KIND_COUNT
        self.take = bucketed_take
        self.give_back = bucketed_give_back
        self.describe = describe_buckets
        self.buckets = self.params.buckets = buckets
        self.params.words_per_cell = buckets
        self.params.limit = self.params.rate_limit = self.rate.limit
        self.params.period_ns, self.params.low_bits = bucket_bits(self.rate, buckets)
        self.params.phase_ns = self.segment.wall_epoch_ns % self.params.period_ns
        encoding = b"bucketed %d %d %d" % (self.params.period_ns, buckets, self.params.low_bits)
        self.extent = open_extent(store.attachment, name, Purpose(
            algorithm=layout.ALGORITHM_BUCKETED_WINDOW, words_per_cell=buckets, low_bits=self.params.low_bits, limit=0,
            period_ns=self.params.period_ns), extent_shape.keys)
        self.table = self.extent.table
        self.table.prepare = bucketed_prepare
        self.table.used = bucketed_used
        self.table.used_context = &self.params
        self.table.kept_bits = self.params.low_bits
        self.params.cells = self.table.cells
        self.params.records = self.extent.records
        self.params.last_cell = self.extent.used_cells - 1
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_BUCKETED_WINDOW, encoding, self.params.limit)

    @cython.binding(False)
    def __init__(self, store, name, rate, buckets=60, *, keys=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    @staticmethod
    def bytes_needed(buckets=60, *, keys=None):
        """How many bytes a bucketed window of so many buckets and keys takes of its store's file system."""
        return bucketed_shape(buckets, keys, "").bytes

    def __repr__(self):
        return f"<BucketedWindow {self.name!r} {self.rate}, buckets={self.buckets}, keys={self.keys}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, bucketed_take, NULL)

    @property
    def keys(self):
        return self.extent.keys

    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil:
        cdef Summed now
        cdef uint64_t state
        cdef ForebayCell* cell = table_find(&self.table, tag, &state)
        if cell != NULL:
            now = summed(&self.params, cell, state, table_now(&self.table))
            if not now.fresh:
                raise_marks(
                    &self.params, record_of(&self.params, cell), first_of(&self.params, now.bucket), now.newest,
                    now.total)
