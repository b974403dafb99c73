"""Commands of one limiter to Redis, and the decoders of their replies.

Sans-I/O: this module opens no connection and waits for nothing. ``executor.py`` and ``async_executor.py`` send the
commands; ``algorithms.py`` builds their arguments.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, TypeVar

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.credits import Credits
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.arguments import (
    DEFAULT_REQUEST_TTL,
    KEPT,
    MOST_PERMITS,
    cost_of,
    kept,
    no_reset_of_credits,
    permits_of,
    too_many_permits,
    ttl_without_id,
)
from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.errors import (
    ForebayError,
    ForeignState,
    InvalidKey,
    InvalidLimiter,
    LimitExceeded,
    StoreUnavailable,
    short_repr,
)
from forebay.host_time import host_ns
from forebay.rate import Duration, Rate, as_period_ns, as_rate
from forebay.redis import algorithms
from forebay.redis.algorithms import Algorithm, Charge, Gcra, LeakyBucket, Seen, delay_us
from forebay.redis.keys import KeySpace, fingerprint
from forebay.redis.scripts import Script, script
from forebay.redis.transport.servers import Call

__all__ = [
    "Booked",
    "Command",
    "CommandFlow",
    "LimiterCommands",
    "LimiterSpec",
    "StaggeredCommands",
    "encode_args",
    "forget",
    "given_up",
    "mark_key",
    "noop",
    "read_nothing",
    "remember",
    "was_allowed",
]

T = TypeVar("T")
U = TypeVar("U")

HIT: Final[bytes] = b"hit"
PEEK: Final[bytes] = b"peek"
# The algorithms that can convert a state to another limit.
CONVERTED: Final = {"gcra", "fixed", "sliding"}
# The operations that a store still sends while it is being closed.
GIVING_BACK: Final[set[bytes]] = {b"cancel", b"refund", b"release"}
ONLY_WHOLE_NUMBERS: Final = {int}
# CPython has one object for the integer 1, so a comparison by identity recognises most costs.
ONE: Final = 1


@dataclass(slots=True)
class Command(Generic[T]):
    """One call of a script."""

    script: Script
    keys: list[bytes]
    arguments: list[Any]
    size: int
    """How many numbers the reply has."""
    read: Callable[[list[int]], T]
    if_given_up: Callable[[list[int]], CommandFlow[None]] | None = None
    """Makes the flow that gives back the call's permits, if the task that waited for the reply was cancelled."""

    @property
    def call(self) -> Call:
        return ("EVALSHA", self.script.sha, b"%d" % len(self.keys), *self.keys, *self.arguments)

    def then(self, convert: Callable[[T], U]) -> Command[U]:
        """The same call, with its result converted."""
        read = self.read
        return Command(
            self.script,
            self.keys,
            self.arguments,
            self.size,
            lambda reply: convert(read(reply)),
            self.if_given_up,
        )

    def result(self, reply: Any) -> T:
        """Check and decode a reply. Raises ``StoreUnavailable`` and ``ForeignState``."""
        return self.read(checked(reply, self.size, self.keys))


def checked(reply: Any, size: int, keys: Sequence[bytes]) -> list[int]:
    """A reply that consists of `size` whole numbers. Raises ``StoreUnavailable`` and ``ForeignState`` for any other."""
    if type(reply) is not list or set(map(type, reply)) != ONLY_WHOLE_NUMBERS:
        raise StoreUnavailable(f"Redis answered a limiter's script with {short_repr(reply)}, not with whole numbers")
    if reply[0] == -1 and len(reply) == 2 and 1 <= reply[1] <= len(keys):
        raise ForeignState(keys[reply[1] - 1].decode("utf-8", "backslashreplace"))
    if len(reply) != size:
        raise StoreUnavailable(f"Redis answered a limiter's script with {short_repr(reply)}: {size} were expected")
    return reply


# A generator of one or more commands: an executor runs each and sends its result back into the generator.
CommandFlow = Generator[Command[Any], Any, T]


def given_up(command: Sequence[Command[Any]], replies: Sequence[Any]) -> list[CommandFlow[None]]:
    """The flows that give back the permits of commands, after the task that waited for the replies was cancelled."""
    flows = []
    for one, reply in zip(command, replies, strict=False):
        if one.if_given_up is not None and not isinstance(reply, Exception):
            with suppress(ForebayError):
                flows.append(one.if_given_up(checked(reply, one.size, one.keys)))
    return flows


def encode_args(arguments: Iterable[int | bytes | str]) -> list[bytes | str]:
    """Arguments of a script, all of them bytes or text.

    hiredis calls Python for the text of any other type. A signal during that call can crash the process.
    """
    return [argument if isinstance(argument, bytes | str) else b"%d" % argument for argument in arguments]


@dataclass(slots=True)
class Booked:
    """The result of a ``reserve``, and the flow that cancels it."""

    allowed: bool
    delay_ns: int
    due_ns: int
    """By this host's monotonic clock."""
    cancelling: CommandFlow[None] | None
    """None if there is nothing to cancel."""
    pid: int
    full: bool = False
    """Whether a host's share has denied the request because its store had no room for the key."""
    first_cancel: threading.Lock = field(default_factory=threading.Lock)
    """Only the first call of ``cancel`` acquires it, and none releases it."""

    @classmethod
    def now(cls, allowed: bool, delay_us: int, cancelling: CommandFlow[None] | None) -> Booked:
        # Redis decided before its reply arrived, so a wait that starts now is never too short.
        now_ns = host_ns()
        return cls(allowed, 1000 * delay_us, now_ns + 1000 * delay_us, cancelling, os.getpid())

    def cancel(self) -> CommandFlow[None]:
        """Yield the cancelling flow's commands: once, and only in the process that booked."""
        if self.cancelling and self.pid == os.getpid() and self.first_cancel.acquire(blocking=False):
            yield from self.cancelling


class LimiterSpec(NamedTuple):
    """An algorithm, and the parameters of the limiter."""

    algorithm: Algorithm
    parameters: dict[str, Any]
    """The values that the limiter's attributes show."""


class LimiterCommands:
    """Makes the commands of one limiter from its name, its algorithm and the key space of its store.

    `owner` names the store in errors. `fallback` decides while Redis is unavailable; it is None if the store denies.
    """

    fallback: Any

    def __init__(self, keyspace: KeySpace, owner: str, name: str, kind: type, spec: LimiterSpec) -> None:
        self.keyspace = keyspace
        self._owner = owner
        self.name = name
        self.kind = kind
        self.algorithm, self.parameters = algorithm, _ = spec
        self.script = script("decide", algorithm.script)
        self._head, self._tail = keyspace.affixes(name, algorithm.suffix)
        self._encode_key = keyspace.encode
        self.size = 3 + algorithm.number_count
        self.comes_back = kind is Credits or kind is Concurrency
        """Whether the charge of a cancelled caller is given back, as no time brings it back."""
        # The arguments of the usual request. None if each request has arguments of its own, or may be given up.
        head = HIT, b"0", algorithm.script.encode()
        self.usual: tuple[bytes | str, ...] | None = (
            None if self.comes_back else (*head, *encode_args(algorithm.unit.arguments))
        )
        self.usual_decision: Callable[[Sequence[int]], Decision] = partial(algorithm.usual_decision, name)

    @property
    def limit(self) -> int:
        return self.algorithm.limit

    @property
    def may_free_early(self) -> bool:
        return self.algorithm.may_free_early

    def __repr__(self) -> str:
        """The limiter's ``repr``, which errors show to users."""
        parameters = "".join(f" {name}={value}," for name, value in self.parameters.items()) or ","
        return f"<{self.kind.__name__} {self.name!r}{parameters} over {self._owner}>"

    def key(self, key: Key) -> bytes:
        """The Redis key of the state of `key`."""
        return self._head + self._encode_key(key) + self._tail

    def charge_for(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        algorithm = algorithm or self.algorithm
        if type(cost) is int and cost == 1:
            return algorithm.unit
        return algorithm.charge(cost_of(cost), self.name)

    def refund_charge(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        """The charge that a refund gives back: at most the permits that a fresh key has."""
        algorithm = algorithm or self.algorithm
        return self.charge_for(key, min(cost_of(cost), algorithm.limit), algorithm)

    def tier(self, rate: str | Rate | None, burst: int | None) -> Algorithm:
        """The limiter's own algorithm, or one with the rate and burst of a call."""
        if rate is None and burst is None:
            return self.algorithm
        return self.algorithm.tier(rate, burst, self)

    def check_request(self, key: Key, cost: Any, rate: str | Rate | None, burst: int | None) -> None:
        """Raise for a request that can never be allowed."""
        self.key(key)
        self.charge_for(key, cost, self.tier(rate, burst))

    def took(self, key: bytes, charge: Charge, seen: Seen) -> None:
        """Called for each request that Redis has allowed and charged."""

    def allow(self, key: Key, cost: Any) -> Command[bool]:
        return self._command(HIT, self.key(key), self.charge_for(key, cost), self.size, was_allowed)

    def hit(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Command[Decision]:
        algorithm = self.tier(rate, burst)
        charge = self.charge_for(key, cost, algorithm)
        command = self._decision(HIT, self.key(key), algorithm, charge)
        if request_id is None and request_ttl is not None:
            raise ttl_without_id(request_ttl)
        if request_id is not None and charge.cost:
            self.check_request_ids()
            remember(command, [charge], request_id, request_ttl)
            # A retry with the id isn't charged: the charge is its own then.
            command.if_given_up = None
        return command

    def peek(self, key: Key, cost: Any, rate: str | Rate | None = None, burst: int | None = None) -> Command[Decision]:
        algorithm = self.tier(rate, burst)
        return self._decision(PEEK, self.key(key), algorithm, self.charge_for(key, cost, algorithm))

    def take_up_to(self, key: Key, most: Any, rate: str | Rate | None = None, burst: int | None = None) -> Command[int]:
        algorithm = self.tier(rate, burst)
        one = self.charge_for(key, 1, algorithm)
        # A larger number than the limit may be too large for the script.
        arguments = [min(cost_of(most), algorithm.limit), algorithm.script, *one.arguments]

        def given_up(reply: list[int]) -> CommandFlow[None]:
            yield from self.refund(key, reply[0])

        return Command(
            script("take_up_to", algorithm.script),
            [self.key(key)],
            encode_args(arguments),
            2,
            lambda reply: reply[0],
            given_up if self.comes_back else None,
        )

    def convert(
        self,
        key: Key,
        old_rate: Any,
        old_burst: int | None,
        rate: str | Rate | None,
        burst: int | None,
        keep: str | None,
    ) -> Command[int]:
        if self.kind not in (TokenBucket, FixedWindow, SlidingWindow) or self.algorithm.script not in CONVERTED:
            raise InvalidLimiter(
                f"{self!r} can't convert what a key has used: a token bucket with continuous refill, a FixedWindow and "
                "a SlidingWindow can. Let the key keep its state, or reset it"
            )
        if keep is None:
            keep = KEPT[0] if self.kind is TokenBucket else KEPT[2]
        kept(keep)
        if old_rate is None:
            as_rate(old_rate)  # type: ignore[arg-type]  # which raises
        old, new = self.tier(old_rate, old_burst), self.tier(rate, burst)
        rates = [old.tolerance_us, old.rate_limit, old.period_us] if isinstance(old, Gcra) else [0, 0, 0]
        one = self.charge_for(key, 1, new)
        arguments = [keep, old.limit, new.limit, *rates, new.script, *one.arguments]
        return Command(
            script("convert", new.script),
            [self.key(key)],
            encode_args(arguments),
            2,
            lambda reply: reply[0],
        )

    def add(self, key: Key, permits: Any, rate: str | Rate | None, burst: int | None) -> Command[int]:
        number, algorithm = permits_of(permits, self.name), self.tier(rate, burst)
        is_prepaid = self.kind is Credits
        if not is_prepaid and (self.kind is not TokenBucket or algorithm.script != "gcra"):
            raise InvalidLimiter(
                f"{self!r} can't have permits above its burst: a token bucket with refill='continuous' can, and Credits"
            )
        one = self.charge_for(key, 1, algorithm)
        arguments = [number, MOST_PERMITS, 0 if is_prepaid else algorithm.limit, algorithm.script, *one.arguments]

        def read(reply: list[int]) -> int:
            if reply[0] == -2:
                raise too_many_permits(number, self.name)
            return reply[0]

        return Command(script("add", algorithm.script), [self.key(key)], encode_args(arguments), 2, read)

    def reserve(
        self,
        key: Key,
        cost: Any,
        max_delay: Duration | None,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Command[Booked]:
        algorithm, redis_key = self.tier(rate, burst), self.key(key)
        charge = algorithm.allow_wait(self.charge_for(key, cost, algorithm), delay_us(max_delay))

        def read(reply: list[int]) -> Booked:
            seen = Seen(reply[0] == 1, reply[1], reply[3:])
            if not seen.allowed:
                return Booked.now(False, algorithm.refused_delay_us(charge, seen), None)
            self.took(redis_key, charge, seen)
            cancelling = self.cancel(redis_key, charge, seen) if charge.cost else None
            return Booked.now(True, algorithm.booked_delay_us(charge, seen), cancelling)

        return self._command(HIT, redis_key, charge, self.size, read)

    def keep(self, key: bytes, charge: Charge, seen: Seen) -> Any:
        """An object that gives back this limiter's charge of a request that several limits allowed."""
        return Booked.now(True, 0, self.cancel(key, charge, seen) if charge.cost else None)

    def cancel(self, key: bytes, charge: Charge, seen: Seen) -> CommandFlow[None]:
        yield self._command(b"cancel", key, self.algorithm.cancellation(charge, seen), 2, read_nothing)

    def refund(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> CommandFlow[None]:
        charge = self.refund_charge(key, cost, self.tier(rate, burst))
        command = self._command(b"refund", self.key(key), charge, 2, read_nothing)
        if request_id is not None:
            if cost_of(cost) > charge.cost:
                # No request can have been charged so much.
                return
            self.check_request_ids()
            forget(command, [charge], request_id)
        yield command

    def check_reset(self) -> None:
        """Raises ``InvalidLimiter`` if a reset would delete what a key has paid for."""
        if self.kind is Credits:
            raise no_reset_of_credits(self)

    def reset(self, key: Key) -> Command[None]:
        self.check_reset()
        return self._command(b"reset", self.key(key), self.algorithm.unit, 2, read_nothing)

    def exceeded(self, decision: Decision) -> LimitExceeded:
        retry_after = decision.retry_after
        if retry_after == 0 and isinstance(self.algorithm, LeakyBucket):
            # The queue has room, so its departures were too late: a retry may succeed when it is empty.
            retry_after = decision.reset_after
        # Of credits, the decision's limit is what the key has left.
        return LimitExceeded(self.name, decision.limit if self.kind is Credits else self.limit, retry_after)

    def _decision(self, what: bytes, key: bytes, algorithm: Algorithm, charge: Charge) -> Command[Decision]:
        def read(reply: list[int]) -> Decision:
            seen = Seen(reply[0] != 0, reply[1], reply[3:])
            if reply[0] == 1 and what is HIT:
                self.took(key, charge, seen)
            return algorithm.decision(self.name, charge, seen)

        return self._command(what, key, charge, self.size, read)

    def check_request_ids(self) -> None:
        """Raises ``InvalidLimiter`` if requests can't be remembered."""

    def _command(
        self, what: bytes, key: bytes, charge: Charge, size: int, read: Callable[[list[int]], T]
    ) -> Command[T]:
        arguments = [what, b"0", self.algorithm.script, *encode_args(charge.arguments)]
        given_up = partial(self._given_up, key, charge) if self.comes_back and what is HIT else None
        return Command(self.script, [key], arguments, size, read, given_up)

    def _given_up(self, key: bytes, charge: Charge, reply: list[int]) -> CommandFlow[None]:
        """Give back the charge of a cancelled caller."""
        if reply[0] and charge.cost:
            yield from self.cancel(key, charge, Seen(True, reply[1], reply[3:]))


class StaggeredCommands(LimiterCommands):
    """Commands of a fixed window whose begin differs from key to key."""

    algorithm: algorithms.FixedWindow

    def __init__(self, keyspace: KeySpace, owner: str, name: str, kind: type, spec: LimiterSpec) -> None:
        super().__init__(keyspace, owner, name, kind, spec)
        self.usual = None

    def charge_for(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        return self.algorithm.staggered(super().charge_for(key, cost, algorithm), fingerprint(key))


def remember(
    command: Command[Any], charges: Sequence[Charge], request_id: Key, request_ttl: Duration | None = None
) -> None:
    """Let a command of ``decide.lua`` charge a request once, as long as its id is remembered."""
    ttl_ns = as_period_ns(DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
    command.arguments[1] = b"%d" % -(-ttl_ns // 1000)
    command.keys.append(mark_key(command.keys, charges, request_id))


def forget(command: Command[Any], charges: Sequence[Charge], request_id: Key) -> None:
    """Let a command that gives back do so once, and only if the request is remembered."""
    command.arguments[1] = b"1"
    command.keys.append(mark_key(command.keys, charges, request_id))


def mark_key(keys: Sequence[bytes], charges: Sequence[Charge], request_id: Key) -> bytes:
    """The Redis key that marks a request as charged. The same id with other keys or costs is another request."""
    try:
        hashed = fingerprint(request_id)
    except InvalidKey:
        raise InvalidKey(f"a request_id is str, bytes, int or a tuple of them, not {short_repr(request_id)}") from None
    first, *others = keys
    parts = [hashed + b":".join(str(charge.arguments[0]).encode() for charge in charges)]
    parts += [b"%d:%b" % (len(other), other) for other in others]
    return first + b":request:" + blake2b(b"".join(parts), digest_size=16).hexdigest().encode()


def was_allowed(reply: list[int]) -> bool:
    return reply[0] != 0


def read_nothing(reply: list[int]) -> None:
    return None


def noop() -> None:
    """The fallback of giving back. While Redis is unavailable, nothing is given back."""
