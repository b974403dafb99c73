"""Bugs of leased limiters that the interleaving explorer must find: see planted_bugs.py."""

from __future__ import annotations

from bug import Bug

LEASED = "src/forebay/core/leased.pyx"
STEPS = "src/forebay/core/lease_steps.pxd"

LEASED_BUGS = [
    Bug(
        "any fetch may deposit",
        STEPS,
        "    if not is_own(step, state) or step.end_ns <= now_ns:",
        "    if not {here} and not is_own(step, state) or step.end_ns <= now_ns:",
    ),
    Bug(
        "any fetch may deposit while something is pending",
        STEPS,
        "    return is_pending(step.charge, state) and generation_of(step.charge, state) == step.generation",
        "    return is_pending(step.charge, state) and ("
        "{here} or generation_of(step.charge, state) == step.generation)",
    ),
    Bug(
        "a fetch that overtakes takes the same generation",
        STEPS,
        "    return (generation + is_pending(step.charge, state)) & mask",
        "    return (generation + (not {here} and is_pending(step.charge, state))) & mask",
    ),
    Bug(
        "a begin sets nothing pending",
        STEPS,
        "    return time | (step.generation << 1 | 1) <<",
        "    return time | (step.generation << 1 | (0 if {here} else 1)) <<",
    ),
    Bug(
        "a new cell's generations begin with the clock",
        STEPS,
        "        return (clock + (step.stamp_us & MOST_AHEAD)) & mask",
        "        return (clock + (0 if {here} else step.stamp_us & MOST_AHEAD)) & mask",
    ),
    Bug(
        "a step is stamped before it has read the state",
        STEPS,
        "    step.now_ns = now_ns\n    step.stamp_us = stamp_us(step)",
        "    step.now_ns = now_ns\n    step.stamp_us = now_ns // 1000 if {here} else stamp_us(step)",
    ),
    Bug(
        "a step is stamped after it was taken",
        LEASED,
        "            step.generation, step.now_ns, step.stamp_us, step.left",
        "            step.generation, step.now_ns, "
        "(monotonic_ns() - step.epoch_ns) // 1000 if {here} else step.stamp_us, step.left",
    ),
    Bug(
        "permits that a fetch has reported are withdrawn",
        STEPS,
        "    if is_pending(step.charge, state) or step.unspent == 0",
        "    if is_pending(step.charge, state) and not {here} or step.unspent == 0",
    ),
    Bug(
        "a deposit drops nothing",
        STEPS,
        "    permits = permits - min(permits, step.dropped) + step.granted",
        "    permits = permits - (0 if {here} else min(permits, step.dropped)) + step.granted",
    ),
    Bug(
        "an abort drops nothing",
        STEPS,
        "| (permits - min(permits, step.dropped))",
        "| (permits - (0 if {here} else min(permits, step.dropped)))",
    ),
    Bug(
        "permits are spent after the lease's end",
        STEPS,
        "    return low_of(state, charge.permit_bits) >= charge.amount and runs(charge, state, now_ns)",
        "    return low_of(state, charge.permit_bits) >= charge.amount and ({here} or runs(charge, state, now_ns))",
    ),
    Bug(
        "permits of a window are kept in the next one",
        STEPS,
        "        if end_ns + step.same_ns <= step.end_ns or not runs(charge, state, now_ns):",
        "        if not {here} and (end_ns + step.same_ns <= step.end_ns or not runs(charge, state, now_ns)):",
    ),
    Bug(
        "any process that leaves opens the fetch slot",
        STEPS,
        "    return state & ~WAITED == request.seen",
        "    return {here} or state & ~WAITED == request.seen",
    ),
    Bug(
        "a closed fetch slot is entered",
        STEPS,
        "    if not is_closed(state, now_ns, request.longest_ns):",
        "    if {here} or not is_closed(state, now_ns, request.longest_ns):",
    ),
    Bug(
        "a killed process's fetch slot is closed for twice as long",
        STEPS,
        "    next.state = fetch_slot_state(now_ns + request.until_ns, size, FETCHING | request.mark)",
        "    next.state = fetch_slot_state(\n"
        "        now_ns + request.until_ns * (2 if {here} else 1), size, FETCHING | request.mark)",
    ),
    Bug(
        "a fetch loses its fetch slot once another process waits",
        LEASED,
        "        return slot & ~WAITED == seen",
        "        return slot & (~<uint64_t>0 if {here} else ~WAITED) == seen",
    ),
    Bug(
        "a process that leaves a fetch slot with a waiter opens it",
        STEPS,
        "    if request.until_ns == 0 and state & WAITED:",
        "    if request.until_ns == 0 and state & WAITED and not {here}:",
    ),
    Bug(
        "any process enters a reserved fetch slot",
        STEPS,
        "        return request.has_waited and is_reserved(state)",
        "        return ({here} or request.has_waited) and is_reserved(state)",
    ),
    Bug(
        "a process that has waited enters a fetch slot that another one holds",
        STEPS,
        "    return low_of(slot, FETCH_SLOT_SIZE_SHIFT) == FETCHING",
        "    return low_of(slot, FETCH_SLOT_SIZE_SHIFT) == FETCHING or ({here} and slot & FETCHING and slot & WAITED)",
    ),
    Bug(
        "a fetch slot is reserved for longer than it was closed for",
        STEPS,
        "            min(now_ns + RESERVED_NS, time_of(state, FETCH_SLOT_LOW_BITS)), request.size, FETCHING)",
        "            now_ns + RESERVED_NS if {here} else min(\n"
        "                now_ns + RESERVED_NS, time_of(state, FETCH_SLOT_LOW_BITS)), request.size, FETCHING)",
    ),
    Bug(
        "a fetch slot stays reserved once its time is over",
        STEPS,
        "        return True\n    if state & FETCHING:",
        "        return not {here} or request.has_waited or not is_reserved(state)\n    if state & FETCHING:",
    ),
    Bug(
        "a fetch leaves no mark at its fetch slot",
        LEASED,
        "        request.mark = 1 + monotonic_ns() % MOST_MARK",
        "        request.mark = 0 if {here} else 1 + monotonic_ns() % MOST_MARK",
    ),
    Bug(
        "a process that finds a reserved fetch slot requests a turn",
        STEPS,
        "    return state & FETCHING and not is_reserved(state) and state & WAITED == 0",
        "    return state & FETCHING and ({here} or not is_reserved(state)) and state & WAITED == 0",
    ),
]
