"""What limiters ask of Redis, and what they make of the answers; whoever sends it, and however."""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, ForeignState, InvalidCost, InvalidKey, StoreUnavailable, shown
from forebay.rate import Duration, Rate, as_period_ns
from forebay.redis.algorithms import Algorithm, Charge, FixedWindow, Seen, delay_us
from forebay.redis.keys import fingerprint
from forebay.redis.scripts import Script, script
from forebay.redis.transport.servers import Call

if TYPE_CHECKING:
    from forebay.redis.base import RedisStoreBase

__all__ = [
    "Booked",
    "BookingView",
    "Command",
    "CommandFlow",
    "LimiterCommands",
    "LimiterSpec",
    "costs_of",
    "encode_args",
    "given_up",
    "keys_of",
    "whole_cost",
]

T = TypeVar("T")

HIT: Final[bytes] = b"hit"
PEEK: Final[bytes] = b"peek"
# What a store that is being closed still does.
GIVING_BACK: Final[set[bytes]] = {b"cancel", b"refund", b"release"}
DEFAULT_REQUEST_TTL: Final = "5 minutes"
ONLY_WHOLE_NUMBERS: Final = {int}
# The integer as Python has it, once: most costs are this very object.
ONE: Final = 1


@dataclass(slots=True)
class Command(Generic[T]):
    """One call of a script."""

    script: Script
    keys: list[bytes]
    arguments: list[Any]
    size: int
    """How many numbers answer it."""
    read: Callable[[list[int]], T]
    if_given_up: Callable[[list[int]], CommandFlow[None]] | None = None
    """Of a call that goes on when the task that waits for its answer is cancelled: what is to be done then."""

    @property
    def call(self) -> Call:
        return ("EVALSHA", self.script.sha, b"%d" % len(self.keys), *self.keys, *self.arguments)

    def result(self, reply: Any) -> T:
        """What a reply means."""
        return self.read(checked(reply, self.size, self.keys))


def checked(reply: Any, size: int, keys: Sequence[bytes]) -> list[int]:
    """No reply is taken on trust."""
    if type(reply) is not list or set(map(type, reply)) != ONLY_WHOLE_NUMBERS:
        raise StoreUnavailable(f"Redis answered a limiter's script with {shown(reply)}, not with whole numbers")
    if reply[0] == -1 and len(reply) == 2 and 1 <= reply[1] <= len(keys):
        raise ForeignState(keys[reply[1] - 1].decode("utf-8", "backslashreplace"))
    if len(reply) != size:
        raise StoreUnavailable(f"Redis answered a limiter's script with {shown(reply)}: {size} were expected")
    return reply


# What takes one call or several: each is sent to whoever sends it, who sends back what it came to.
CommandFlow = Generator[Command[Any], Any, T]


def given_up(command: Sequence[Command[Any]], replies: Sequence[Any]) -> list[CommandFlow[None]]:
    """What is to be done about calls whose answers nobody waits for any more."""
    flows = []
    for one, reply in zip(command, replies, strict=False):
        if one.if_given_up is not None and not isinstance(reply, Exception):
            with suppress(ForebayError):
                flows.append(one.if_given_up(checked(reply, one.size, one.keys)))
    return flows


def encode_args(arguments: Iterable[int | bytes | str]) -> list[bytes | str]:
    """Arguments of a script, all of them bytes or text.

    hiredis asks Python for the text of anything else, and takes it ill, with the whole process, if a signal comes then.
    """
    return [argument if isinstance(argument, bytes | str) else b"%d" % argument for argument in arguments]


def whole_cost(cost: Any) -> int:
    if type(cost) is not int:
        try:
            if isinstance(cost, bool):
                raise TypeError
            cost = operator.index(cost)
        except TypeError:
            raise InvalidCost(f"a cost is a whole number of at least 0, not {shown(cost)}") from None
    if cost < 0:
        raise InvalidCost(f"a cost is a whole number of at least 0, not {shown(cost)}")
    return int(cost)


def keys_of(keys: Iterable[T]) -> list[T]:
    if isinstance(keys, (str, bytes)):
        raise InvalidKey(f"allow_many takes a list of keys, not the one key {shown(keys)}")
    return list(keys)


def costs_of(costs: Iterable[Any] | None, count: int) -> list[Any]:
    if isinstance(costs, int):
        raise InvalidCost(f"costs is a list with one cost for each key, not {shown(costs)}")
    listed = [1] * count if costs is None else list(costs)
    if len(listed) != count:
        raise InvalidCost(f"{count} keys need {count} costs, not {len(listed)}")
    return listed


@dataclass(slots=True)
class Booked:
    """What became of a ``reserve``, and how to cancel it."""

    allowed: bool
    delay_ns: int
    due_ns: int
    """By this host's monotonic clock."""
    cancelling: CommandFlow[None] | None
    """None if there is nothing to cancel."""
    pid: int
    full: bool = False
    """Of a host's share: whether its store had no room for the key."""

    @classmethod
    def now(cls, allowed: bool, delay_us: int, cancelling: CommandFlow[None] | None) -> Booked:
        # The decision was made before its answer was here: so what is waited from now on is never too short.
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return cls(allowed, 1000 * delay_us, now_ns + 1000 * delay_us, cancelling, os.getpid())

    def cancel(self) -> CommandFlow[None]:
        """Once, and in the process that has booked."""
        if self.cancelling and self.pid == os.getpid():
            cancelling, self.cancelling = self.cancelling, None
            yield from cancelling


class BookingView:
    """The base of both kinds of reservations."""

    __slots__ = ("_booked", "_store")

    def __init__(self, store: Any, booked: Booked) -> None:
        self._store, self._booked = store, booked

    @property
    def store(self) -> Any:
        """Whose permits they are."""
        return self._store

    @property
    def allowed(self) -> bool:
        return self._booked.allowed

    @property
    def delay_ns(self) -> int:
        return self._booked.delay_ns

    @property
    def due_ns(self) -> int:
        return self._booked.due_ns

    @property
    def full(self) -> bool:
        return self._booked.full

    @property
    def delay(self) -> float:
        """In seconds; never less than ``delay_ns``."""
        return seconds_up(self._booked.delay_ns)

    def give_back_flow(self) -> CommandFlow[None]:
        return self._booked.cancel()

    def __bool__(self) -> bool:
        return self._booked.allowed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(allowed={self.allowed}, delay={self.delay})"


def seconds_up(duration_ns: int) -> float:
    seconds = duration_ns / 1e9
    return seconds if duration_ns < 2**50 else math.nextafter(seconds, math.inf)


class LimiterSpec(NamedTuple):
    """What a limiter is made of."""

    algorithm: Algorithm
    parameters: dict[str, Any]
    """As its attributes show them."""


class LimiterCommands:
    """What both kinds of limiters are: a name, a store and an algorithm, and what calls of its script look like."""

    def __init__(self, store: RedisStoreBase, name: str, kind: type, made: LimiterSpec) -> None:
        self._store = store
        self._name = name
        self._kind = kind
        self._algorithm, self._parameters = algorithm, _ = made
        self._script = script("decide", algorithm.script)
        self._head, self._tail = store._key_affixes(name, algorithm.suffix)
        self._encode_key = store._encode_key
        self._size = 3 + algorithm.told
        # The usual request. None if a limiter has something to say about each.
        head = HIT, b"0", algorithm.script.encode()
        self._usual: tuple[bytes | str, ...] | None = (*head, *encode_args(algorithm.unit.arguments))
        self._usual_decision = algorithm.usual_decision
        # What answers while Redis is away, if the store's policy has it so.
        self._fallback: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def limit(self) -> int:
        """The most permits that can be allowed at once."""
        return self._algorithm.limit

    @property
    def may_free_early(self) -> bool:
        return self._algorithm.may_free_early

    def __getattr__(self, name: str) -> Any:
        """What it was made of: rate, burst, capacity, interval_ns, ..."""
        try:
            return self.__dict__["_parameters"][name]
        except KeyError:
            kind = self.__dict__.get("_kind", type(self)).__name__
            raise AttributeError(f"{kind} over Redis has no attribute {name!r}") from None

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self._parameters.items())
        return f"<{self._kind.__name__} {self._name!r} {parameters}, over {self._store!r}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same server and name")

    def _key(self, key: Key) -> bytes:
        """What stands for a key in Redis."""
        return self._head + self._encode_key(key) + self._tail

    def queue_key(self, key: Key) -> object:
        """What those who wait for it have in common."""
        return self._key(key)

    def _charge_for(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        """What a request asks of the limiter."""
        algorithm = algorithm or self._algorithm
        if type(cost) is int and cost == 1:
            return algorithm.unit
        return algorithm.charge(whole_cost(cost), self._name)

    def _refund_charge(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        """What a refund asks: at most what a new key has."""
        algorithm = algorithm or self._algorithm
        return self._charge_for(key, min(whole_cost(cost), algorithm.limit), algorithm)

    def _tier(self, rate: str | Rate | None, burst: int | None) -> Algorithm:
        """The limiter's own algorithm, or one with what a call brings along."""
        if rate is None and burst is None:
            return self._algorithm
        return self._algorithm.tier(rate, burst, self)

    def _took(self, key: bytes, charge: Charge, seen: Seen) -> None:
        """A request was allowed and charged."""

    def _asked(self, what: bytes, key: bytes, charge: Charge, size: int, read: Callable[[list[int]], T]) -> Command[T]:
        return Command(
            self._script, [key], [what, b"0", self._algorithm.script, *encode_args(charge.arguments)], size, read
        )

    def _ask_allow(self, key: Key, cost: Any = 1) -> Command[bool]:
        return self._asked(HIT, self._key(key), self._charge_for(key, cost), self._size, was_allowed)

    def _ask_hit(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Command[Decision]:
        algorithm = self._tier(rate, burst)
        charge = self._charge_for(key, cost, algorithm)
        command = self._ask_decision(HIT, self._key(key), algorithm, charge)
        if request_id is None and request_ttl is not None:
            raise InvalidKey(
                f"a request_ttl of {shown(request_ttl)} says how long a request_id is remembered, and none is given"
            )
        if request_id is not None and charge.cost:
            ttl_ns = as_period_ns(DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
            command.arguments[1] = b"%d" % -(-ttl_ns // 1000)
            command.keys.append(self._mark(command.keys[0], request_id, charge))
        return command

    def _ask_peek(
        self, key: Key, cost: Any, rate: str | Rate | None = None, burst: int | None = None
    ) -> Command[Decision]:
        algorithm = self._tier(rate, burst)
        return self._ask_decision(PEEK, self._key(key), algorithm, self._charge_for(key, cost, algorithm))

    def _ask_decision(self, what: bytes, key: bytes, algorithm: Algorithm, charge: Charge) -> Command[Decision]:
        def read(reply: list[int]) -> Decision:
            seen = Seen(reply[0] != 0, reply[1], reply[3:])
            if reply[0] == 1 and what is HIT:
                self._took(key, charge, seen)
            return algorithm.decision(self._name, charge, seen)

        return self._asked(what, key, charge, self._size, read)

    def _mark(self, key: bytes, request_id: Key, charge: Charge) -> bytes:
        """Where it is noted that a request has been charged. One of another cost is another request."""
        try:
            hashed = fingerprint(request_id)
        except InvalidKey:
            raise InvalidKey(f"a request_id is str, bytes, int or a tuple of them, not {shown(request_id)}") from None
        amount = str(charge.arguments[0]).encode()
        return key + b":request:" + blake2b(hashed + amount, digest_size=16).hexdigest().encode()

    def _ask_reserve(self, key: Key, cost: Any, max_delay: Duration | None) -> Command[Booked]:
        algorithm, redis_key = self._algorithm, self._key(key)
        charge = algorithm.allow_wait(self._charge_for(key, cost), delay_us(max_delay))

        def read(reply: list[int]) -> Booked:
            seen = Seen(reply[0] == 1, reply[1], reply[3:])
            if not seen.allowed:
                return Booked.now(False, algorithm.refused_delay_us(charge, seen), None)
            self._took(redis_key, charge, seen)
            cancelling = self._cancel(redis_key, charge, seen) if charge.cost else None
            return Booked.now(True, algorithm.booked_delay_us(charge, seen), cancelling)

        return self._asked(HIT, redis_key, charge, self._size, read)

    def _kept(self, key: bytes, charge: Charge, seen: Seen) -> Any:
        """What gives back what a request was charged among several limits."""
        return Booked.now(True, 0, self._cancel(key, charge, seen) if charge.cost else None)

    def _cancel(self, key: bytes, charge: Charge, seen: Seen) -> CommandFlow[None]:
        yield self._asked(b"cancel", key, self._algorithm.cancellation(charge, seen), 2, _nothing)

    def _refund(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> CommandFlow[None]:
        charge = self._refund_charge(key, cost, self._tier(rate, burst))
        command = self._asked(b"refund", self._key(key), charge, 2, _nothing)
        if request_id is not None:
            if whole_cost(cost) > charge.cost:
                # Nothing that was charged once.
                return
            command.arguments[1] = b"1"
            command.keys.append(self._mark(command.keys[0], request_id, charge))
        yield command

    def _ask_reset(self, key: Key) -> Command[None]:
        return self._asked(b"reset", self._key(key), self._algorithm.unit, 2, _nothing)

    def _ask_many(self, keys: Iterable[Key], costs: Iterable[Any] | None) -> list[Command[bool]]:
        """All of them, before any is sent: so one that can't be used leaves all uncharged."""
        listed = keys_of(keys)
        return [self._ask_allow(key, cost) for key, cost in zip(listed, costs_of(costs, len(listed)), strict=True)]


class StaggeredCommands(LimiterCommands):
    """Of a fixed window that begins at a time of each key's own."""

    def __init__(self, store: RedisStoreBase, name: str, kind: type, made: LimiterSpec) -> None:
        super().__init__(store, name, kind, made)
        self._usual = None

    def _charge_for(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        assert isinstance(self._algorithm, FixedWindow)
        return self._algorithm.staggered(super()._charge_for(key, cost, algorithm), fingerprint(key))


def was_allowed(reply: list[int]) -> bool:
    return reply[0] != 0


def _nothing(reply: list[int]) -> None:
    return None
