"""``AllOf`` over Redis: several limits at once, all or none, for both executors.

If all keys lie in one slot, or the server is no cluster, one call of one script checks all limits before it charges
any. No script runs over keys of several slots of a cluster. There the limits are charged slot by slot, one call each,
and a call charges all limits of its slot or none. At the first denial, the charges of the earlier calls are cancelled
as a reservation is: the part that still counts is given back. So

* an allowed request has been charged by each limit, and no limit admits more than it does alone;
* a denied request has held permits for a moment. Meanwhile another request may be denied that would have been allowed
  otherwise;
* if a server doesn't reply, the known charges at the other servers are given back. A charge that may not have been made
  is not given back: that would admit requests above the limit;
* a process that ends between two calls leaves the charges of a request that was never allowed. They expire as all
  charges do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from redis.crc import key_slot

from forebay import holding
from forebay.core.all_of import binding
from forebay.core.arguments import ambiguous_key, cost_of, costs_of, keys_of, ttl_without_id
from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, InvalidCost, InvalidKey, InvalidLimiter, LimitExceeded
from forebay.rate import Duration
from forebay.redis.algorithms import Charge, Seen, delay_us
from forebay.redis.commands import (
    HIT,
    PEEK,
    Booked,
    Command,
    CommandFlow,
    LimiterCommands,
    encode_args,
    forget,
    remember,
)
from forebay.redis.concurrency import ConcurrencyCommands, Taken
from forebay.redis.limiter import BaseLimiter, BaseReservable
from forebay.redis.operations import Pending, operation
from forebay.redis.scripts import script
from forebay.redis.transport.deadline import Patience

__all__ = [
    "Admitted",
    "AllOfCommands",
    "BaseAllOf",
    "Costs",
    "Keys",
    "checked_lists",
    "each",
    "exceeded_by",
    "listed",
]

E = TypeVar("E")
R = TypeVar("R")


Keys = Key | list[Key] | list[str] | list[bytes] | list[int]
Costs = int | list[int]
# Each limiter's decision; and if all allow the request, each limiter's booking or permits.
Admitted = tuple[list[Decision], list[Booked | Taken]]


class Part(NamedTuple):
    limiter: LimiterCommands
    key: bytes
    charge: Charge


class Judged(NamedTuple):
    """The decision of one slot's limits for a request: whether all allow it, and each limit's part of the reply."""

    allowed: bool
    parts: Sequence[Part]
    seen: Sequence[Seen]


class AllOfCommands:
    """Makes the commands of several limits at once. With `has_slots`, their keys may lie in several slots."""

    def __init__(self, limiters: Sequence[LimiterCommands], fallback: Any, *, has_slots: bool) -> None:
        self._limiters = limiters
        self.fallback = fallback
        self._has_slots = has_slots
        self._script = script("decide", *sorted({limiter.algorithm.script for limiter in limiters}))

    def _each(self, key: Keys, cost: Costs) -> list[tuple[LimiterCommands, Key, int]]:
        """The limiters with their own keys and costs."""
        return list(zip(self._limiters, *checked_lists(key, cost, len(self._limiters)), strict=True))

    def parts(self, key: Keys, cost: Costs) -> list[Part]:
        return [
            Part(limiter, limiter.key(its_key), limiter.charge_for(its_key, its_cost))
            for limiter, its_key, its_cost in self._each(key, cost)
        ]

    def queue_key(self, key: Keys) -> object:
        """Requests with equal queue keys wait in one queue."""
        return tuple(limiter.key(its_key) for limiter, its_key, _ in self._each(key, 1))

    def _groups(self, parts: list[Part]) -> list[list[Part]]:
        """The parts of one slot together, as one script call takes them."""
        if not self._has_slots:
            return [parts]
        groups: dict[int, list[Part]] = {}
        for part in parts:
            groups.setdefault(key_slot(part.key), []).append(part)
        return list(groups.values())

    def is_apart(self, many: Iterable[list[Part]]) -> bool:
        return any(len(self._groups(parts)) > 1 for parts in many)

    def _command_of(self, what: bytes, parts: Sequence[Part]) -> Command[None]:
        return Command(self._script, [part.key for part in parts], arguments_of(what, parts), 2, lambda reply: None)

    def _judging(self, what: bytes, parts: Sequence[Part], comes_back: bool = False) -> Command[Judged]:
        """A command for parts of one slot. With `comes_back`, its charge is given back if the caller is cancelled."""

        def read(reply: list[int]) -> Judged:
            allowed, at, seen = reply[0] != 0, 2, []
            for limiter, _, _ in parts:
                end = at + 1 + limiter.algorithm.number_count
                # A request that was charged before is allowed even if no permits remain.
                seen.append(Seen(reply[at] != 0 or reply[0] == 2, reply[1], reply[at + 1 : end]))
                at = end
            if allowed and what is HIT:
                for (limiter, key, charge), its_seen in zip(parts, seen, strict=True):
                    limiter.took(key, charge, its_seen)
            return Judged(allowed, parts, seen)

        def given_up(reply: list[int]) -> CommandFlow[None]:
            judged = read(reply)
            if judged.allowed:
                yield from self._cancel(parts, judged.seen)

        size = 2 + sum(1 + part.limiter.algorithm.number_count for part in parts)
        command = Command(self._script, [part.key for part in parts], arguments_of(what, parts), size, read)
        # Otherwise a cancelled caller's charge stays, as with one limiter.
        if what is HIT and (comes_back or any(part.limiter.comes_back for part in parts)):
            command.if_given_up = given_up
        return command

    def allow_at_once(self, parts: Sequence[Part]) -> Command[bool]:
        """Like ``allow``, for parts of one slot: one command."""
        return self._judging(HIT, parts).then(lambda judged: judged.allowed)

    def _charge(self, groups: list[list[Part]], comes_back: bool = False) -> CommandFlow[list[Judged]]:
        """Charge one slot after the other, up to the first denial. Then give back the charges made before."""
        judged: list[Judged] = []
        try:
            for parts in groups:
                judged.append((yield self._judging(HIT, parts, comes_back)))
                if not judged[-1].allowed:
                    break
        except GeneratorExit:
            raise
        except BaseException:
            with suppress(ForebayError):
                yield from self._uncharge(judged)
            raise
        if not judged[-1].allowed:
            yield from self._uncharge(judged[:-1])
        return judged

    def _uncharge(self, judged: Sequence[Judged]) -> CommandFlow[None]:
        yield from each([self._cancel(parts, seen) for _, parts, seen in judged])

    def _judge(self, what: bytes, parts: list[Part], comes_back: bool = False) -> CommandFlow[list[Judged]]:
        """The decisions of all slots, in any order."""
        groups, judged = self._groups(parts), []
        if what is HIT:
            judged = yield from self._charge(groups, comes_back)
            if judged[-1].allowed:
                return judged
            # No other slot is charged: peek at the others.
            judged = judged[-1:]
            groups = [group for group in groups if group is not judged[0].parts]
        for group in groups:
            judged.append((yield self._judging(PEEK, group)))
        return judged

    def allow(self, parts: list[Part]) -> CommandFlow[bool]:
        judged = yield from self._charge(self._groups(parts))
        return judged[-1].allowed

    def _decide(self, what: bytes, key: Keys, cost: Costs) -> CommandFlow[list[Decision]]:
        """The decisions of all limits, in the order of the limiters."""
        parts = self.parts(key, cost)
        return in_order(parts, (yield from self._judge(what, parts)))

    def hit_each(self, key: Keys, cost: Costs) -> CommandFlow[list[Decision]]:
        return self._decide(HIT, key, cost)

    def hit(
        self, key: Keys, cost: Costs, request_id: Key | None = None, request_ttl: Duration | None = None
    ) -> CommandFlow[Decision]:
        if request_id is None and request_ttl is not None:
            raise ttl_without_id(request_ttl)
        if request_id is None:
            return binding((yield from self._decide(HIT, key, cost)))
        return binding((yield from self.hit_each_once(key, cost, request_id, request_ttl)))

    def hit_each_once(
        self, key: Keys, cost: Costs, request_id: Key, request_ttl: Duration | None
    ) -> CommandFlow[list[Decision]]:
        parts = self._of_one_request(self.parts(key, cost))
        command = self._judging(HIT, parts)
        # A retry with the id isn't charged: the charge is its own then.
        command.if_given_up = None
        if any(part.charge.cost for part in parts):
            remember(command, [part.charge for part in parts], request_id, request_ttl)
        return decisions((yield command))

    def _of_one_request(self, parts: list[Part]) -> list[Part]:
        """The parts, if one script can charge them and remember the request. Raises ``InvalidLimiter``."""
        for part in parts:
            part.limiter.check_request_ids()
        if len(self._groups(parts)) > 1:
            raise InvalidLimiter(
                f"the keys of this request to {' and '.join(map(repr, self._limiters))} are in several slots of the "
                "cluster, so no script can charge them all and remember its request_id: use one key for all"
            )
        return parts

    def peek(self, key: Keys, cost: Costs) -> CommandFlow[Decision]:
        return binding((yield from self.peek_each(key, cost)))

    def peek_each(self, key: Keys, cost: Costs) -> CommandFlow[list[Decision]]:
        return self._decide(PEEK, key, cost)

    def exceeded(self, key: Keys, cost: Costs) -> CommandFlow[LimitExceeded]:
        return exceeded_by((yield from self.peek(key, cost)))

    def reserve(self, key: Keys, cost: Costs, max_delay: Duration | None) -> CommandFlow[Booked]:
        delay_us(max_delay)
        judged = yield from self._judge(HIT, self.parts(key, cost))
        if all(one.allowed for one in judged):
            return Booked.now(True, 0, self._uncharge(judged))
        bound = binding([decision for one in judged for decision in decisions(one)])
        return Booked.now(False, bound.retry_after_ns // 1000, None)

    def admit(self, key: Keys, cost: Costs) -> CommandFlow[Admitted]:
        """The decisions of ``hit_each``; and for each limiter, if all allow, the booking or permits that give back its
        charge.
        """
        parts = self.parts(key, cost)
        judged = yield from self._judge(HIT, parts, comes_back=True)
        if not all(one.allowed for one in judged):
            return in_order(parts, judged), []
        seen = {id(part): its for one in judged for part, its in zip(one.parts, one.seen, strict=True)}
        return in_order(parts, judged), [part.limiter.keep(part.key, part.charge, seen[id(part)]) for part in parts]

    def _cancel(self, parts: Sequence[Part], seen: Sequence[Seen]) -> CommandFlow[None]:
        """Give back the charges of one slot's parts."""
        charged = [(part, its) for part, its in zip(parts, seen, strict=True) if part.charge.cost]
        counted = [
            Part(part.limiter, part.key, part.limiter.algorithm.cancellation(part.charge, its))
            for part, its in charged
            if not isinstance(part.limiter, ConcurrencyCommands)
        ]
        if counted:
            yield self._command_of(b"cancel", counted)
        for part, its in charged:
            if isinstance(part.limiter, ConcurrencyCommands):
                yield from part.limiter.cancel(part.key, part.charge, its)

    def refund(self, key: Keys, cost: Costs, request_id: Key | None = None) -> CommandFlow[None]:
        # All arguments are checked before anything is given back.
        parts = [
            Part(limiter, limiter.key(its_key), limiter.refund_charge(its_key, its_cost))
            for limiter, its_key, its_cost in self._each(key, cost)
        ]
        if request_id is not None:
            command = self._command_of(b"refund", self._of_one_request(parts))
            forget(command, [part.charge for part in parts], request_id)
            each_cost = [cost_of(its_cost) for _, _, its_cost in self._each(key, cost)]
            # No request can have been charged more than a limit.
            if all(part.charge.cost == its_cost for part, its_cost in zip(parts, each_cost, strict=True)):
                yield command
            return
        counted = [part for part in parts if not isinstance(part.limiter, ConcurrencyCommands)]
        flows = [self._run_once(b"refund", group) for group in self._groups(counted) if group]
        for limiter, its_key, its_cost in self._each(key, cost):
            if isinstance(limiter, ConcurrencyCommands):
                flows.append(limiter.refund(its_key, its_cost))
        yield from each(flows)

    def reset(self, key: Keys) -> CommandFlow[None]:
        for limiter, _, _ in self._each(key, 1):
            limiter.check_reset()
        yield from each([self._run_once(b"reset", group) for group in self._groups(self.parts(key, 1))])

    def _run_once(self, what: bytes, parts: Sequence[Part]) -> CommandFlow[None]:
        yield self._command_of(what, parts)


class BaseAllOf(BaseReservable[E, R], Generic[E, R]):
    def __init__(self, store: Any, limiters: Sequence[BaseLimiter[E, R]], fallback: Any) -> None:
        super().__init__(store)
        self._limiters = tuple(limiters)
        self._commands = AllOfCommands(
            [limiter.commands for limiter in limiters], fallback, has_slots=self._executor.has_slots
        )

    @property
    def limiters(self) -> tuple[Any, ...]:
        return self._limiters

    @property
    def name(self) -> str:
        return " + ".join(limiter.name for limiter in self._limiters)

    @property
    def may_free_early(self) -> bool:
        return any(limiter.may_free_early for limiter in self._limiters)

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(repr, self._limiters))})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same limiters")

    def queue_key(self, key: Keys) -> object:
        """Requests with equal queue keys wait in one queue."""
        return self._commands.queue_key(key)

    def check_request(self, key: Keys, cost: Costs) -> None:
        """Raise for a request that can never be allowed, without a call to Redis."""
        self._commands.parts(key, cost)

    @operation
    def allow(self, key: Keys, /) -> Pending[bool]:
        commands = self._commands
        return self._executor.run(commands.allow(commands.parts(key, 1)), lambda: commands.fallback.allow(key))

    @operation
    def hit(
        self,
        key: Keys,
        cost: Costs = 1,
        *,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Pending[Decision]:
        commands = self._commands
        more = {} if request_id is None else {"request_id": request_id, "request_ttl": request_ttl}
        return self._executor.run(
            commands.hit(key, cost, request_id, request_ttl), lambda: commands.fallback.hit(key, cost, **more)
        )

    @operation
    def hit_each(self, key: Keys, cost: Costs = 1) -> Pending[list[Decision]]:
        commands = self._commands
        return self._executor.run(commands.hit_each(key, cost), lambda: commands.fallback.hit_each(key, cost))

    @operation
    def peek(self, key: Keys, cost: Costs = 1) -> Pending[Decision]:
        commands = self._commands
        return self._executor.run(commands.peek(key, cost), lambda: commands.fallback.peek(key, cost))

    @operation
    def reserve(self, key: Keys, cost: Costs = 1, max_delay: Duration | None = None) -> Pending[R]:
        commands = self._commands
        return self._executor.run(
            self._reserve(key, cost, max_delay),
            lambda: self._reserved(key, commands.fallback.reserve(key, cost, max_delay)),
        )

    def _reserve(self, key: Keys, cost: Costs, max_delay: Duration | None) -> CommandFlow[R]:
        return self._reserved(key, (yield from self._commands.reserve(key, cost, max_delay)))

    def _wake(self, key: Keys) -> None:
        """Wake the first thread that waits for each limiter's own key."""
        keys, _ = listed(key, 1, len(self._limiters))
        for limiter, its_key in zip(self._limiters, keys, strict=True):
            self._executor.permits_came_back(limiter, its_key)

    @operation
    def refund(self, key: Keys, cost: Costs = 1, *, request_id: Key | None = None) -> Pending[None]:
        commands = self._commands
        flow = self._giving_back(key, commands.refund(key, cost, request_id))
        more = {} if request_id is None else {"request_id": request_id}
        return self._executor.run_to_end(flow, lambda: commands.fallback.refund(key, cost, **more))

    @operation
    def reset(self, key: Keys) -> Pending[None]:
        return self._executor.run(self._giving_back(key, self._commands.reset(key)))

    @operation
    def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> Pending[list[bool]]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        commands = self._commands
        # All commands are made before any is sent, so a wrong argument leaves every key uncharged.
        many = [commands.parts(key, cost) for key, cost in zip(keys, costs, strict=True)]

        def fall_back(number: int) -> bool:
            return bool(commands.fallback.allow(keys[number], costs[number]))

        if commands.is_apart(many):
            return self._executor.run_each([commands.allow(parts) for parts in many], fall_back)
        return self._executor.run_many([commands.allow_at_once(parts) for parts in many], fall_back)

    @operation
    def wait(
        self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Pending[bool]:
        return self._executor.wait(self, key, cost, timeout, jitter)

    @operation
    def exceeded(self, key: Keys, cost: Costs = 1) -> Pending[LimitExceeded]:
        """The exception for a wait in which the permits of `key` didn't come in time: it names the limit that bound."""
        commands = self._commands
        return self._executor.run(commands.exceeded(key, cost), lambda: exceeded_by(commands.fallback.peek(key, cost)))

    def _check_spent(self) -> None:
        if self.may_free_early:
            raise holding.never_back(self)

    @operation
    def hit_each_within(self, patience: Patience, key: Keys, cost: Costs) -> Pending[list[Decision]]:
        """For the web: ``hit_each``, for no longer than a request waits."""
        commands = self._commands
        return self._executor.run_within(
            patience, commands.hit_each(key, cost), lambda: commands.fallback.hit_each(key, cost)
        )

    @operation
    def peek_each_within(self, patience: Patience, key: Keys, cost: Costs) -> Pending[list[Decision]]:
        """For the web: ``peek``, for no longer than a request waits, and the decision of each limit."""
        commands = self._commands
        return self._executor.run_within(
            patience, commands.peek_each(key, cost), lambda: commands.fallback.peek_each(key, cost)
        )

    @operation
    def hit_each_once(
        self, patience: Patience, key: Keys, cost: Costs, request_id: Key, request_ttl: Duration
    ) -> Pending[list[Decision]]:
        """For the web: ``hit`` with an id, for no longer than a request waits, and the decision of each limit."""
        commands = self._commands
        return self._executor.run_within(
            patience,
            commands.hit_each_once(key, cost, request_id, request_ttl),
            lambda: commands.fallback.hit_each_once(key, cost, request_id, request_ttl),
        )

    @operation
    def admit(self, patience: Patience, key: list[Key], cost: list[int]) -> Pending[tuple[list[Decision], list[Any]]]:
        """For the web, for no longer than a request waits: the decisions of ``hit_each``; and for each limiter, if all
        allow, the reservation or lease that gives back its charge.
        """
        commands = self._commands
        return self._executor.run_within(
            patience,
            self._admit(key, cost),
            lambda: self._admitted(key, commands.fallback.admit(key, cost)),
            lambda admitted: [taken.give_back_flow() for taken in admitted[1]],
        )

    def _admit(self, key: list[Key], cost: list[int]) -> CommandFlow[tuple[list[Decision], list[Any]]]:
        return self._admitted(key, (yield from self._commands.admit(key, cost)))

    def _admitted(self, keys: list[Key], admitted: Admitted) -> tuple[list[Decision], list[Any]]:
        decisions, taken = admitted
        return decisions, [
            limiter.view(key, its) for limiter, key, its in zip(self._limiters, keys, taken, strict=False)
        ]


def exceeded_by(decision: Decision) -> LimitExceeded:
    return LimitExceeded(decision.limiter, decision.limit, decision.retry_after)


def listed(key: Any, cost: Any, count: int) -> tuple[list[Any], list[Any]]:
    """A key and a cost for each of several limiters."""
    return key if isinstance(key, list) else [key] * count, cost if isinstance(cost, list) else [cost] * count


def checked_lists(key: Any, cost: Any, count: int) -> tuple[list[Any], list[Any]]:
    """As ``listed``. Raises ``InvalidKey`` and ``InvalidCost`` for a wrong number of them."""
    keys, costs = listed(key, cost, count)
    if len(keys) != count:
        raise InvalidKey(f"{count} limiters need one key for all or {count} keys, not {len(keys)}")
    if isinstance(key, tuple) and count > 1 and len(key) == count:
        raise ambiguous_key(key, count)
    if len(costs) != count:
        raise InvalidCost(f"{count} limiters need one cost for all or {count} costs, not {len(costs)}")
    return keys, costs


def arguments_of(what: bytes, parts: Sequence[Part]) -> list[Any]:
    arguments: list[Any] = [what, b"0"]
    for limiter, _, charge in parts:
        arguments += (limiter.algorithm.script, *encode_args(charge.arguments))
    return arguments


def each(flows: Sequence[CommandFlow[None]]) -> CommandFlow[None]:
    """Run all flows, even if one fails or is interrupted. Then raise the error afterwards."""
    errors: list[BaseException] = []
    for flow in flows:
        try:
            yield from flow
        except GeneratorExit:
            raise
        except BaseException as error:
            errors.append(error)
    if errors:
        # An interrupt matters more than a failure.
        raise next((error for error in errors if not isinstance(error, ForebayError)), errors[0])


def decisions(judged: Judged) -> list[Decision]:
    return [
        limiter.algorithm.decision(limiter.name, charge, its)
        for (limiter, _, charge), its in zip(judged.parts, judged.seen, strict=True)
    ]


def in_order(parts: Sequence[Part], judged: Sequence[Judged]) -> list[Decision]:
    if len(judged) == 1:
        return decisions(judged[0])
    found = {id(part): decision for one in judged for part, decision in zip(one.parts, decisions(one), strict=True)}
    return [found[id(part)] for part in parts]
