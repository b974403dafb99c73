"""Whether a request may be handled: every rule that matches it is asked, all or none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.all_of import AllOf
from forebay.core.decision import Decision
from forebay.core.reservation import Reservation
from forebay.errors import (
    CostExceedsLimit,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    StoreUnavailable,
    UnseenPathsWarning,
    shown,
)
from forebay.web.afterwards import Afterwards
from forebay.web.answers import AWAY, FULL, UNKNOWN, Denial, problem_report, seconds_up
from forebay.web.client import ClientAddress, UnknownPeer, tell_operator
from forebay.web.functions import Told, check_function, checked_cost, checked_key, has_to_be_awaited, said
from forebay.web.native_requests import PeerKey
from forebay.web.passing import Charging, Passage
from forebay.web.policies import Policy, Writer, checked_styles, header_writer, partition_text
from forebay.web.request import KeyFunction, Request
from forebay.web.rules import DISCONNECTED, Answer, BodyLimit, Rule, check_answer, kind_of
from forebay.web.workers import warn_if_clients_have_no_address, warn_if_each_counts_alone

if TYPE_CHECKING:
    from forebay.redis.transport.deadline import Patience

__all__ = ["Gate", "Passage"]

NS: Final = 1_000_000_000
# A holder may be done at any time: nobody knows when.
WAIT_FOR_A_HOLDER_S: Final = 1
# Of a store that is away: about when it is asked again.
WAIT_FOR_A_STORE_S: Final = 1
# Requests, after which rules that have a path should have matched one.
WITHOUT_A_MATCH: Final = 1000
# As AllOf.
MOST_AT_ONCE: Final = 16


_log: Final = logging.getLogger("forebay.web")
Enter: TypeAlias = Callable[[Request], Passage | Denial]


class OnEnd:
    """What is held for a request until its end, and what may be given back then."""

    __slots__ = ("afterwards", "booked", "ended", "far", "is_far", "leases", "patience", "renew_after_s", "renew_at_s")

    def __init__(self, patience: Patience | None = None, afterwards: Afterwards | None = None) -> None:
        self.patience = patience
        """How long the request still waits for a store that is far away, in all."""
        self.afterwards = afterwards
        """What gives back where that has to be awaited."""
        self.far: list[Any] | None = None
        """What is to be given back together."""
        self.ended: int | None = None
        self.booked: list[tuple[Rule, Reservation]] = []
        self.leases: list[Lease] = []
        self.is_far = False
        """Whether a lease is anywhere but in shared memory."""
        self.renew_after_s = 0.0
        self.renew_at_s = 0.0

    def __bool__(self) -> bool:
        return bool(self.leases or self.booked)

    def add(self, more: OnEnd) -> None:
        """What the same request was let in with by others, too. It may have ended, with its view still in a thread."""
        if self.ended is not None:
            more.end(self.ended)
        self.afterwards = self.afterwards or more.afterwards
        self.patience = self.patience or more.patience
        if self.patience is not None and more.patience is not None:
            self.patience.left_s = min(self.patience.left_s, more.patience.left_s)
        self.booked += more.booked
        self.leases += more.leases
        self.is_far = self.is_far or more.is_far
        self.renew_after_s = min(more.renew_after_s or math.inf, self.renew_after_s or math.inf)
        self.renew_at_s = min(more.renew_at_s or math.inf, self.renew_at_s or math.inf)

    def hold(self, rule: Rule, lease: Lease) -> None:
        self.leases.append(lease)
        limiter: Any = rule.limiter
        self.is_far = self.is_far or not isinstance(limiter, Concurrency)
        self.renew_after_s = min(limiter.lease_ns / NS / 3, self.renew_after_s or math.inf)
        self.renew_at_s = time.monotonic() + self.renew_after_s

    def renew(self) -> None:
        """For an answer that takes long: hold on to what is held."""
        for lease in self.leases:
            self._begin(lease.renew)

    def renew_with_part(self) -> None:
        """One of an answer's many parts is sent. Where leases are far away, not each of them waits for that."""
        if self.leases and (not self.is_far or time.monotonic() >= self.renew_at_s):
            self.renew()
            self.renew_at_s = time.monotonic() + self.renew_after_s

    def begin(self, status: int) -> None:
        """The answer begins: give back what won't be charged however it ends, before the client can ask again."""
        with self._as_one():
            for pair in list(self.booked):
                rule = pair[0]
                # Who has to be awaited is asked at the end only.
                is_asked_now = not rule.is_settled_later and not rule.stays_charged(DISCONNECTED)
                if is_asked_now and not rule.stays_charged(status):
                    self.booked.remove(pair)
                    self.give_back(pair[1])

    def end(self, status: int) -> None:
        """Give back what is held, and what an answer of this status is not charged. Does nothing the second time."""
        if self.ended is None:
            self.ended = status
        booked, self.booked = self.booked, []
        leases, self.leases = self.leases, []
        with self._as_one(), contextlib.ExitStack() as stack:
            # Each, also if another one can't be.
            for lease in leases:
                stack.callback(self.give_back, lease)
            for rule, reservation in booked:
                stack.callback(self._settle, rule, reservation, status)

    def _settle(self, rule: Rule, reservation: Reservation, status: int) -> None:
        if rule.is_settled_later:
            assert self.afterwards is not None
            self.afterwards.start(self._settle_later(rule, reservation, status))
        elif not rule.stays_charged(status):
            self.give_back(reservation)

    async def _settle_later(self, rule: Rule, reservation: Any, status: int) -> None:
        charge_on: Any = rule.charge_on
        try:
            is_charged = rule.stays(await charge_on(status))
        except Exception:
            _log.exception("a request stays charged: charge_on of the rule of %r failed", rule.limiter)
            return
        if not is_charged:
            given = reservation.cancel()
            if isinstance(given, Coroutine):
                await given

    def undo(self) -> None:
        """As if the request had not been let in."""
        booked, self.booked = self.booked, []
        with self._as_one():
            for _, reservation in booked:
                self.give_back(reservation)
            self.end(0)

    def give_back(self, taken: Any) -> None:
        """A lease or a reservation."""
        if self.far is not None and not isinstance(taken, (Lease, Reservation)):
            self.far.append(taken)
        else:
            self._begin(taken.release if isinstance(taken, Lease) else taken.cancel)

    @contextlib.contextmanager
    def _as_one(self) -> Generator[None]:
        """What is given back in this block to a store that is far away goes there in one round trip."""
        if self.far is not None:
            yield
            return
        self.far = []
        try:
            yield
        finally:
            far, self.far = self.far, None
            for store in dict.fromkeys(taken.store for taken in far):
                its = [taken for taken in far if taken.store is store]
                self._begin(store._give_back_taken, its, self.patience)

    def _begin(self, way: Callable[..., object], *arguments: object) -> None:
        """What can't be given back, as its store is away, stays charged or ends by itself: no answer fails of it."""
        with contextlib.suppress(StoreUnavailable):
            given = way(*arguments)
            if self.afterwards is not None and isinstance(given, Coroutine):
                self.afterwards.start(given)

    async def settled(self) -> None:
        """When all that was given back in an event loop is back, or the store has missed its deadline."""
        if self.afterwards is not None:
            await self.afterwards.settled()


class Gate:
    """What both middlewares and the frameworks' extensions ask.

    `rules` are ``Rule`` and ``BodyLimit``; all limiters belong to one store. `client` says who is asking where a rule
    has no key of its own. `headers` says which fields go into answers: ``"draft-10"`` (``RateLimit-Policy`` and
    ``RateLimit``), ``"draft-06"``, ``"x-ratelimit"``, several of them, or none. With `partition_keys`, ``RateLimit``
    says which key it is about, by a keyed hash. A passage's fields are bytes if `encoded`, and their names in small
    letters, as ASGI has them. `in_loop` says whether it is asked in an event loop, which nobody may stop; None if that
    isn't known.

    Over a ``RedisStore``, ``enter`` waits for the answer of Redis, as long as the store's deadline says; together with
    what is given back at the request's end no longer. Over an
    ``AsyncRedisStore`` ``is_awaited``, and only ``enter_async`` may be called. What such a store raises when Redis is
    away is a denial with status 503.

    Raises ``InvalidLimiter``. Thread-safe, fork-safe; in shared memory it never waits. O(rules), and of what matches
    one decision.
    """

    entrance: Callable[[Request], Passage | Denial | None]
    """What ``enter`` does, for who is in a hurry."""

    has_ends: bool
    """Whether there are passages whose end has to be told."""

    def __init__(
        self,
        rules: Iterable[Rule | BodyLimit],
        *,
        client: KeyFunction | None = None,
        headers: str | Iterable[str] = "draft-10",
        partition_keys: bool = False,
        encoded: bool = False,
        in_loop: bool | None = None,
    ) -> None:
        everything = [rules] if isinstance(rules, (Rule, BodyLimit)) or not isinstance(rules, Iterable) else list(rules)
        if isinstance(rules, (str, bytes, Mapping)):
            # One that is empty would limit nothing.
            raise InvalidLimiter(
                f"rules are of Rule and BodyLimit, in a list, not {shown(rules)}: write [Rule(limiter)]"
            )
        for rule in everything:
            if not isinstance(rule, (Rule, BodyLimit)):
                raise InvalidLimiter(f"rules are of Rule and BodyLimit, not {shown(rule)}: write Rule(limiter)")
        self.client = ClientAddress() if client is None else client
        if client is not None:
            check_function("client is a ClientAddress or another key function", client)
        for what, value in (("partition_keys", partition_keys), ("encoded", encoded)):
            if not isinstance(value, bool):
                raise InvalidLimiter(f"{what} is True or False, not {shown(value)}")
        self.rules = tuple(rule for rule in everything if isinstance(rule, Rule))
        self.body_limits = tuple(limit for limit in everything if isinstance(limit, BodyLimit))
        check_waiting(self.rules, in_loop, self.client)
        self.is_awaited = has_to_be_awaited(self.client) or any(
            rule.is_awaited or rule.functions_to_await for rule in self.rules
        )
        self._exempt_later = [rule for rule in self.rules if has_to_be_awaited(rule.exempt)]
        self.has_ends = any(rule.charge_on is not None or rule.is_held for rule in self.rules)
        self._styles = checked_styles(headers)
        self._encoded = encoded
        self._secret = b""
        if partition_keys and self.rules:
            if self.rules[0].is_remote:
                raise InvalidLimiter(
                    f"partition_keys takes a secret of the limiters' Store, and {self.rules[0].limiter!r} has none"
                )
            store: Any = self.rules[0].limiter.store
            self._secret = store._segment.secret(b"partitions")
        for rule in self.rules:
            if rule.limiter.store is not self.rules[0].limiter.store:
                raise InvalidLimiter(
                    f"the rules' limiters belong to one store, but {rule.limiter!r} is in another than "
                    f"{self.rules[0].limiter!r}: make all of them over the same one, or put one middleware around "
                    "another"
                )
        native: list[Any] = [rule.limiter for rule in self.rules if not rule.is_remote]
        warn_if_each_counts_alone(native)
        warn_if_clients_have_no_address(rule.key or self.client for rule in self.rules)
        # What must be looked at for each request, and the rules that always match, as bits.
        self._sometimes = [
            (1 << i, rule) for i, rule in enumerate(self.rules) if rule.exempt or not rule.where.is_everywhere
        ]
        self._always = sum(1 << i for i in range(len(self.rules))) - sum(bit for bit, _ in self._sometimes)
        self._unseen = UnseenPaths(self.rules)
        self._plans: dict[int, Plan | None] = {0: None}
        # What is wrong with the rules of every request, is wrong now.
        plan = self._plan(self._always)
        self.entrance = self._enter if self._sometimes or plan is None else plan.enter

    def enter(self, request: Request) -> Passage | Denial | None:
        """Whether this request may be handled; None: there is no rule for it."""
        return self.entrance(request)

    def _enter(self, request: Request) -> Passage | Denial | None:
        plan = self._plan_of(request)
        return None if plan is None else plan.enter(request)

    async def enter_async(self, request: Request) -> Passage | Denial | None:
        """As ``enter``, of a gate that ``is_awaited``."""
        told: Any = Told(request)
        if self._exempt_later:
            methods, paths = request.methods, request.paths
            await told.ask(rule.exempt for rule in self._exempt_later if rule.where.matches(methods, paths))
        plan = self._plan_of(told)
        return None if plan is None else await plan.enter_async(told)

    def _plan_of(self, request: Request) -> Plan | None:
        matching = self._always
        if self._sometimes:
            methods, paths = request.methods, request.paths
            if self._unseen.patterns:
                self._unseen.look_at(paths)
            for bit, rule in self._sometimes:
                if rule.where.matches(methods, paths) and not rule.exempts(request):
                    matching |= bit
        return self._plans[matching] if matching in self._plans else self._plan(matching)

    def max_body_bytes(self, request: Request) -> int | None:
        if not self.body_limits:
            return None
        methods, paths = request.methods, request.paths
        return min((b.max_bytes for b in self.body_limits if b.where.matches(methods, paths)), default=None)

    def answer(self, request: Request, denial: Denial) -> Answer:
        """What a denied request is told."""
        wanted = denial.rule.answer
        if wanted is None:
            return problem_report(denial)
        if not isinstance(wanted, Answer):
            answer = wanted(request, denial)
            if not isinstance(answer, Answer):
                raise InvalidLimiter(f"a rule's answer gave {shown(answer)}, not an Answer(status, headers, body)")
            check_answer(answer)
            return answer
        return wanted._replace(headers=(*wanted.headers, *denial.fields)) if denial.rule.is_hidden else wanted

    def _plan(self, matching: int) -> Plan | None:
        rules = [rule for i, rule in enumerate(self.rules) if matching >> i & 1]
        self._plans[matching] = plan = (
            Plan(rules, self.client, self._styles, self._encoded, self._secret) if rules else None
        )
        return plan


class UnseenPaths:
    """What warns when no rule's path has matched a request yet, after many of them.

    Threads may lose a few requests that they count at once.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.patterns = [rule.where.pattern for rule in rules if rule.where.pattern is not None]
        """Empty when there is nothing to warn of, or not any more."""
        self.told = [rule.path for rule in rules if rule.where.pattern is not None]
        self.requests = 0

    def look_at(self, paths: tuple[str, ...]) -> None:
        """Whatever their methods are: it is the paths that are written in vain."""
        if not paths:
            # It may be any, and so whoever sends one would end the search.
            return
        if any(pattern.fullmatch(path) for pattern in self.patterns for path in paths):
            self.patterns = []
            return
        self.requests += 1
        if self.requests > WITHOUT_A_MATCH:
            self.patterns = []
            warnings.warn(
                f"no rule's path, {', '.join(map(shown, self.told[:3]))}, has matched any of {WITHOUT_A_MATCH} "
                f"requests; the last was for {shown(paths[0])}: write paths as from the root of the server, or of the "
                "application that the rules stand around",
                UnseenPathsWarning,
                stacklevel=2,
            )


def check_waiting(rules: Iterable[Rule], in_loop: bool | None, client: KeyFunction | None = None) -> None:
    """Nobody stops an event loop, and nobody awaits where there is none."""
    rules = list(rules)
    functions = [client] if has_to_be_awaited(client) else []
    functions += [function for rule in rules for function in rule.functions_to_await]
    if functions and in_loop is False:
        raise InvalidLimiter(f"{shown(functions[0])} has to be awaited, which nobody does here: write a plain function")
    for rule in rules:
        if not rule.is_remote or in_loop is None:
            continue
        if in_loop and not rule.is_awaited:
            raise InvalidLimiter(
                f"{rule.limiter!r} would stop the event loop for each round trip to Redis: make it over an "
                "AsyncRedisStore"
            )
        if not in_loop and rule.is_awaited:
            raise InvalidLimiter(f"{rule.limiter!r} has to be awaited: make it over a RedisStore")


class Plan:
    """How the rules that match a request are asked together.

    Over Redis all of them are one call. In shared memory first those whose charge depends on the answer are booked,
    then what is held is taken, and last the others are charged as one: so whatever denies, what was taken before can be
    given back to the permit. While the last deny, nothing is held: but for what is booked, a flood of denied requests
    writes nothing.
    """

    def __init__(
        self, rules: Sequence[Rule], client: KeyFunction, styles: Sequence[str], encoded: bool, secret: bytes
    ) -> None:
        self.client = client
        self.secret = secret
        self.styles = styles
        # Of a denial for want of an answer: whatever a rule says of its own.
        self.away_rule = dataclasses.replace(rules[0], status=503, answer=None)
        self.unknown_rule = dataclasses.replace(rules[0], status=500, answer=None)
        self.held = [rule for rule in rules if rule.is_held]
        self.booked = [rule for rule in rules if rule.charge_on is not None]
        self.charged = [rule for rule in rules if not rule.is_held and rule.charge_on is None]
        # Those last that can't take back a charge behind which others stand already.
        self.charged.sort(key=lambda rule: kind_of(rule.limiter) in (LeakyBucket, BucketedWindow))
        # What is held has no remaining number to show: it changes without anybody asking. And what looks like success
        # when it is denied isn't shown either.
        self.shown = [rule for rule in [*self.charged, *self.booked] if not rule.is_hidden]
        self.told = [Policy(rule.limiter) for rule in [*self.shown, *self.held] if not rule.is_hidden]
        self.write = header_writer(styles, self.told[: len(self.shown)], self.told, encoded) if self.told else _nothing
        self.denial_writers: dict[tuple[int, ...], Writer] = {}
        # What is more than can be asked as one is booked, and stays charged whatever the answer is.
        more = max(len(self.charged) - MOST_AT_ONCE, 0)
        self.booked, self.charged = [*self.charged[:more], *self.booked], self.charged[more:]
        limiters: list[Any] = [rule.limiter for rule in self.charged]
        self.limiter: Any = AllOf(*limiters) if limiters else None
        keys = [rule.key or client for rule in self.charged]
        self.keys = keys[:1] if all(key is keys[0] for key in keys) else keys
        costs = [rule.cost for rule in self.charged]
        self.cost = costs[0] if costs and all(type(cost) is int and cost == costs[0] for cost in costs) else None
        named: list[Any] = [function for rule in rules for function in (rule.key or client, rule.cost)]
        self.functions_to_await = [function for function in named if has_to_be_awaited(function)]
        self.is_settled_later = any(rule.is_settled_later for rule in self.booked)
        self.enter: Enter = self._in_steps
        self.asked = [*self.charged, *self.booked, *self.held]
        store: Any = rules[0].limiter.store
        self.store = store
        self.is_remote = rules[0].is_remote
        if self.is_remote:
            self.together: Any = store._together([rule.limiter for rule in self.asked])
            self.enter = self._far
        if self.shown == self.charged == list(rules) and not self.functions_to_await:
            self.enter = self._at_once()

    def _at_once(self) -> Charging:
        """For rules that are neither held nor booked, the usual case."""
        # An address is a text. Whatever else one function says for several may seem to be a key for each.
        is_plain = len(self.charged) == 1 or (len(self.keys) == 1 and isinstance(self.keys[0], PeerKey))
        key_of = self.keys[0] if is_plain else self._keys
        if len(self.charged) == 1:
            [rule] = self.charged
            limiter: Any = rule.limiter
            cost_of = rule.cost if callable(rule.cost) else None
            return Charging(self, limiter.hit, key_of, cost_of, rule.cost, True)
        hit_each = self._hit_each_far if self.charged[0].is_remote else self.limiter.hit_each
        return Charging(self, hit_each, key_of, self._costs if self.cost is None else None, self.cost, False)

    def _hit_each_far(self, keys: Any, costs: Any) -> Any:
        return self.limiter._hit_each_for(self.store._patience(), keys, costs)

    def denial(self, request: Request, decisions: Sequence[Decision]) -> Denial:
        """Of the rules that are charged at once."""
        return self._denial(request, self.charged, decisions)

    def _keys(self, request: Request) -> Any:
        if len(self.keys) == 1:
            key = checked_key(self.charged[0], said(self.keys[0], request))
            return [key] * len(self.charged) if len(self.charged) > 1 else key
        return [self._key_of(rule, request) for rule in self.charged]

    def _costs(self, request: Request) -> list[int]:
        return [rule.cost_of(request) for rule in self.charged]

    def _in_steps(self, request: Request, on_end: OnEnd | None = None) -> Passage | Denial:
        on_end = OnEnd() if on_end is None else on_end
        try:
            # Key functions may fail: before anything is taken.
            partitions = self.partitions(request)
            decisions = self._charge(request, on_end)
        except CostExceedsLimit as error:
            on_end.undo()
            return self.never(error)
        except StoreUnavailable as error:
            on_end.undo()
            return self.unavailable(error)
        except UnknownPeer as error:
            on_end.undo()
            return self.unknown(error)
        except BaseException:
            on_end.undo()
            raise
        if isinstance(decisions, Denial):
            on_end.undo()
            return decisions
        on_end.booked = [pair for pair in on_end.booked if pair[0].charge_on is not None]
        return Passage(self.write(self._shown(decisions), partitions), on_end if on_end else None)

    async def enter_async(self, request: Told) -> Passage | Denial:
        """As ``enter``, of a request that is ``Told``, over an ``AsyncRedisStore`` or in shared memory."""
        try:
            await request.ask(self.functions_to_await)
        except UnknownPeer as error:
            return self.unknown(error)
        if not self.is_remote:
            # What they say of the answer is waited for as long as it takes.
            if self.is_settled_later:
                return self._in_steps(request, OnEnd(None, Afterwards(None)))
            return self.enter(request if self.functions_to_await else request.request)
        try:
            if self.held or self.booked:
                patience = self.store._patience()
                decisions, taken = await self.together._admit(*self._all_asked(request), patience)
                return self._admitted(request, decisions, taken, OnEnd(patience, Afterwards(patience)))
            keys, cost = self._keys(request), self._costs(request) if self.cost is None else self.cost
            decisions = await self._hit_each_far(keys, cost)
        except CostExceedsLimit as error:
            return self.never(error)
        except StoreUnavailable as error:
            return self.unavailable(error)
        except UnknownPeer as error:
            return self.unknown(error)
        if not all(decisions):
            return self.denial(request, decisions)
        return Passage(self.write(self._shown(decisions), ()))

    def _far(self, request: Request) -> Passage | Denial:
        """Over a ``RedisStore``."""
        patience = self.store._patience()
        try:
            decisions, taken = self.together._admit(*self._all_asked(request), patience)
        except CostExceedsLimit as error:
            return self.never(error)
        except StoreUnavailable as error:
            return self.unavailable(error)
        except UnknownPeer as error:
            return self.unknown(error)
        return self._admitted(request, decisions, taken, OnEnd(patience))

    def _all_asked(self, request: Request) -> tuple[list[Any], list[int]]:
        keys = [self._key_of(rule, request) for rule in self.asked]
        return keys, [rule.cost_of(request) for rule in self.asked]

    def _admitted(
        self, request: Request, decisions: Sequence[Decision], taken: Sequence[Any], on_end: OnEnd
    ) -> Passage | Denial:
        """What became of a request whose rules were all asked at once: nothing is taken if one of them denies."""
        charged, shown = len(self.charged), len(self.asked) - len(self.held)
        if not taken:
            # Nobody knows when a holder will be done: so that is told only if nothing else denies.
            for rules, its in (
                (self.booked, decisions[charged:shown]),
                (self.charged, decisions[:charged]),
                (self.held, decisions[shown:]),
            ):
                if not all(its):
                    return self._denial(request, rules, its)
            return self._denial(request, self.asked, decisions)
        booked = zip(self.booked, taken[charged:shown], strict=True)
        on_end.booked = [pair for pair in booked if pair[0].charge_on is not None]
        for rule, lease in zip(self.held, taken[shown:], strict=True):
            on_end.hold(rule, lease)
        return Passage(self.write(self._shown(decisions[:shown]), ()), on_end if on_end else None)

    def _charge(self, request: Request, on_end: OnEnd) -> list[Decision] | Denial:
        booked = []
        for rule in self.booked:
            limiter: Any = rule.limiter
            key, its_cost = self._key_of(rule, request), rule.cost_of(request)
            # A leaky bucket's place is one in a queue, and taken whenever there is one.
            max_delay = None if kind_of(limiter) is LeakyBucket else 0
            reservation = limiter.reserve(key, its_cost, max_delay)
            if not reservation:
                if reservation.full:
                    return self.full(reservation.delay_ns)
                return self._denial(request, [rule], [limiter.peek(key, its_cost)])
            on_end.booked.append((rule, reservation))
            booked.append(limiter.peek(key, 0))
        if self.limiter is None:
            return self._hold(request, on_end) or booked
        keys, cost = self._keys(request), self._costs(request) if self.cost is None else self.cost
        if self.held and self.limiter.peek(keys, cost).allowed:
            denial = self._hold(request, on_end)
            if denial is not None:
                return denial
        charge, decisions = self.limiter._reserve_each(keys, cost)
        if not charge:
            return self._denial(request, self.charged, decisions)
        if self.held and not on_end.leases:
            # Some permits have come back since nothing was held for want of them.
            denial = None
            with contextlib.ExitStack() as stack:
                stack.callback(charge.cancel)
                denial = self._hold(request, on_end)
                if denial is None:
                    stack.pop_all()
            if denial is not None:
                return denial
        return [*decisions, *booked]

    def _hold(self, request: Request, on_end: OnEnd) -> Denial | None:
        for rule in self.held:
            limiter: Any = rule.limiter
            key, cost = self._key_of(rule, request), rule.cost_of(request)
            lease = limiter.acquire(key, cost)
            if not lease:
                if lease.full:
                    return self.full(NS * WAIT_FOR_A_HOLDER_S)
                return self._denial(request, [rule], [limiter.peek(key, cost)])
            on_end.hold(rule, lease)
        return None

    def _key_of(self, rule: Rule, request: Request) -> Any:
        return checked_key(rule, said(rule.key or self.client, request))

    def _shown(self, decisions: Sequence[Decision]) -> Sequence[Decision]:
        """Of `charged` and `booked`."""
        if len(decisions) == len(self.shown):
            return decisions
        rules = [*self.charged, *self.booked]
        return [decision for rule, decision in zip(rules, decisions, strict=True) if not rule.is_hidden]

    def never(self, error: CostExceedsLimit) -> Denial:
        """The request costs more than a limit allows at once."""
        rules = [*self.charged, *self.booked, *self.held]
        rule = next((rule for rule in rules if rule.limiter.name == error.limiter), None)
        if rule is None:
            # Of a key function's own limiter.
            raise error
        return Denial(rule, (Policy(rule.limiter).name,), None, None, ())

    def unavailable(self, error: StoreUnavailable) -> Denial:
        """Nobody knows whether the request is within its limits."""
        return Denial(self.away_rule, (), None, WAIT_FOR_A_STORE_S, (), AWAY)

    def full(self, wait_ns: int) -> Denial:
        """The store has no room for another key, and its ``on_full`` says to deny."""
        return Denial(self.away_rule, (), None, max(1, seconds_up(wait_ns)), (), FULL)

    def unknown(self, error: UnknownPeer) -> Denial:
        """Nobody knows whose request it is."""
        tell_operator(error)
        return Denial(self.unknown_rule, (), None, None, (), UNKNOWN)

    def named(self, error: Exception, key: object, cost: object) -> Exception:
        """What the one rule's functions gave that is no key or no cost."""
        [rule] = self.charged
        try:
            checked_key(rule, key)
            checked_cost(rule, cost)
        except (InvalidKey, InvalidCost) as named:
            return named
        return error

    def _denial(self, request: Request, rules: Sequence[Rule], decisions: Sequence[Decision]) -> Denial:
        denied = [
            (rule, decision) for rule, decision in zip(rules, decisions, strict=True) if not decision.allowed
        ] or list(zip(rules, decisions, strict=True))  # booked by others, and free again by now
        rule, decision = max(denied, key=lambda pair: (not pair[1].full, pair[1].retry_after_ns))
        if decision.full:
            return self.full(decision.retry_after_ns)
        wait_s = max(1, seconds_up(decision.retry_after_ns))
        if rule.is_held:
            wait_s = WAIT_FOR_A_HOLDER_S
        # What is to look like success has the fields of one.
        told = list(zip(rules, decisions, strict=True)) if rule.is_hidden else denied
        told = [pair for pair in told if not pair[0].is_hidden]
        told_rules = [rule for rule, _ in told]
        fields = self._denial_writer(told_rules)(
            [decision for _, decision in told], self.partitions(request, told_rules)
        )
        violated = tuple(Policy(rule.limiter).name for rule, _ in denied)
        return Denial(rule, violated, decision, wait_s, tuple(fields))

    def partitions(self, request: Request, rules: Sequence[Rule] | None = None) -> Sequence[str]:
        """Of these rules, or of all that are shown."""
        if not self.secret:
            return ()
        rules = self.shown if rules is None else rules
        return [partition_text(self.secret, rule.limiter, self._key_of(rule, request)) for rule in rules]

    def _denial_writer(self, rules: Sequence[Rule]) -> Writer:
        """What turns decisions of these rules into fields."""
        names = tuple(map(id, rules))
        if names not in self.denial_writers:
            policies = [Policy(rule.limiter) for rule in rules]
            writer = header_writer(self.styles, policies, self.told, False) if self.told else _nothing
            self.denial_writers[names] = writer
        return self.denial_writers[names]


def _nothing(decisions: Sequence[Decision], partitions: Sequence[str]) -> list[Any]:
    return []
