"""Decisions of native threads: the C API's functions for limiters whose state is one cell."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_BOOK, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_DENIED, FOREBAY_INVALID_ARGUMENT,
    FOREBAY_INVALID_RATE, FOREBAY_MOST_LIMITS, FOREBAY_OK, FOREBAY_WRONG_LIMITER, forebay_request, forebay_result,
)
from forebay.core.algorithms.gcra cimport gcra_take
from forebay.core.attempt cimport binds, charge_to_return, check_attempt, commit_attempt, try_attempt
from forebay.core.batch cimport Batch
from forebay.core.c_api.handles cimport (
    DECIDES, DecidingThread, RateHandle, begin, can_be, check_key, count, count_decision, count_events, ensure_usable,
    note_denied, read_key,
)
from forebay.core.cell_limiter cimport begin_decision, begin_decision_at, set_outlook
from forebay.core.decision cimport Outlook, no_outlook, remaining_in
from forebay.core.limiter cimport Attempt, Charge, LimitParams
from forebay.core.table.native cimport prefetch, siphash13
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, DENIED, Events, Outcome, Verdict, fingerprint_of, home_line, no_events, table_amend,
    table_decide, table_now, table_peek, table_remove,
)


cdef inline int32_t decide_tag(
    DecidingThread thread, uint64_t tag, const Charge* charge, Verdict* verdict
) noexcept nogil:
    """Decide one request and count it: `decide_by` for a native thread."""
    cdef Outcome outcome
    if thread.is_gcra:
        # The compiler puts it in here, and most limiters are such.
        outcome = begin_decision(&thread.table, tag, charge, verdict, gcra_take)
    else:
        outcome = begin_decision(&thread.table, tag, charge, verdict, thread.take)
    return complete_decision(thread, tag, charge, verdict, outcome)


cdef inline int32_t complete_decision(
    DecidingThread thread, uint64_t tag, const Charge* charge, Verdict* verdict, Outcome outcome
) noexcept nogil:
    cdef Events events
    if outcome > ALLOWED:
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &thread.table, tag, thread.counter_line, &thread.counters.claims, thread.take, charge, verdict, &events)
        count_events(thread, &events)
    if verdict.outcome == ALLOWED:
        if thread.after_charge != NULL:
            thread.after_charge(charge, verdict)
        count_decision(thread, True, tag)
        return FOREBAY_ALLOWED
    count_decision(thread, False, tag)
    return FOREBAY_DENIED


cdef int32_t allow_tag(DecidingThread thread, uint64_t tag) noexcept nogil:
    cdef Verdict verdict
    cdef int32_t status = ensure_usable(thread, DECIDES)
    return status if status < 0 else decide_tag(thread, tag, &thread.unit, &verdict)


cdef int32_t tick(DecidingThread thread) noexcept nogil:
    cdef int32_t status
    if <void*>thread == NULL:
        return FOREBAY_INVALID_ARGUMENT
    status = ensure_usable(thread, DECIDES)
    if status == FOREBAY_OK:
        thread.tick_ns = table_now(&thread.table)
    return status


cdef int32_t peek_tag(DecidingThread thread, uint64_t tag, const Charge* charge, Verdict* verdict) noexcept nogil:
    verdict.full = False
    verdict.tag = tag
    verdict.now_ns = table_now(&thread.table)
    return FOREBAY_ALLOWED if table_peek(
        &thread.table, tag, verdict.now_ns, thread.take, charge, verdict) else FOREBAY_DENIED


cdef int32_t params_of(
    DecidingThread thread, const forebay_request* request, const LimitParams** params
) noexcept nogil:
    """The limit that judges a request: the limiter's own, or the rate's."""
    cdef const RateHandle* rate = <const RateHandle*>request.rate
    params[0] = &thread.params
    if rate != NULL:
        if <void*>rate.limiter != <void*>thread.limiter:
            return FOREBAY_INVALID_RATE
        params[0] = &rate.params
    return FOREBAY_OK


cdef inline bint is_unit(const forebay_request* request) noexcept nogil:
    """Whether the thread's `unit` is the request's charge. Another charge takes a division."""
    return request.cost == 1 and request.rate == NULL and request.flags == 0


cdef int32_t read_charge(DecidingThread thread, const forebay_request* request, Charge* charge) noexcept nogil:
    cdef const LimitParams* params
    cdef int32_t status
    if is_unit(request):
        charge[0] = thread.unit
        return FOREBAY_OK
    if request.flags & ~<uint32_t>FOREBAY_BOOK:
        return FOREBAY_INVALID_ARGUMENT
    status = params_of(thread, request, &params)
    if status < 0:
        return status
    if request.cost > params.limit:
        return FOREBAY_COST_EXCEEDS_LIMIT
    thread.set_charge(request.cost, params, charge)
    if request.flags & <uint32_t>FOREBAY_BOOK:
        thread.limiter.allow_wait(charge, request.max_delay_ns)
    return FOREBAY_OK


cdef int32_t begin_charge(
    DecidingThread thread, const forebay_request* request, uint64_t* tag, Charge* charge
) noexcept nogil:
    cdef int32_t status = begin(thread, DECIDES, request, tag)
    return status if status < 0 else read_charge(thread, request, charge)


cdef void write_result(
    DecidingThread thread, const Charge* charge, const Verdict* verdict, bint allowed, forebay_result* result
) noexcept nogil:
    """The result of a request that has charged and booked nothing."""
    cdef Outlook outlook = no_outlook()
    set_outlook(charge, verdict, allowed, thread.describe, &outlook)
    result.limit = charge.params.limit
    result.remaining = remaining_in(&outlook, charge.params.limit)
    result.retry_after_ns = outlook.retry_after_ns
    result.reset_after_ns = outlook.reset_after_ns
    result.delay_ns = 0
    result.charge = 0
    result.allowed = allowed
    result.full = verdict.full
    result.binding = result.reserved = 0


cdef uint64_t charge_left(const Charge* charge, const Verdict* verdict) noexcept nogil:
    """For `refund`: what identifies the charge of an allowed request; 0 if there is none."""
    # A request that was allowed because the table was full has left no charge.
    return verdict.state if charge.amount != 0 and not verdict.full else 0


cdef int32_t allow(DecidingThread thread, const void* key, size_t size) noexcept nogil:
    if <void*>thread == NULL or not can_be(key, size):
        return FOREBAY_INVALID_ARGUMENT
    # As a compact ASCII str in keys.pxd. Any other str hashes by its UTF-8 in the same way.
    return allow_tag(
        thread, fingerprint_of(siphash13(thread.hash_key, <const uint8_t*>key, size)) | thread.kind)


cdef int32_t allow_at_tick(DecidingThread thread, const void* key, size_t size) noexcept nogil:
    cdef Verdict verdict
    cdef Outcome outcome
    cdef uint64_t tag
    cdef int32_t status
    if <void*>thread == NULL or not can_be(key, size):
        return FOREBAY_INVALID_ARGUMENT
    status = ensure_usable(thread, DECIDES)
    if status < 0:
        return status
    tag = fingerprint_of(siphash13(thread.hash_key, <const uint8_t*>key, size)) | thread.kind
    if thread.is_gcra:
        outcome = begin_decision_at(&thread.table, tag, thread.tick_ns, &thread.unit, &verdict, gcra_take)
    else:
        outcome = begin_decision_at(&thread.table, tag, thread.tick_ns, &thread.unit, &verdict, thread.take)
    return complete_decision(thread, tag, &thread.unit, &verdict, outcome)


cdef int32_t allow_hash(DecidingThread thread, uint64_t hash) noexcept nogil:
    if <void*>thread == NULL:
        return FOREBAY_INVALID_ARGUMENT
    return allow_tag(thread, fingerprint_of(hash) | thread.kind)


cdef int32_t decide(
    DecidingThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil:
    cdef Verdict verdict
    cdef Charge own
    cdef const Charge* charge = &own
    cdef uint64_t tag
    cdef int32_t status = begin(thread, DECIDES, request, &tag)
    if status < 0:
        return status
    if is_unit(request):
        charge = &thread.unit
    else:
        status = read_charge(thread, request, &own)
        if status < 0:
            return status
    if charge.amount != 0:
        status = decide_tag(thread, tag, charge, &verdict)
    else:
        status = peek_tag(thread, tag, charge, &verdict)
        count_decision(thread, status == FOREBAY_ALLOWED, tag)
    if result == NULL:
        return status
    write_result(thread, charge, &verdict, status == FOREBAY_ALLOWED, result)
    if status == FOREBAY_ALLOWED:
        if request.flags & <uint32_t>FOREBAY_BOOK:
            result.delay_ns = thread.limiter.booked_delay_ns(charge, &verdict)
        result.charge = charge_left(charge, &verdict)
    return status


cdef int32_t peek(
    DecidingThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil:
    cdef Verdict verdict
    cdef Charge charge
    cdef uint64_t tag
    cdef int32_t status = begin_charge(thread, request, &tag, &charge)
    if status < 0:
        return status
    status = peek_tag(thread, tag, &charge, &verdict)
    if result != NULL:
        write_result(thread, &charge, &verdict, status == FOREBAY_ALLOWED, result)
    return status


cdef void return_charge(DecidingThread thread, uint64_t tag, const Charge* charge) noexcept nogil:
    cdef Events events = no_events()
    table_amend(&thread.table, tag, thread.give_back, charge, &events)
    count_events(thread, &events)


cdef int32_t refund(DecidingThread thread, const forebay_request* request, uint64_t charged_state) noexcept nogil:
    cdef const LimitParams* params
    cdef Charge charge
    cdef uint64_t tag
    cdef int32_t status = begin(thread, DECIDES, request, &tag)
    if status < 0:
        return status
    if request.flags & ~<uint32_t>FOREBAY_BOOK:
        return FOREBAY_INVALID_ARGUMENT
    status = params_of(thread, request, &params)
    if status < 0:
        return status
    thread.set_charge(min(request.cost, params.limit), params, &charge)
    charge.charged_state = charged_state
    return_charge(thread, tag, &charge)
    return FOREBAY_OK


cdef int32_t reset(DecidingThread thread, const forebay_request* request) noexcept nogil:
    cdef Events events
    cdef uint64_t tag
    cdef int32_t status = begin(thread, DECIDES, request, &tag)
    if status < 0:
        return status
    events = no_events()
    if thread.table.home != NULL:
        # The thread's own view of the table, as a resize changes it.
        table_remove(&thread.table, tag, &events)
    else:
        thread.limiter.forget(tag, &events)
    count_events(thread, &events)
    return FOREBAY_OK


cdef enum:
    CHUNK = 256                          # requests of a batch whose charges are on the stack at a time


cdef int32_t check_batch(
    DecidingThread thread, const forebay_request* requests, size_t size
) noexcept nogil:
    """The status of the first request that can't be decided."""
    cdef Charge charge
    cdef int32_t status
    cdef size_t i
    for i in range(size):
        if requests[i].flags:
            return FOREBAY_INVALID_ARGUMENT
        status = read_charge(thread, &requests[i], &charge)
        if status == FOREBAY_OK and (requests[i].key != NULL or requests[i].key_size != 0):
            status = check_key(requests[i].key_kind, requests[i].key, requests[i].key_size)
        if status < 0:
            return status
    return FOREBAY_OK


cdef void decide_chunk(
    DecidingThread thread, const forebay_request* requests, size_t size, uint8_t* allowed
) noexcept nogil:
    cdef uint64_t[CHUNK] tags
    cdef Charge[CHUNK] charges
    cdef Batch batch
    cdef Events events
    cdef uint64_t admitted
    cdef bint all_unit = True
    cdef size_t i
    for i in range(size):
        read_key(thread, &requests[i], &tags[i])
        read_charge(thread, &requests[i], &charges[i])
        all_unit = all_unit and is_unit(&requests[i])
    batch.size = <Py_ssize_t>size
    batch.keys = NULL
    batch.tags = tags
    batch.charges = NULL if all_unit else charges
    batch.unit = &thread.unit
    batch.table = &thread.table
    batch.hash_key = thread.hash_key
    batch.kind = thread.kind
    # The results, in place of the tags: no objects.
    batch.yes = <PyObject*>1
    batch.no = NULL
    batch.counter_line = thread.counter_line
    batch.claim_sequence = &thread.counters.claims
    admitted = thread.limiter.decide_batch(&batch, &events)
    for i in range(size):
        allowed[i] = <uint8_t>tags[i]
    if thread.hot_keys.denied != NULL:
        for i in range(size):
            if not allowed[i]:
                # The result has taken the place of the tag.
                read_key(thread, &requests[i], &tags[i])
                note_denied(thread, tags[i])
    count(thread, &thread.counters.allowed, admitted)
    count(thread, &thread.counters.denied, size - admitted)
    count_events(thread, &events)


cdef int32_t decide_many(
    DecidingThread thread, const forebay_request* requests, size_t size, uint8_t* allowed
) noexcept nogil:
    cdef size_t done = 0
    cdef int32_t status
    if (
        <void*>thread == NULL or not can_be(requests, size) or not can_be(allowed, size)
        or size > <size_t>0x7FFFFFFFFFFFFFFF // sizeof(forebay_request)
    ):
        return FOREBAY_INVALID_ARGUMENT
    # Once: a batch that has begun is completed.
    status = ensure_usable(thread, DECIDES)
    if status < 0:
        return status
    status = check_batch(thread, requests, size)
    if status < 0:
        return status
    while done < size:
        decide_chunk(thread, &requests[done], min(size - done, <size_t>CHUNK), &allowed[done])
        done += CHUNK
    return FOREBAY_OK


# Several limits at once: the protocol of all_of.pyx. Here no step can fail, so a request that has begun is completed.

cdef int32_t begin_attempts(
    void** threads, const forebay_request* requests, size_t size, Attempt* attempts
) noexcept nogil:
    cdef int32_t status
    cdef size_t i
    for i in range(size):
        if requests[i].flags:
            return FOREBAY_INVALID_ARGUMENT
        status = begin_charge(
            <DecidingThread>threads[i], &requests[i], &attempts[i].tag, &attempts[i].own_charge)
        if status < 0:
            return status
        # One reading of the clock is for all.
        if <void*>(<DecidingThread>threads[i]).limiter.segment != <void*>(<DecidingThread>threads[0]).limiter.segment:
            return FOREBAY_WRONG_LIMITER
        attempts[i].charge = &attempts[i].own_charge
        prefetch(home_line(&(<DecidingThread>threads[i]).table, attempts[i].tag))
    return FOREBAY_OK


cdef bint check_all(void** threads, Attempt* attempts, size_t size, bint at_each) noexcept nogil:
    """Whether all limits would allow the request. With `at_each`, checks all even if one denies."""
    cdef uint64_t now_ns = table_now(&(<DecidingThread>threads[0]).table)
    cdef bint allowed = True
    cdef size_t i
    for i in range(size):
        if not check_attempt(
                &(<DecidingThread>threads[i]).table, &attempts[i], now_ns, (<DecidingThread>threads[i]).take):
            allowed = False
            if not at_each:
                break
    return allowed


cdef bint charge_one(DecidingThread thread, Attempt* attempt) noexcept nogil:
    """Charge one limit, by its state as it was checked; if that has changed, by a new decision."""
    cdef Events events
    cdef bint allowed
    cdef Outcome outcome = try_attempt(&thread.table, attempt, thread.after_charge)
    if outcome == ALLOWED:
        return True
    events = no_events()
    events.cas_retries = outcome == CAS_FAILED
    allowed = commit_attempt(
        &thread.table, thread.counter_line, &thread.counters.claims, attempt, thread.take, thread.after_charge, &events)
    count_events(thread, &events)
    return allowed


cdef bint charge_all(void** threads, Attempt* attempts, size_t size) noexcept nogil:
    """Charge the limits in order. If one denies now, give the charges before it back."""
    cdef Charge charge
    cdef size_t charged, i
    for charged in range(size):
        if not charge_one(<DecidingThread>threads[charged], &attempts[charged]):
            # In reverse order: several charges may be in one cell.
            for i in range(charged, 0, -1):
                if charge_to_return(&attempts[i - 1], &charge):
                    return_charge(<DecidingThread>threads[i - 1], attempts[i - 1].tag, &charge)
            return False
    return True


cdef void count_all(
    void** threads, const Attempt* attempts, size_t size, bint allowed, bint at_each
) noexcept nogil:
    cdef size_t i
    for i in range(size):
        if allowed:
            count_decision(<DecidingThread>threads[i], True, attempts[i].tag)
        elif attempts[i].verdict.outcome == DENIED:
            count_decision(<DecidingThread>threads[i], False, attempts[i].tag)
            if not at_each:
                break


cdef void write_results(
    void** threads, const Attempt* attempts, size_t size, bint allowed, forebay_result* binding,
    forebay_result* each
) noexcept nogil:
    """Each limit's result, and that of the limit that bound the request, with numbers of all."""
    cdef forebay_result result
    cdef uint64_t least = ~<uint64_t>0
    cdef uint64_t reset_after_ns = 0
    cdef int64_t longest_ns = -1
    cdef size_t i
    for i in range(size):
        write_result(
            <DecidingThread>threads[i], attempts[i].charge, &attempts[i].verdict,
            attempts[i].verdict.outcome == ALLOWED, &result)
        if each != NULL:
            each[i] = result
            if allowed:
                each[i].charge = charge_left(attempts[i].charge, &attempts[i].verdict)
        if binding != NULL and binds(
                allowed, result.allowed, result.remaining, least, result.retry_after_ns, longest_ns):
            binding[0] = result
            binding.binding = <uint32_t>i
            longest_ns = <int64_t>result.retry_after_ns
        least = min(least, result.remaining)
        reset_after_ns = max(reset_after_ns, result.reset_after_ns)
    if binding != NULL:
        binding.remaining = least
        binding.reset_after_ns = reset_after_ns


cdef int32_t decide_all(
    void** threads, const forebay_request* requests, size_t size, forebay_result* binding, forebay_result* each
) noexcept nogil:
    cdef Attempt[FOREBAY_MOST_LIMITS] attempts
    cdef bint at_each = binding != NULL or each != NULL
    cdef bint allowed
    cdef int32_t status
    if threads == NULL or requests == NULL or size == 0 or size > FOREBAY_MOST_LIMITS:
        return FOREBAY_INVALID_ARGUMENT
    status = begin_attempts(threads, requests, size, attempts)
    if status < 0:
        return status
    allowed = check_all(threads, attempts, size, at_each) and charge_all(threads, attempts, size)
    count_all(threads, attempts, size, allowed, at_each)
    if at_each:
        write_results(threads, attempts, size, allowed, binding, each)
    return FOREBAY_ALLOWED if allowed else FOREBAY_DENIED
