"""One limit's part of a request to several limits, where the limit's state is one cell.

all_of.pyx has the protocol, and what a crash leaves. Nothing here needs the GIL, so Python's limiters and native
threads take the same steps.
"""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.limiter cimport AfterCharge, Attempt, Charge
from forebay.core.table.native cimport ForebayCell, cas128_acq_rel, load128_acquire
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, DENIED, UNDECIDED, Decide, Events, Next, Outcome, Table, find_in_line, home_line,
    table_decide, table_find, table_now,
)


cdef inline bint check_attempt(Table* table, Attempt* attempt, uint64_t now_ns, Decide take) noexcept nogil:
    """Whether the limit would allow its part now. Writes nothing."""
    cdef ForebayCell* cell = find_in_line(home_line(table, attempt.tag), attempt.tag)
    cdef Next next
    cdef bint allowed
    if cell != NULL:
        attempt.seen = load128_acquire(cell)
        if attempt.seen.tag != attempt.tag:
            cell = NULL
    if cell == NULL:
        cell = table_find(table, attempt.tag, &attempt.seen.state)
        attempt.seen.tag = attempt.tag
    attempt.verdict.cell = cell
    attempt.verdict.full = False
    attempt.verdict.tag = attempt.tag
    attempt.verdict.now_ns = now_ns
    attempt.verdict.state = attempt.seen.state
    attempt.wanted.tag = attempt.tag
    allowed = take(cell, attempt.tag, attempt.seen.state, now_ns, attempt.charge, &next)
    attempt.wanted.state = next.state
    attempt.verdict.decided_ns = next.decided_ns
    attempt.verdict.outcome = ALLOWED if allowed else DENIED
    return allowed


cdef inline Outcome try_attempt(const Table* table, Attempt* attempt, AfterCharge after_charge) noexcept nogil:
    """Charge the part by a CAS from the state that was checked. An outcome above ALLOWED is for `commit_attempt`."""
    cdef Next next
    if attempt.charge.amount == 0:
        return ALLOWED
    if attempt.verdict.cell == NULL:
        return UNDECIDED
    if table.prepare != NULL:
        next.state = attempt.wanted.state
        next.decided_ns = attempt.verdict.decided_ns
        table.prepare(attempt.verdict.cell, attempt.seen.state, &next, attempt.charge)
    if not cas128_acq_rel(attempt.verdict.cell, attempt.seen, attempt.wanted):
        return CAS_FAILED
    attempt.verdict.state = attempt.wanted.state
    if after_charge != NULL:
        after_charge(attempt.charge, &attempt.verdict)
    return ALLOWED


cdef inline bint commit_attempt(
    Table* table, uint64_t counter_line, uint64_t* claim_sequence, Attempt* attempt, Decide take,
    AfterCharge after_charge, Events* events,
) noexcept nogil:
    """Charge the part by a new decision. Whether the limit allows it."""
    attempt.verdict.full = False
    attempt.verdict.now_ns = table_now(table)
    table_decide(table, attempt.tag, counter_line, claim_sequence, take, attempt.charge, &attempt.verdict, events)
    if attempt.verdict.outcome == ALLOWED and after_charge != NULL:
        after_charge(attempt.charge, &attempt.verdict)
    return attempt.verdict.outcome == ALLOWED


cdef inline bint charge_to_return(const Attempt* attempt, Charge* charge) noexcept nogil:
    """Find the charge of the part, to be given back. False if it has left no charge."""
    charge[0] = attempt.charge[0]
    charge.charged_state = attempt.verdict.state
    # A request that was allowed because the table was full has left no charge.
    return charge.amount != 0 and not attempt.verdict.full


cdef inline bint binds(
    bint request_allowed, bint allowed, uint64_t remaining, uint64_t least, uint64_t retry_after_ns, int64_t longest_ns
) noexcept nogil:
    """Whether a limit binds a request more than the limits before it, of which `least` remain and `longest_ns` is the
    time to a retry; -1: there is none.

    The limit with the fewest remaining permits binds an allowed request. A denied request is bound by the limit with
    the longest time to a retry, among those that denied it.
    """
    return remaining < least if request_allowed else not allowed and <int64_t>retry_after_ns > longest_ns
