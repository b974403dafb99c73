"""A plan: how the rules that match a request are charged together, all or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.all_of import AllOf, reserve_each
from forebay.core.decision import Decision
from forebay.errors import InvalidCost, InvalidKey
from forebay.flows import Flow, run, run_async
from forebay.rate import NS
from forebay.store import Store
from forebay.web.charging_once import charged_once
from forebay.web.cleanup import BackgroundRelease, RequestCleanup
from forebay.web.client import UnknownPeer
from forebay.web.denials import HOLDER_WAIT_S, Denials
from forebay.web.fastpath import FastCharge, Passage, Sampling
from forebay.web.functions import ResolvedRequest, checked_cost, checked_key, has_to_be_awaited, result_of
from forebay.web.header_fields import Policy, header_writer, partition_text
from forebay.web.native_requests import PeerKey
from forebay.web.request import KeyFunction, Request, is_preflight
from forebay.web.rules import Denial, Rule, kind_of
from forebay.web.store_errors import DENYING_ERRORS, WhenUnavailable
from forebay.web.turns import Turn

__all__ = ["LeasedPlan", "LocalPlan", "Plan", "RedisPlan", "segment_of"]

MOST_CHARGED_AT_ONCE: Final = 16
"""As ``AllOf``."""
PREFLIGHT: Final = "CORS preflight"
"""The first part of keys of preflights."""


class Plan:
    """The rules in groups, their keys and costs, and the header fields of their decisions.

    * ``charged``: charged as one, by an ``AllOf``.
    * ``reserved``: charged before, and refunded if another rule denies, or at the end if `charge_on` says so. Also the
      rules that book a turn (`delay`), and those of another store than ``charged``.
    * ``once``: charged once for a request and its retries, after all others. There is no ``charged`` then.
    * ``held``: permits of a ``Concurrency``.
    """

    admit: Callable[[Request], Passage | Denial]
    """Decides about a request, without awaiting anything."""

    def __init__(
        self,
        rules: Sequence[Rule],
        client: KeyFunction,
        styles: Sequence[str],
        encoded: bool,
        secret: bytes,
        when_unavailable: WhenUnavailable,
    ) -> None:
        self.client = client
        self.secret = secret
        self.sampling = Sampling(segment_of(rules))
        """Of decisions in shared memory: calls to Redis are timed where they are made."""
        self.held = [rule for rule in rules if rule.is_held]
        reserved = [rule for rule in rules if rule.is_reserved]
        last = _decided_last(rules)
        once = [rule for rule in rules if rule.request_id is not None]
        self.once = charged_once(once) if once else None
        charged: list[Rule] = []
        elsewhere: list[Rule] = []
        for rule in rules:
            if not rule.is_held and not rule.is_reserved and rule.request_id is None:
                is_last = not once and (rule.is_leased or rule.limiter.store is last)
                (charged if is_last else elsewhere).append(rule)
        # Last those that can't take back a charge once later charges stand behind it.
        charged.sort(key=lambda rule: kind_of(rule.limiter) in (LeakyBucket, BucketedWindow))
        # The rules that exceed one AllOf, and those of another store, stay charged whatever the response is.
        excess = max(len(charged) - MOST_CHARGED_AT_ONCE, 0)
        reserved = [*elsewhere, *charged[:excess], *reserved]
        # Those of Redis last, in the order of the decisions of a plan over it.
        self.reserved = sorted(reserved, key=lambda rule: rule.is_remote and not rule.is_leased)
        self.charged = charged[excess:]
        self._decided = [*self.charged, *self.reserved, *once]
        """In the order of their decisions."""
        self._all = [*self._decided, *self.held]
        # Held permits have no remaining number to show: it changes without a request. Hidden rules show nothing.
        self._shown = [rule for rule in self._decided if not rule.is_hidden]
        policies = [Policy(rule.limiter) for rule in [*self._shown, *self.held] if not rule.is_hidden]
        self.write = header_writer(styles, policies[: len(self._shown)], policies, encoded)
        self.denials = Denials(self._all, rules[0], policies, styles, self.partitions, when_unavailable)
        limiters: list[Any] = [rule.limiter for rule in self.charged]
        self._all_of: Any = AllOf(*limiters) if limiters else None
        keys = [rule.key or client for rule in self.charged]
        self._key_functions = keys[:1] if all(key is keys[0] for key in keys) else keys
        costs = [rule.cost for rule in self.charged]
        self._cost = costs[0] if costs and all(type(cost) is int and cost == costs[0] for cost in costs) else None
        functions: list[Any] = [function for rule in rules for function in (rule.key or client, rule.cost)]
        self._functions_to_await = [function for function in functions if has_to_be_awaited(function)]
        self._is_simple = self._shown == self.charged == list(rules) and not self._functions_to_await
        """Whether all rules are charged as one and shown, by plain functions: the usual case."""

    async def admit_async(self, request: ResolvedRequest) -> Passage | Denial:
        """As ``admit``, also with functions that have to be awaited."""
        try:
            await request.resolve(self._functions_to_await)
        except UnknownPeer as error:
            return self.without_decisions(error, request)
        return await self._admit_resolved(request)

    async def _admit_resolved(self, request: ResolvedRequest) -> Passage | Denial:
        raise NotImplementedError

    def denial(self, request: Request, decisions: Sequence[Decision]) -> Denial:
        """By the decisions of the rules that are charged as one."""
        return self.denials.by_decisions(request, self.charged, decisions)

    def partitions(self, request: Request, rules: Sequence[Rule] | None = None) -> Sequence[str]:
        """A text for each of these rules, or of all that are shown, that says which key it is about."""
        if not self.secret:
            return ()
        rules = self._shown if rules is None else rules
        return [partition_text(self.secret, rule.limiter, self._key_of(rule, request)) for rule in rules]

    def explained(self, error: Exception, key: object, cost: object) -> Exception:
        """The error of the one rule's functions, if they returned no key or no cost, or else `error`."""
        [rule] = self.charged
        try:
            checked_key(rule, key)
            checked_cost(rule, cost)
        except (InvalidKey, InvalidCost) as explained:
            return explained
        return error

    def _fast_charge(
        self, hit_each: Callable[[Any, Any], Any], admit_any: Callable[[Request], Passage | Denial]
    ) -> FastCharge:
        """For a simple plan. `hit_each` charges several rules as one. `admit_any` is for a request of any method."""
        # The result of one key function for several rules may look like a key for each, unless it is an address.
        key_of, *others = self._key_functions
        if len(self.charged) > 1 and (others or not isinstance(key_of, PeerKey)):
            key_of = self._keys
        if len(self.charged) == 1:
            [rule] = self.charged
            limiter: Any = rule.limiter
            cost_of = rule.cost if callable(rule.cost) else None
            return FastCharge(self, limiter.hit, admit_any, key_of, cost_of, rule.cost, True)
        costs_of = self._costs_of if self._cost is None else None
        return FastCharge(self, hit_each, admit_any, key_of, costs_of, self._cost, False)

    def client_key(self, rule: Rule, request: Request) -> Any:
        """For whom a request counts by a rule's key function. Raises ``InvalidKey`` and ``UnknownPeer``."""
        return checked_key(rule, result_of(rule.key or self.client, request))

    def _key_of(self, rule: Rule, request: Request) -> Any:
        """The key that a rule charges.

        Preflights have keys of their own, so that they leave a client its limit. They are limited themselves, because
        any client can send them, and an application may handle them as other requests.
        """
        key = self.client_key(rule, request)
        if request.method != "OPTIONS" or rule.where.methods or not is_preflight(request):
            return key
        return (PREFLIGHT, *key) if isinstance(key, tuple) else (PREFLIGHT, key)

    def _keys(self, request: Request) -> Any:
        """The keys of the rules that are charged as one."""
        if len(self._key_functions) == 1 and request.method != "OPTIONS":
            key = self.client_key(self.charged[0], request)
            return [key] * len(self.charged) if len(self.charged) > 1 else key
        keys = [self._key_of(rule, request) for rule in self.charged]
        return keys if len(keys) > 1 else keys[0]

    def _costs_of(self, request: Request) -> list[int]:
        return [rule.cost_of(request) for rule in self.charged]

    def _costs(self, request: Request) -> Any:
        """The costs of the rules that are charged as one: one number if all have the same."""
        return self._costs_of(request) if self._cost is None else self._cost

    def _decisions_shown(self, decisions: Sequence[Decision]) -> Sequence[Decision]:
        """The decisions to show, of those of all rules that aren't held."""
        if len(decisions) == len(self._shown):
            return decisions
        return [decision for rule, decision in zip(self._decided, decisions, strict=True) if not rule.is_hidden]

    def _reserve_one(self, rule: Rule, request: Request, cleanup: RequestCleanup) -> Decision | Denial:
        """Reserve by a rule of a ``Store``."""
        limiter: Any = rule.limiter
        key, cost = self._key_of(rule, request), rule.cost_of(request)
        # A leaky bucket's permit is a place in its queue, whenever that is due.
        max_delay_s: float | None = None if kind_of(limiter) is LeakyBucket else 0
        if rule.delay_ns is not None:
            max_delay_s = rule.delay_ns / NS
        reservation = limiter.reserve(key, cost, max_delay_s)
        if not reservation:
            if reservation.full:
                return self.denials.full(reservation.delay_ns)
            return self.denials.by_decisions(request, [rule], [limiter.peek(key, cost)])
        if rule.delay_ns is not None and reservation.delay_ns:
            if not rule.held_back.add():
                reservation.cancel()
                return self.denials.by_decisions(request, [rule], [limiter.peek(key, cost)])
            cleanup.turns.append(Turn(limiter.store, reservation, rule.held_back, rule.count_delayed))
        cleanup.reserved.append((rule, reservation))
        decision: Decision = limiter.peek(key, 0)
        return decision

    def _admit_flow(self, request: Request, cleanup: RequestCleanup) -> Flow[Passage | Denial]:
        """As ``admit``, where a charge may call Redis."""
        try:
            # Key functions may fail: before anything is taken.
            partitions = self.partitions(request)
            decisions = yield from self._charge_flow(request, cleanup)
        except DENYING_ERRORS as error:
            return self._after(error, request, cleanup)
        except BaseException:
            cleanup.roll_back()
            raise
        if isinstance(decisions, Denial):
            cleanup.roll_back()
            return decisions
        return self._passage(decisions, partitions, cleanup)

    def _charge_flow(self, request: Request, cleanup: RequestCleanup) -> Flow[list[Decision] | Denial]:
        """The decisions of ``charged`` and ``reserved``. The caller rolls back if it is denied."""
        raise NotImplementedError

    def _charge_once(self, request: Request, cleanup: RequestCleanup) -> Flow[list[Decision] | Denial]:
        """The decisions of ``once``: none without such rules."""
        if self.once is None:
            return []
        rules = self.once.rules
        keys = [self._key_of(rule, request) for rule in rules]
        costs = [rule.cost_of(request) for rule in rules]
        is_allowed, each = yield from self.once.charge(request, keys, costs, cleanup)
        return each if is_allowed else self.denials.by_decisions(request, rules, each)

    def _reserve(self, rules: Iterable[Rule], request: Request, cleanup: RequestCleanup) -> list[Decision] | Denial:
        """Reserve by each of these rules, which are of a ``Store``."""
        decisions = []
        for rule in rules:
            decision = self._reserve_one(rule, request, cleanup)
            if isinstance(decision, Denial):
                return decision
            decisions.append(decision)
        return decisions

    def _hold(self, rules: Iterable[Rule], request: Request, cleanup: RequestCleanup) -> Denial | None:
        """Hold a permit of each of these rules, which are of a ``Store`` or leased."""
        for rule in rules:
            limiter: Any = rule.limiter
            key, cost = self._key_of(rule, request), rule.cost_of(request)
            lease = limiter.acquire(key, cost)
            if not lease:
                if lease.full:
                    return self.denials.full(NS * HOLDER_WAIT_S)
                return self.denials.by_decisions(request, [rule], [limiter.peek(key, cost)])
            cleanup.hold(rule, lease)
        return None

    def without_decisions(self, error: Exception, request: Request) -> Passage | Denial:
        """For one of `DENYING_ERRORS`."""
        denial = self.denials.for_error(error, request)
        return Passage(()) if denial is None else denial

    def _after(self, error: Exception, request: Request, cleanup: RequestCleanup) -> Passage | Denial:
        """As ``without_decisions``. If the request is admitted, what other stores have allowed stays charged."""
        is_admitted = False
        try:
            passage = self.without_decisions(error, request)
            is_admitted = not isinstance(passage, Denial)
        finally:
            if not is_admitted:
                cleanup.roll_back()
        return self._tracked((), cleanup) if is_admitted else passage

    def _passage(
        self, decisions: Sequence[Decision], partitions: Sequence[str] = (), cleanup: RequestCleanup | None = None
    ) -> Passage:
        """For a request that all rules allow."""
        return self._tracked(self.write(self._decisions_shown(decisions), partitions), cleanup)

    def _tracked(self, fields: Sequence[Any], cleanup: RequestCleanup | None) -> Passage:
        if cleanup is not None:
            cleanup.reserved = [pair for pair in cleanup.reserved if pair[0].charge_on is not None]
        return Passage(fields, cleanup or None)


def segment_of(rules: Iterable[Rule]) -> Any:
    """The shared memory of the first limit that is decided there. None: Redis decides all."""
    for rule in rules:
        store: Any = rule.limiter.store
        if rule.is_leased or not rule.is_remote:
            return (store.host_store if rule.is_leased else store).segment
    return None


def _decided_last(rules: Sequence[Rule]) -> object:
    """The store whose limits are charged as one, after those of the rules' other stores. None: all are leased.

    Redis is asked last, so a request that its host denies costs no round trip.
    """
    stores: list[Any] = [rule.limiter.store for rule in rules if not rule.is_leased]
    return next((store for store in stores if not isinstance(store, Store)), stores[0] if stores else None)


class LocalPlan(Plan):
    """Over ``Store``s: first ``reserved``, then ``held``, and last ``charged``, which can't be taken back so exactly.

    If the last group denies already, nothing is held: apart from reservations, a flood of denied requests writes
    nothing.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        in_steps = self._sampled
        self.admit = self._fast_charge(self._all_of.hit_each, in_steps) if self._is_simple else in_steps
        self._awaits_charge_on = any(rule.awaits_charge_on for rule in self.reserved)

    async def _admit_resolved(self, request: ResolvedRequest) -> Passage | Denial:
        if self._awaits_charge_on:
            # The response waits for an async charge_on without a bound.
            return self._sampled(request, BackgroundRelease(None))
        return self.admit(request if self._functions_to_await else request.request)

    def _sampled(self, request: Request, background: BackgroundRelease | None = None) -> Passage | Denial:
        begun_ns = self.sampling.begin()
        passage = self._admit_in_steps(request, background)
        self.sampling.end(begun_ns)
        return passage

    def _admit_in_steps(self, request: Request, background: BackgroundRelease | None = None) -> Passage | Denial:
        cleanup = RequestCleanup(None, background)
        try:
            # Key functions may fail: before anything is taken.
            partitions = self.partitions(request)
            decisions = self._charge(request, cleanup)
        except DENYING_ERRORS as error:
            return self._after(error, request, cleanup)
        except BaseException:
            cleanup.roll_back()
            raise
        if isinstance(decisions, Denial):
            cleanup.roll_back()
            return decisions
        return self._passage(decisions, partitions, cleanup)

    def _charge(self, request: Request, cleanup: RequestCleanup) -> list[Decision] | Denial:
        """The decisions of all rules that aren't held. The caller rolls back if it is denied."""
        decisions = self._charge_anew(request, cleanup)
        if self.once is None or isinstance(decisions, Denial):
            return decisions
        of_once = run(self._charge_once(request, cleanup))
        return of_once if isinstance(of_once, Denial) else [*decisions, *of_once]

    def _charge_anew(self, request: Request, cleanup: RequestCleanup) -> list[Decision] | Denial:
        """The decisions of ``charged`` and ``reserved``."""
        reserved = self._reserve(self.reserved, request, cleanup)
        if isinstance(reserved, Denial):
            return reserved
        if not self.charged:
            return self._hold(self.held, request, cleanup) or reserved
        keys, costs = self._keys(request), self._costs(request)
        if self.held and self._all_of.peek(keys, costs).allowed and (denial := self._hold(self.held, request, cleanup)):
            return denial
        charge, decisions = reserve_each(self._all_of, keys, costs)
        if not charge:
            return self.denial(request, decisions)
        if self.held and not cleanup.leases:
            # The peek was denied, and permits have come back since.
            with contextlib.ExitStack() as stack:
                stack.callback(charge.cancel)
                if denial := self._hold(self.held, request, cleanup):
                    return denial
                stack.pop_all()
        return [*decisions, *reserved]


class LeasedPlan(LocalPlan):
    """Over leased stores, and the ``Store`` of the limits beside them. A charge may call Redis.

    First ``reserved``, then ``held``, and last ``charged``: if Redis denies there, all before it comes back in memory,
    except reserved permits of a lease.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if any(rule.is_awaited for rule in self._all):
            self.admit = self._sampled

    def _admit_in_steps(self, request: Request, background: BackgroundRelease | None = None) -> Passage | Denial:
        return run(self._admit_flow(request, RequestCleanup(None, background)))

    async def _admit_resolved(self, request: ResolvedRequest) -> Passage | Denial:
        begun_ns = self.sampling.begin()
        # The response waits for permits that come back as long as each call takes.
        passage = await run_async(self._admit_flow(request, RequestCleanup(None, BackgroundRelease(None))))
        self.sampling.end(begun_ns)
        return passage

    def _charge_flow(self, request: Request, cleanup: RequestCleanup) -> Flow[list[Decision] | Denial]:
        """As ``_charge``."""
        reserved: list[Decision] = []
        for rule in self.reserved:
            limiter: Any = rule.limiter
            if not rule.is_leased:
                decision = self._reserve_one(rule, request, cleanup)
                if isinstance(decision, Denial):
                    return decision
                reserved.append(decision)
                continue
            charge = yield limiter.part.charge(self._key_of(rule, request), rule.cost_of(request))
            if not charge:
                return self.denials.by_decisions(request, [rule], [charge.decision])
            cleanup.reserved.append((rule, charge))
            reserved.append(charge.decision)
        if denial := self._hold(self.held, request, cleanup):
            return denial
        if self.once is not None:
            of_once = yield from self._charge_once(request, cleanup)
            return of_once if isinstance(of_once, Denial) else [*reserved, *of_once]
        if not self.charged:
            return reserved
        each = self._all_of.hit_each(self._keys(request), self._costs(request))
        if not isinstance(each, list):
            each = yield each
        return [*each, *reserved] if all(each) else self.denial(request, each)


class RedisPlan(Plan):
    """Over Redis: all rules are one call, after those of the host's stores; then those that are charged once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reserved_here = [rule for rule in self.reserved if not rule.is_remote]
        self._held_here = [rule for rule in self.held if not rule.is_remote]
        self._reserved_there = [rule for rule in self.reserved if rule.is_remote]
        self._held_there = [rule for rule in self.held if rule.is_remote]
        self._there = [*self.charged, *self._reserved_there, *self._held_there]
        stores: list[Any] = [rule.limiter.store for rule in self._all if rule.is_remote]
        self._store = stores[0]
        self._together: Any = self._store.together([rule.limiter for rule in self._there]) if self._there else None
        is_fast = self._is_simple and not self._store.is_awaited
        self.admit = self._fast_charge(self._hit_each, self._admit_together) if is_fast else self._admit_together

    def _admit_together(self, request: Request) -> Passage | Denial:
        return run(self._admit_flow(request, RequestCleanup(self._store.executor.patience())))

    async def _admit_resolved(self, request: ResolvedRequest) -> Passage | Denial:
        """Over an ``AsyncRedisStore``."""
        if not self.held and not self.reserved and self.once is None:
            try:
                partitions = self.partitions(request)
                decisions = await self._hit_each(self._keys(request), self._costs(request))
            except DENYING_ERRORS as error:
                return self.without_decisions(error, request)
            return self._passage(decisions, partitions) if all(decisions) else self.denial(request, decisions)
        patience = self._store.executor.patience()
        return await run_async(self._admit_flow(request, RequestCleanup(patience, BackgroundRelease(patience))))

    def _hit_each(self, keys: Any, costs: Any) -> Any:
        return self._all_of.hit_each_within(self._store.executor.patience(), keys, costs)

    def _charge_flow(self, request: Request, cleanup: RequestCleanup) -> Flow[list[Decision] | Denial]:
        decisions = yield from self._charge_together(request, cleanup)
        if isinstance(decisions, Denial):
            return decisions
        of_once = yield from self._charge_once(request, cleanup)
        return of_once if isinstance(of_once, Denial) else [*decisions, *of_once]

    def _charge_together(self, request: Request, cleanup: RequestCleanup) -> Flow[list[Decision] | Denial]:
        # Key functions may fail: before anything is taken.
        keys = [self._key_of(rule, request) for rule in self._there]
        costs = [rule.cost_of(request) for rule in self._there]
        here = self._reserve(self._reserved_here, request, cleanup)
        if isinstance(here, Denial):
            return here
        if denial := self._hold(self._held_here, request, cleanup):
            return denial
        if self._together is None:
            return here
        decisions, taken = yield self._together.admit(cleanup.patience, keys, costs)
        charged, shown = len(self.charged), len(self.charged) + len(self._reserved_there)
        if taken:
            cleanup.reserved += zip(self._reserved_there, taken[charged:shown], strict=True)
            for rule, lease in zip(self._held_there, taken[shown:], strict=True):
                cleanup.hold(rule, lease)
            return [*decisions[:charged], *here, *decisions[charged:shown]]
        # When a holder will be done is unknown: so a held rule is the binding one only if no other rule denies.
        for rules, group in (
            (self._reserved_there, decisions[charged:shown]),
            (self.charged, decisions[:charged]),
            (self._held_there, decisions[shown:]),
        ):
            if not all(group):
                return self.denials.by_decisions(request, rules, group)
        return self.denials.by_decisions(request, self._there, decisions)
