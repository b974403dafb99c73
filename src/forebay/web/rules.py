"""Rules: which requests a limit is for, what they are charged, and what a denied request is answered."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.credits import Credits
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.all_of import AllOf
from forebay.core.limiter import Limiter
from forebay.errors import InvalidLimiter, short_repr
from forebay.own_counts import DELAYED, own_count
from forebay.rate import NS, Duration, as_delay_ns
from forebay.shedding.shedder import Shedder
from forebay.web.addresses import AddressList
from forebay.web.bans import Ban
from forebay.web.client import ClientAddress, client_address
from forebay.web.functions import (
    check_function,
    check_statuses,
    checked_bool,
    checked_cost,
    checked_tier,
    has_to_be_awaited,
    result_of,
)
from forebay.web.keys import everyone
from forebay.web.patterns import TOKEN, RequestPattern
from forebay.web.request import KeyFunction, Request
from forebay.web.request_ids import RequestId, check_request_id
from forebay.web.turns import HeldBack

if TYPE_CHECKING:
    from forebay.core.decision import Decision
    from forebay.redis.leased.store import AsyncLeasedLimiter
    from forebay.redis.public_limiters import AsyncRedisLimiter, RedisLimiter

    _AnyLimiter: TypeAlias = Limiter | RedisLimiter | AsyncRedisLimiter | AsyncLeasedLimiter

__all__ = ["DISCONNECTED", "Answer", "BodyLimit", "Denial", "Deny", "Rule", "Shed"]

DISCONNECTED: Final = 499
"""The status that `charge_on` gets when the client disconnected before it had received the whole response."""

# RFC 9110: the value of a field.
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def outcome(status: int, is_disconnected: bool) -> int:
    """The status that `charge_on` gets. An error keeps its status although the client disconnected.

    Otherwise a client could avoid the charge of a refusal by closing the connection.
    """
    return DISCONNECTED if is_disconnected and status < 400 else status


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The headers with the length of the body."""
        own = [(name, value) for name, value in self.headers if name.lower() != "content-length"]
        return [*own, ("Content-Length", str(len(self.body)))]


def check_answer(answer: Answer) -> None:
    """Raises ``InvalidLimiter`` for an answer that can't be sent."""
    status, headers, body = answer
    if type(status) is bool or not isinstance(status, int) or status not in range(200, 600):
        raise InvalidLimiter(f"an Answer has a status such as 429, not {short_repr(status)}")
    if not isinstance(headers, (list, tuple)) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and _is_field(*pair) for pair in headers
    ):
        raise InvalidLimiter(
            f'an Answer has headers such as (("Content-Type", "text/plain"),), not {short_repr(headers)}'
        )
    if not isinstance(body, bytes):
        raise InvalidLimiter(f"an Answer has a body of bytes, not {short_repr(body)}")


def _check_response(status: int | None, answer: object) -> None:
    """Raises ``InvalidLimiter`` for the `status` or the `answer` of a ``Rule``, ``Deny`` or ``Shed``."""
    if status is not None and (type(status) is not int or status not in range(200, 600)):
        raise InvalidLimiter(f"status is an HTTP status such as 429, not {short_repr(status)}")
    if isinstance(answer, Answer):
        check_answer(answer)
    elif answer is not None:
        check_function("answer is an Answer or a callable that makes one of a request and a denial", answer, 2)
        if has_to_be_awaited(answer):
            raise InvalidLimiter(f"answer is a plain function, and {short_repr(answer)} has to be awaited")


def _is_hidden(answer: object) -> bool:
    return isinstance(answer, Answer) and answer.status < 400


def _is_field(name: Any, value: Any) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and TOKEN.fullmatch(name) is not None
        and _VALUE.fullmatch(value) is not None
    )


def is_redis(store: object) -> bool:
    """Whether it is a store over Redis with a sync API."""
    return hasattr(store, "make_limiter") and not getattr(store, "is_awaited", False)


def kind_of(limiter: Any) -> type:
    """The public class of a limiter, also of one over Redis."""
    kind: type = getattr(limiter, "kind", type(limiter))
    return kind


@dataclass(frozen=True)
class Rule:
    """A limit and the requests that it is for.

    * `limiter`: any limiter. The permits of a ``Concurrency`` are held while the request is handled and its response
      is sent. Under ASGI its lease is renewed meanwhile. Under WSGI it is renewed with each part of a body, and while
      the request is held back, so it must last twice as long as the handler computes or a client pauses between two
      of these. Over Redis: a WSGI application needs a ``RedisStore`` or a ``LeasedStore``, an ASGI application
      an ``AsyncRedisStore`` or an ``AsyncLeasedStore``.
    * `path`: a pattern or several; ``*`` matches anything, ``{name}`` one segment, ``{name:path}`` anything; a slash at
      the end makes no difference. ``"/api/*"`` is ``/api`` and everything below. None: every path. The pattern is
      matched with every path that a router may read in a request: with slashes merged, encodings decoded, a root
      removed. A path with a segment of dots, or one that ends with a line feed, matches every pattern.
    * `methods`: as in ``{"POST", "PUT"}``; empty: all. ``GET`` includes ``HEAD``; a WebSocket's is ``"WEBSOCKET"``.
      A method in ``X-HTTP-Method-Override`` counts as well. A CORS preflight, an ``OPTIONS`` with ``Origin`` and
      ``Access-Control-Request-Method``, is charged as other requests if `methods` names ``OPTIONS``. If `methods` is
      empty it isn't: a key has the same limit once more for its preflights.
    * `ignore_case`: whether ``/Login`` matches ``/login``, for routers that ignore case.
    * `key`: for whom a request counts, a callable that takes a ``Request``; None: the client's address.
    * `cost`: how many permits, a number or a callable that takes a ``Request``.
    * `tiers`: other limiters by tier, as in ``{"pro": TokenBucket(store, "pro", "1000/minute"), "internal": None}``;
      None: not limited. All else of the rule is the same. `tier`: a callable that takes a ``Request`` and returns its
      tier, text; `limiter` is for those that aren't in `tiers`.
    * `delay`: hold a request back until its turn, at most so long, instead of denying it, as in ``"2s"``; for a
      ``TokenBucket``, ``LeakyBucket`` or ``MinInterval`` of a ``Store``. A task waits, or the worker's thread.
      `most_delayed`: how many requests of one process are held back at once, by default 4 in threads and 1,000 in an
      event loop; more are denied.
    * `exempt`: a callable that takes a ``Request``; the rule does not apply where it returns True. Or an
      ``AddressList``: the rule does not apply to clients in it. Their address is that of `key`, if it is a
      ``ClientAddress``, or else that of the gate's `client`; a client without a known address isn't exempt.
    * `ban`: a ``Ban``, by which a key with too many denials is denied for a while.
    * `request_id`: a ``RequestId``, by which a client's retry of a request isn't charged again. Without one, each
      attempt is charged.
    * `charge_on`: statuses of responses that stay charged, as in ``{401, 403}`` for failed logins or
      ``range(100, 500)`` for all but the server's own errors, or a callable that takes a status. Other responses get
      their permits back. The permits are taken before the handler runs, so concurrent guesses can't exceed the limit. A
      client that disconnected before it had received the whole response counts as 499, unless the response was an
      error. None: all are charged.
    * `status`: of a denial; by default 429, and 503 for a ``Concurrency`` that everyone shares.
    * `answer`: sent instead of the problem report: an ``Answer`` (with status 200, a shadow ban), or a callable that
      takes the ``Request`` and the ``Denial`` and returns one.
    * `shadow`: decide and count, and enforce nothing: each denial is logged and counted, and no header field shows the
      rule. It decides about requests that the other rules allow. Not for ``Credits``, which it would spend.

    * `otherwise`: the default: the rule is for requests that no enforced rule with a `path` is for. A rule with a path
      also counts here if the request is exempt from it. Where only some readings of a path match such a rule, both are
      charged.

    The functions for `key`, `cost`, `tier`, `exempt` and `charge_on` may be ``async def`` where the application is
    asynchronous. Raises ``InvalidLimiter``.
    """

    limiter: _AnyLimiter
    _: KW_ONLY
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    key: KeyFunction | None = None
    cost: int | Callable[[Request], int | Awaitable[int]] = 1
    tiers: Mapping[str, _AnyLimiter | None] | None = None
    tier: Callable[[Request], str | Awaitable[str]] | None = None
    delay: Duration | None = None
    most_delayed: int | None = None
    exempt: AddressList | Callable[[Request], bool | Awaitable[bool]] | None = None
    ban: Ban | None = None
    request_id: RequestId | None = None
    charge_on: Container[int] | Callable[[int], bool | Awaitable[bool]] | None = None
    status: int | None = None
    answer: Answer | Callable[[Request, Denial], Answer] | None = None
    shadow: bool = False
    otherwise: bool = False
    where: RequestPattern = field(init=False, repr=False)
    by_tier: Mapping[str, Rule | None] = field(init=False, repr=False)
    """For each of `tiers` the rule with its limiter, or None."""
    delay_ns: int | None = field(init=False, repr=False)
    held_back: HeldBack = field(init=False, repr=False, compare=False)
    count_delayed: Callable[[], object] | None = field(init=False, repr=False, compare=False)
    """Counts a request that this rule holds back; None without a `delay`, or if the store is closed."""

    def __post_init__(self) -> None:
        limiter: Any = self.limiter
        if isinstance(limiter, AllOf) or hasattr(limiter, "limiters"):
            raise InvalidLimiter(
                f"a rule is for one limiter, not {short_repr(limiter)}: several rules that match a "
                f"request are charged as "
                "one, all or none"
            )
        if not isinstance(limiter, Limiter) and not hasattr(limiter, "kind"):
            raise InvalidLimiter(
                f"a rule is for one limiter, not {short_repr(limiter)}: write TokenBucket(store, 'orders', '5/minute')"
            )
        for what in ("key", "exempt", "tier"):
            function = getattr(self, what)
            if function is not None and not (what == "exempt" and isinstance(function, AddressList)):
                check_function(f"{what} is a callable that takes a request", function)
        if callable(self.cost):
            check_function("cost is a whole number or a callable that takes a request", self.cost)
        elif isinstance(self.cost, bool) or not isinstance(self.cost, int) or self.cost < 0:
            raise InvalidLimiter(
                f"cost is a whole number or a callable that takes a request, not {short_repr(self.cost)}"
            )
        for what in ("shadow", "otherwise"):
            if not isinstance(getattr(self, what), bool):
                raise InvalidLimiter(f"{what} is True or False, not {short_repr(getattr(self, what))}")
        if self.shadow and self.ban is not None:
            raise InvalidLimiter(f"the rule of {self.limiter!r} in the shadow bans no key: leave ban or shadow out")
        if self.shadow and kind_of(limiter) is Credits:
            raise InvalidLimiter(
                f"the rule of {self.limiter!r} in the shadow would spend what keys have paid for: leave shadow out, or "
                "count the requests by a FixedWindow in the shadow"
            )
        if self.ban is not None and not isinstance(self.ban, Ban):
            raise InvalidLimiter(
                f"ban is a Ban, not {short_repr(self.ban)}: write "
                'Ban(store, "guessers", "20/minute", lasts="10 minutes")'
            )
        _check_response(self.status, self.answer)
        if callable(self.charge_on):
            check_function("charge_on is a set of statuses or a callable that takes a status", self.charge_on)
        elif self.charge_on is not None:
            check_statuses("charge_on", self.charge_on)
        if self.charge_on is not None and self.is_held:
            raise InvalidLimiter(f"{self.limiter!r} gets every permit back: charge_on has no effect on it")
        if self.request_id is not None:
            check_request_id(self)
        object.__setattr__(self, "where", RequestPattern.of(self.path, self.methods, self.ignore_case))
        object.__setattr__(self, "delay_ns", self._checked_delay_ns())
        object.__setattr__(self, "held_back", HeldBack(self.most_delayed))
        # A rule of a closed store holds nothing back: a gate answers by its `when_unavailable`.
        has_count = self.delay_ns is not None and not limiter.store.closed
        count = own_count(limiter.store, DELAYED) if has_count else None
        object.__setattr__(self, "count_delayed", count)
        object.__setattr__(self, "by_tier", self._rules_by_tier())

    def _checked_delay_ns(self) -> int | None:
        most: Any = self.most_delayed
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1 or self.delay is None):
            raise InvalidLimiter(
                f"most_delayed is a whole number of at least 1, for a rule with a delay, not {short_repr(most)}"
            )
        if self.delay is None:
            return None
        if kind_of(self.limiter) not in (TokenBucket, LeakyBucket, MinInterval) or self.is_remote:
            raise InvalidLimiter(
                f"{self.limiter!r} can't delay requests, as it books no turns: delay is for a TokenBucket, a "
                "LeakyBucket or a MinInterval of a Store"
            )
        return as_delay_ns(self.delay, "delay is None or")

    def _rules_by_tier(self) -> dict[str, Rule | None]:
        if (self.tiers is None) != (self.tier is None):
            raise InvalidLimiter(
                f"the rule of {self.limiter!r} has only one of tiers and tier: tiers has the limiters, and tier is a "
                "callable that takes a request and returns one of their names"
            )
        tiers: Any = {} if self.tiers is None else self.tiers
        if not isinstance(tiers, Mapping) or not all(isinstance(name, str) for name in tiers):
            raise InvalidLimiter(
                f'tiers are limiters by name, as {{"pro": TokenBucket(store, "pro", "1000/minute")}}, not '
                f"{short_repr(tiers)}"
            )
        by_tier = {
            name: None if limiter is None else dataclasses.replace(self, limiter=limiter, tiers=None, tier=None)
            for name, limiter in tiers.items()
        }
        for rule in by_tier.values():
            if rule is not None:
                # Together, they hold back as many requests as one rule may.
                object.__setattr__(rule, "held_back", self.held_back)
        return by_tier

    @property
    def denial_status(self) -> int:
        if self.status is not None:
            return self.status
        return 503 if self.is_held and self.key is everyone else 429

    @property
    def is_held(self) -> bool:
        """Whether its permits are held until the request ends."""
        return kind_of(self.limiter) is Concurrency

    @property
    def is_reserved(self) -> bool:
        """Whether its permits may come back after they were taken, or are for a later time."""
        return self.charge_on is not None or self.delay_ns is not None

    @property
    def is_remote(self) -> bool:
        """Whether a decision is a round trip to Redis, or may be one."""
        return self.is_leased or not isinstance(self.limiter, Limiter)

    @property
    def is_leased(self) -> bool:
        """Whether the host borrows permits from Redis."""
        return getattr(self.limiter.store, "is_leased", False)

    @property
    def is_awaited(self) -> bool:
        limiter: Any = self.limiter
        return self.is_remote and bool(limiter.store.is_awaited)

    @cached_property
    def awaits_charge_on(self) -> bool:
        return has_to_be_awaited(self.charge_on)

    @property
    def is_hidden(self) -> bool:
        """Whether its denial looks like success, so that no header field may reveal it."""
        return _is_hidden(self.answer)

    @property
    def functions_to_await(self) -> list[Any]:
        return [
            function
            for function in (self.key, self.cost, self.tier, self.exempt, self.charge_on)
            if has_to_be_awaited(function)
        ]

    def exempts(self, request: Request, client: KeyFunction) -> bool:
        """`client`: the key function of the gate."""
        if self.exempt is None:
            return False
        if isinstance(self.exempt, AddressList):
            return client_address(self.key, client).address_of(request) in self.exempt
        return checked_bool(self, "exempt", result_of(self.exempt, request))

    def tier_of(self, request: Request) -> str | None:
        """None if the rule has no tiers."""
        return None if self.tier is None else checked_tier(self, result_of(self.tier, request))

    def cost_of(self, request: Request) -> int:
        return checked_cost(self, result_of(self.cost, request)) if callable(self.cost) else self.cost

    def stays_charged(self, status: int) -> bool:
        if self.charge_on is None:
            return True
        return self.checked_charge(self.charge_on(status)) if callable(self.charge_on) else status in self.charge_on

    def checked_charge(self, result: object) -> bool:
        """The result of a function for `charge_on`. Raises ``InvalidLimiter``."""
        return checked_bool(self, "charge_on", result)


@dataclass(frozen=True)
class BodyLimit:
    """How many bytes a request's body may have. A larger one is answered by 413, before or while it is read.

    With `responses`, how many a response's may have. A response that states a larger length is replaced by a 500. Of
    another, the server closes the connection when it exceeds the limit. Either is logged as an error.
    """

    max_bytes: int
    _: KW_ONLY
    responses: bool = False
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    where: RequestPattern = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 0:
            raise InvalidLimiter(f"max_bytes is a whole number of bytes, not {short_repr(self.max_bytes)}")
        if not isinstance(self.responses, bool):
            raise InvalidLimiter(f"responses is True or False, not {short_repr(self.responses)}")
        object.__setattr__(self, "where", RequestPattern.of(self.path, self.methods, self.ignore_case))


@dataclass(frozen=True)
class Deny:
    """Refuses clients by their address: ``Deny(AddressList("203.0.113.0/24"))``, among the rules.

    `path`, `methods` and `ignore_case` are those of ``Rule``. `status`: of the refusal. `answer`: sent instead of the
    problem report, an ``Answer`` or a callable that takes the ``Request`` and the ``Denial`` and returns one.

    A refused request is charged by no rule. The address is that of `client`, or of the gate's, a ``ClientAddress``;
    where the server reports none, as over a Unix socket, the request is answered by 500. Raises ``InvalidLimiter``.
    """

    addresses: AddressList
    _: KW_ONLY
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    status: int = 403
    answer: Answer | Callable[[Request, Denial], Answer] | None = None
    client: ClientAddress | None = None
    where: RequestPattern = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.addresses, AddressList):
            raise InvalidLimiter(
                f"a Deny is for an AddressList, not {short_repr(self.addresses)}: write "
                'Deny(AddressList("203.0.113.7"))'
            )
        if self.client is not None and not isinstance(self.client, ClientAddress):
            raise InvalidLimiter(f"client is a ClientAddress, not {short_repr(self.client)}")
        if self.status is None:
            raise InvalidLimiter("status is an HTTP status such as 403, not None")
        _check_response(self.status, self.answer)
        object.__setattr__(self, "where", RequestPattern.of(self.path, self.methods, self.ignore_case))

    @property
    def denial_status(self) -> int:
        return self.status

    @property
    def is_hidden(self) -> bool:
        """As a rule's."""
        return _is_hidden(self.answer)


@dataclass(frozen=True)
class Shed:
    """Denies requests by a shedder while the host is overloaded: ``Shed(AdaptiveLimit(store, "web"))``, in the rules.

    `shedder`: a ``ReservedSlots``, ``BusyWorkers`` or ``AdaptiveLimit`` of ``forebay.shedding``. `priority`: a callable
    that takes a ``Request`` and returns one of the shedder's priorities; it may be ``async def`` where the application
    is asynchronous. It is needed if the shedder has priorities. `path`, `methods` and `ignore_case` are those of
    ``Rule``. `status`: of a denial. `answer`: sent instead of the problem report, an ``Answer`` or a callable that
    takes the ``Request`` and the ``Denial`` and returns one. `retry_after`: a denied client is asked to wait so long,
    in whole seconds, or up to twice as long, at random, so that not all of them come back at once.

    A request is counted until its response has been sent. Its latency is a sample for an ``AdaptiveLimit``, except if
    the handler fails or the client leaves; a response of 503 or 504 counts as dropped. Requests are shed before the
    rules decide, so a request that is shed is charged by no rule. Raises ``InvalidLimiter``.
    """

    shedder: Shedder
    _: KW_ONLY
    priority: Callable[[Request], str | Awaitable[str]] | None = None
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    status: int = 503
    answer: Answer | Callable[[Request, Denial], Answer] | None = None
    retry_after: Duration = "2s"
    where: RequestPattern = field(init=False, repr=False)
    retry_after_s: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shedder, Shedder):
            raise InvalidLimiter(
                f"a Shed is for a shedder, not {short_repr(self.shedder)}: write "
                'Shed(forebay.shedding.AdaptiveLimit(store, "web"))'
            )
        if self.priority is not None:
            check_function("priority is a callable that takes a request", self.priority)
        if (self.priority is None) != (not self.shedder.priorities):
            has = f"has the priorities {self.shedder.priorities}" if self.shedder.priorities else "has no priorities"
            raise InvalidLimiter(
                f"{self.shedder!r} {has}, so its Shed {'needs a' if self.shedder.priorities else 'takes no'} priority="
            )
        if self.status is None:
            raise InvalidLimiter("status is an HTTP status such as 503, not None")
        _check_response(self.status, self.answer)
        object.__setattr__(self, "where", RequestPattern.of(self.path, self.methods, self.ignore_case))
        retry_after_ns = as_delay_ns(self.retry_after, "retry_after is")
        object.__setattr__(self, "retry_after_s", max(1, -(-retry_after_ns // NS)))

    @property
    def functions_to_await(self) -> list[Any]:
        return [self.priority] if has_to_be_awaited(self.priority) else []

    @property
    def limiter(self) -> Shedder:
        """The shedder, whose name a denial has."""
        return self.shedder

    @property
    def denial_status(self) -> int:
        return self.status

    @property
    def is_hidden(self) -> bool:
        """As a rule's."""
        return _is_hidden(self.answer)


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request is not handled.

    ``rule`` is the binding one: of the rules that denied, the one with the longest wait; or the ``Deny`` or ``Shed``.
    ``violated`` has the names of all that denied, or of the ``Ban``. ``retry_after_s``: the same request is allowed
    after so many whole seconds if nothing else happens; None: never, because it costs more than the limit, or is
    refused for good.
    ``decision`` is the limiter's or the ban's, None then. ``fields`` are the header fields that describe the denial.
    """

    rule: Rule | Deny | Shed
    violated: tuple[str, ...]
    decision: Decision | None
    retry_after_s: int | None
    fields: tuple[tuple[str, str], ...]
    denied_by: tuple[Rule, ...] = ()
    """The rules whose limits denied the request. Limiters of several stores may have the same name."""
    cause: str = ""
    """Why the limits could not be checked: `UNAVAILABLE`, `FULL` or `UNKNOWN` of answers.py; empty if they were."""
    is_ban: bool = False
    """Whether a ``Ban`` or a ``Deny`` refused the request, whatever is left of its limits."""

    @property
    def is_unavailable(self) -> bool:
        """Whether the limits could not be checked."""
        return bool(self.cause)


def with_tiers(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, and behind each those of its tiers."""
    return tuple(each for rule in rules for each in (rule, *rule.by_tier.values()) if each is not None)


def check_event_loop(given: Iterable[object], in_loop: bool | None, client: KeyFunction | None = None) -> None:
    """Refuse rules that would block an event loop, or that need one where there is none.

    `in_loop`: whether the rules are checked in an event loop; None: unknown. Raises ``InvalidLimiter``.
    """
    given = list(given)
    rules = with_tiers(rule for rule in given if isinstance(rule, Rule))
    functions = [client] if has_to_be_awaited(client) else []
    functions += [one for rule in given if isinstance(rule, (Rule, Shed)) for one in rule.functions_to_await]
    if functions and in_loop is False:
        raise InvalidLimiter(
            f"{short_repr(functions[0])} has to be awaited, and this application has no event loop: "
            f"write a plain function"
        )
    for rule in rules:
        if not rule.is_remote or in_loop is None:
            continue
        if in_loop and not rule.is_awaited:
            raise InvalidLimiter(
                f"{rule.limiter!r} would stop the event loop for each round trip to Redis: make it over an "
                f"{'AsyncLeasedStore' if rule.is_leased else 'AsyncRedisStore'}"
            )
        if not in_loop and rule.is_awaited:
            kind = "LeasedStore" if rule.is_leased else "RedisStore"
            raise InvalidLimiter(f"{rule.limiter!r} has to be awaited: make it over a {kind}")
