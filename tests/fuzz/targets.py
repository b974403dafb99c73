"""The fuzzed functions: each takes a fuzzer's bytes, and raises if something happens that must not.

``attach``      a segment whose file is damaged, opened through ``Store``, and through ``verify``
``operations``  every operation of every limiter, over a segment that is damaged before and in between
``neighbours``  a key's answers while everything that is not its own is damaged, beside an undamaged twin's
``values``      keys, rates, costs and parameters

Allowed are answers and forebay's own exceptions. A hang is the fuzzer's to notice, and so is what its address
sanitizer sees.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from segments import KIND_MASK, Input, Scratch, SegmentBytes, manual_clock, sealed

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.errors import ForebayError
from forebay.segment import layout
from forebay.verification import verify

# About segments for another number of keys, and clocks that went back.
warnings.simplefilter("ignore")

MAX_BYTES: Final = 2**20
NS: Final = 10**9
KEYS: Final = ("a", "b", 7, b"c", ("d", 1), "\udcff", "e", "f")

# Windows and limits where counts are exact and where they are not; extents of one cell, of some, and of a whole table.
LIMITERS: Final[dict[str, Callable[[Store], Any]]] = {
    "bucket": lambda store: TokenBucket(store, "a", "5/minute", burst=3),
    "fast bucket": lambda store: TokenBucket(store, "a", "1000000000/second", burst=2**40),
    "intervals": lambda store: TokenBucket(store, "a", "5/minute", burst=7, refill="interval"),
    "queue": lambda store: LeakyBucket(store, "a", "2/second", 4),
    "gap": lambda store: MinInterval(store, "a", "2s"),
    "fixed": lambda store: FixedWindow(store, "a", "3/minute"),
    "first": lambda store: FixedWindow(store, "a", "1000/year", align="first"),
    "stagger": lambda store: FixedWindow(store, "a", "5/second", align="stagger"),
    "sliding": lambda store: SlidingWindow(store, "a", "4/minute"),
    "large sliding": lambda store: SlidingWindow(store, "a", "10000000/second"),
    "buckets": lambda store: BucketedWindow(store, "a", "5/minute", 6, keys=2),
    "many buckets": lambda store: BucketedWindow(store, "a", "500/hour", 60, keys=60),
    "one bucket": lambda store: BucketedWindow(store, "a", "3/second", 1, keys=17),
    # One of which more positions fit into the state than there are, and into its last page than there is room for.
    "log": lambda store: SlidingLog(store, "a", "5/minute", keys=2),
    "log of one": lambda store: SlidingLog(store, "a", "1/second", keys=1),
    "long log": lambda store: SlidingLog(store, "a", "70/hour", keys=60),
    "prepaid": lambda store: Credits(store, "a"),
    "slots": lambda store: Concurrency(store, "a", 3, "10s", keys=2),
    "many slots": lambda store: Concurrency(store, "a", 130, "1 hour", keys=50),
    "all": lambda store: AllOf(
        SlidingLog(store, "l", "4/minute", keys=3),
        TokenBucket(store, "t", "6/minute"),
        BucketedWindow(store, "w", "5/minute", 3, keys=3),
        Concurrency(store, "c", 4, keys=3),
        SlidingWindow(store, "s", "7/minute"),
    ),
}
KINDS: Final = tuple(LIMITERS)
POLICIES: Final = ("evict", "deny", "allow")
CREDITS: Final = 5

scratch = Scratch()
atexit.register(scratch.close)


def attach(data: bytes) -> None:
    """First what to open it with, then patches: where, how much, what."""
    given = Input(data)
    clock: Any = given.choice(("monotonic", "manual", "time"))
    made_with = clock if given.number(4) else given.choice(("monotonic", "manual", "time"))
    kind = given.choice(KINDS)
    options: Any = {"keys": given.choice((1, 100, 5000)), "on_full": given.choice(POLICIES)}
    image = bytearray(_image(kind, made_with))
    size = given.choice((len(image), len(image), len(image), given.number(MAX_BYTES)))
    sealing = given.number(4)
    while given and len(image) < MAX_BYTES:
        start, below = given.choice(
            (
                (0, layout.HEADER_RULES_VERSION + 8),
                (0, layout.HEADER.size),
                (layout.LIMITERS_OFFSET, 4 * layout.LIMITER_ENTRY.size),
                (layout.EXTENTS_OFFSET, 4 * layout.EXTENT_ENTRY.size),
                (layout.LIMITERS_OFFSET, layout.COUNTERS_OFFSET - layout.LIMITERS_OFFSET),
                (layout.COUNTERS_OFFSET, layout.TABLE_OFFSET - layout.COUNTERS_OFFSET),
                (layout.TABLE_OFFSET, len(image) - layout.TABLE_OFFSET),
            )
        )
        start += given.number(below)
        patch = given.take(given.choice((1, 2, 4, 8, 8, 16, 64)))
        image[start : start + len(patch)] = patch
    if sealing:
        # As by an attacker who knows the checksum; most often, also its state.
        image[: layout.HEADER.size] = sealed(image[: layout.HEADER.size])
        if sealing > 1:
            image[layout.HEADER_STATE] = layout.STATE_READY
    del image[size:]
    image.extend(bytes(size - len(image)))
    before = len(os.listdir("/proc/self/fd"))
    with scratch.segment("attached", bytes(image)) as path:
        if sealing == 3:
            with contextlib.suppress(ForebayError):
                verify(path)
        with contextlib.suppress(ForebayError):
            _use_attached(
                Store("fuzz", path=path, clock=_clock(clock), **options), (kind, "bucket", "long log"), sealing == 3
            )
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def _use(limiter: Any, key: Any) -> None:
    """Charge a permit: the key has a cell then."""
    if isinstance(limiter, Credits):
        limiter.add(key, CREDITS)
    limiter.allow(key)


def _use_attached(store: Store, kinds: Sequence[str], statistics: bool) -> None:
    with store:
        for kind in kinds:
            with contextlib.suppress(ForebayError):
                limiter = LIMITERS[kind](store)
                for key in KEYS:
                    _use(limiter, key)
                _check(limiter.hit("a"))
        if statistics:
            store.stats()


def _clock(kind: str) -> Any:
    return manual_clock() if kind == "manual" else kind


def _image(kind: str, clock: str = "manual") -> bytes:
    """A segment with some keys of a limiter in it."""

    def use(store: Store) -> None:
        limiter = LIMITERS[kind](store)
        for key in KEYS[:4]:
            _use(limiter, key)
        if not isinstance(limiter, AllOf | Concurrency):
            limiter.hit("a", request_id="image")

    return scratch.image((kind, clock), use, _clock(clock))


def _check(decision: Any) -> None:
    assert decision.allowed in (True, False)
    assert decision.remaining >= 0
    assert decision.retry_after >= 0
    assert decision.reset_after >= 0


class Vandal:
    """Damages a segment as the input directs."""

    def __init__(self, given: Input, memory: SegmentBytes) -> None:
        self.given = given
        self.memory = memory

    def word(self) -> int:
        """Something to write: the ends of each range, what stands elsewhere with some bits changed, or anything."""
        given = self.given
        match given.number(8):
            case 0:
                return given.choice((0, 2**64 - 1, 2**63, 2**62, 2**62 - 1, 2**61, 2**32, 1))
            case 1:
                return self.memory.now_ns + given.number(2**32) - 2**31
            case 2:
                return (self.memory.now_ns + (given.number(2**16) - 2**15) * NS) * 4 + given.number(2**16)
            case 3 | 4:
                live = self.memory.live_cells() or [layout.TABLE_OFFSET]
                copied = self.memory.word(given.choice(live) + 8 * given.number(2))
                return copied ^ given.number(2**16) if given.number(2) else copied & ~KIND_MASK | given.number(8)
            case 5:
                return 1 << given.number(64)
            case _:
                return int.from_bytes(given.take(8), "little")

    def damage(self) -> None:
        given, memory = self.given, self.memory
        match given.number(8):
            case 0 | 1 | 2:
                live = memory.live_cells() or [layout.TABLE_OFFSET]
                memory.write_word(given.choice(live) + 8 * given.number(2), self.word())
            case 3:
                # Copies of one cell in a row, from the beginning of some live one's line or group.
                live = memory.live_cells() or [layout.TABLE_OFFSET]
                offset = given.choice(live) & -given.choice((16, 64, 256))
                cell = layout.CELL.pack(self.word() % 2**64, self.word() % 2**64)
                memory.write(offset, cell * given.choice((1, 4, 16)))
            case 4:
                start, end = given.choice([(layout.TABLE_OFFSET, memory.table_end), *memory.cell_spans()])
                cell = layout.CELL.pack(self.word() % 2**64, self.word() % 2**64)
                memory.write(start, cell * ((end - start) // len(cell)))
            case 5:
                if memory.extents:
                    start, end = given.choice(memory.word_spans())
                    if end - start >= 8:
                        memory.write_word(start + 8 * given.number((end - start) // 8), self.word())
            case 6:
                if memory.extents:
                    start, end = given.choice(memory.word_spans())
                    memory.write(start, (self.word() % 2**64).to_bytes(8, "little") * ((end - start) // 8))
            case 7:
                # Anything but the manual clock, which is no limiter's state.
                offset = given.number(memory.size - 8)
                if not layout.HEADER_MANUAL_NS - 8 < offset < layout.HEADER_MANUAL_NS + 8:
                    memory.write_word(offset, self.word())


class Session:
    """A limiter in use over a segment that is being damaged."""

    def __init__(self, given: Input, path: str) -> None:
        self.given = given
        self.kind = given.choice(KINDS)
        self.path = path
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_image(self.kind))
        self.store = Store("fuzz", keys=1, path=path, on_full=given.choice(POLICIES), clock=manual_clock())
        self.limiter = LIMITERS[self.kind](self.store)
        self.memory = SegmentBytes(path)
        self.vandal = Vandal(given, self.memory)
        self.kept: list[Any] = []

    def close(self) -> None:
        self.kept.clear()
        self.memory.close()
        self.store.close()
        os.unlink(self.path)

    def key(self) -> Any:
        return self.given.choice(KEYS)

    def cost(self) -> int:
        return self.given.choice((1, 1, 1, 2, 3, 0, 1000, 2**40, 2**64))

    def advance(self) -> None:
        self.memory.advance((1 << self.given.number(60)) - self.given.number(2))

    def ask(self) -> None:
        """One operation."""
        given, limiter = self.given, self.limiter
        match given.number(18):
            case 0 | 1:
                limiter.allow(self.key())
            case 2:
                _check(limiter.hit(self.key(), self.cost()))
            case 3:
                _check(limiter.peek(self.key(), self.cost()))
            case 4:
                keys = [self.key() for _ in range(given.number(40))]
                limiter.allow_many(keys, [self.cost() for _ in keys] if given.number(2) else None)
            case 5:
                limiter.refund(self.key(), self.cost())
            case 6 if isinstance(limiter, TokenBucket | Credits) and given.number(2):
                assert limiter.add(self.key(), self.cost()) >= 0
            case 6:
                limiter.reset(self.key())
            case 7:
                longest = given.choice((None, 0, 10, 1e9))
                reservation = limiter.reserve(self.key(), self.cost(), longest)
                if reservation.allowed and longest is not None:
                    assert reservation.delay <= longest
                self.kept.append(reservation)
            case 8:
                if self.kept:
                    self.kept.pop(given.number(len(self.kept))).cancel()
            case 9 if not isinstance(limiter, AllOf | Concurrency):
                _check(
                    limiter.hit(self.key(), self.cost(), request_id=given.number(4), request_ttl=given.choice((1, 9)))
                )
            case 10 if not isinstance(limiter, AllOf | Concurrency):
                limiter.refund(self.key(), self.cost(), request_id=given.number(4))
            case 11 if not isinstance(limiter, AllOf | Concurrency):
                _check(limiter.hit(self.key(), self.cost(), rate=given.choice(("1/minute", "9/second", "7/hour"))))
            case 9 | 10 if isinstance(limiter, Concurrency):
                self.kept.append(Lent(limiter.acquire(self.key(), self.cost())))
            case 11 if isinstance(limiter, Concurrency):
                if self.kept and isinstance(self.kept[-1], Lent):
                    self.kept[-1].lease.renew()
            case 12:
                # Not for long: after a denial without a time, which damage can leave, it tries every millisecond.
                limiter.wait(self.key(), self.cost(), given.choice((0, 0.01, 1)))
            case 13:
                # Mostly what takes less time than all the rest of an input.
                match given.number(4):
                    case 0:
                        self.store.stats()
                    case 1:
                        verify(self.path)
                    case _:
                        self.store.segment.count_live()
            case 14:
                self.advance()
            case 15:
                self.limiter = LIMITERS[self.kind](self.store)
            case 16:
                keys = list(range(given.choice((3, 300, 1100))))
                self.limiter.allow_many(keys)
            case 17 if not isinstance(limiter, AllOf):
                # One limit twice: what the first charges, the second finds changed.
                _check(AllOf(limiter, limiter).hit(self.key(), self.cost()))


class Lent:
    """A lease, given back as a reservation is."""

    def __init__(self, lease: Any) -> None:
        self.lease = lease

    def cancel(self) -> None:
        self.lease.release()


def operations(data: bytes) -> None:
    given = Input(data)
    session = Session(given, scratch.path("used"))
    try:
        while given:
            if given.number(3) == 0:
                session.vandal.damage()
            with contextlib.suppress(ForebayError):
                session.ask()
        session.store.segment.count_live()
    finally:
        session.close()


def neighbours(data: bytes) -> None:
    """The claim: as long as a key keeps its cell, its answers come from that cell and its words alone.

    *Its cell* are all that have its fingerprint, so damage may not write that into another one. Beside the claim: a key
    without a cell may find its neighbourhood full, as of others' live keys, and takes over the words of the cell that
    it comes to. So here no other key gets a cell while the key could lose its own.
    """
    given = Input(data)
    kind = given.choice([kind for kind in KINDS if kind != "all"])
    key = given.choice(KEYS[:2])
    whole, damaged = twins = [Twin(kind, key, scratch.path(f"twin {number}")) for number in range(2)]
    vandal = Vandal(given, damaged.memory)
    try:
        while given:
            what = given.number(8)
            if what < 3:
                with damaged.kept():
                    vandal.damage()
            elif what == 3:
                step_ns = 1 << given.number(40)
                for twin in twins:
                    twin.memory.advance(step_ns)
            elif what == 4:
                other = given.choice(KEYS[2:])
                if whole.is_live():
                    for twin in twins:
                        twin.limiter.allow(other)
            else:
                operation, cost = given.number(5), given.choice((1, 1, 2, 0, 3))
                alone, beside_damage = (twin.ask(operation, key, cost) for twin in twins)
                assert alone == beside_damage, f"{kind}: {alone}, but {beside_damage} beside damage"
    finally:
        for twin in twins:
            twin.close()


class Twin:
    """One of two segments that are the same, in which `key` has a cell."""

    def __init__(self, kind: str, key: Any, path: str) -> None:
        self.path = path
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(scratch.image((kind, key), lambda store: _use(LIMITERS[kind](store), key), manual_clock()))
        self.store = Store("fuzz", keys=1, path=path, on_full="deny", clock=manual_clock())
        self.limiter = LIMITERS[kind](self.store)
        self.memory = memory = SegmentBytes(path)
        (self.cell,) = memory.live_cells()
        self.own = [(layout.HEADER_MANUAL_NS, 8), (self.cell, layout.CELL.size), *memory.words_of(self.cell)]
        self.fingerprint = memory.word(self.cell) >> layout.KIND_BITS

    def close(self) -> None:
        self.memory.close()
        self.store.close()
        os.unlink(self.path)

    def is_live(self) -> bool:
        tag, state = layout.CELL.unpack(self.memory.read(self.cell, layout.CELL.size))
        assert tag >> layout.KIND_BITS == self.fingerprint
        until_ns: int = state if tag & KIND_MASK == layout.KIND_TAT else state >> 2
        return until_ns > self.memory.now_ns

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is done to the rest of the segment."""
        memory = self.memory
        before = [(offset, memory.read(offset, size)) for offset, size in self.own]
        yield
        for offset, data in before:
            memory.write(offset, data)
        for cell in memory.live_cells():
            if memory.word(cell) >> layout.KIND_BITS == self.fingerprint and cell != self.cell:
                memory.write_word(cell, memory.word(cell) ^ 1 << 63)

    def ask(self, operation: int, key: Any, cost: int) -> object:
        """The outcome of an operation, in a comparable form."""
        try:
            match operation:
                case 0 | 1:
                    decision = self.limiter.hit(key, cost)
                case 2:
                    decision = self.limiter.peek(key, cost)
                case 3:
                    return self.limiter.refund(key, cost)
                case _:
                    return self.limiter.allow_many([key] * cost)
        except ForebayError as error:
            return str(error)
        return (decision.allowed, decision.remaining, decision.retry_after_ns, decision.reset_after_ns)


def values(data: bytes) -> None:
    given = Input(data)
    with scratch.segment("valued", _image("gap")) as path:
        with Store("fuzz", keys=1, path=path, clock=manual_clock()) as store:
            limiters: list[Any] = [MinInterval(store, "gap", "1 year")]
            while given:
                with contextlib.suppress(ForebayError):
                    _use_values(given, store, limiters)
        del store, limiters


def _use_values(given: Input, store: Store, limiters: list[Any]) -> None:
    limiter = given.choice(limiters)
    match given.number(6):
        case 0 | 1:
            limiters.append(_limiter_of(given, store))
        case 2:
            gap, key = limiters[0], _key(given)
            gap.allow(key)
            assert not gap.allow(key), "a key is itself"
            gap.reset(key)
            assert gap.allow(key), "and nobody else"
        case 3:
            _check(limiter.hit(_key(given), _number(given)))
            _check(limiter.peek(_key(given), _number(given), rate=_rate(given)))
        case 4:
            limiter.allow_many([_key(given) for _ in range(given.number(5))], [_number(given)] * given.number(5))
            limiter.refund(_key(given), _number(given))
        case 5:
            rate = Rate.parse(_text(given))
            assert Rate.parse(str(rate)) == rate


def _limiter_of(given: Input, store: Store) -> Any:
    kind = given.choice((TokenBucket, LeakyBucket, FixedWindow, SlidingWindow, BucketedWindow, SlidingLog, MinInterval))
    name, rate, number = given.choice(("a", "b", _text(given))), _rate(given), _number(given)
    # Extents of more memory than there is, or of little: not of all that there is.
    keys = given.choice((1, 49, 2**32, number if not isinstance(number, int) or number < 100 else 2**32))
    if kind is TokenBucket:
        return TokenBucket(store, name, rate, burst=number, refill=_text_or(given, ("continuous", "interval")))
    if kind is LeakyBucket:
        return LeakyBucket(store, name, rate, number)
    if kind is FixedWindow:
        return FixedWindow(store, name, rate, align=_text_or(given, ("clock", "first", "stagger")))
    if kind is BucketedWindow:
        return BucketedWindow(store, name, rate, given.choice((1, 6, number)), keys=keys)
    if kind is SlidingLog:
        return SlidingLog(store, name, rate, keys=keys)
    return kind(store, name, rate)


def _text_or(given: Input, choices: tuple[str, ...]) -> Any:
    return given.choice((*choices, _text(given)))


def _text(given: Input) -> str:
    return given.take(given.number(20)).decode("utf-8", given.choice(("surrogateescape", "replace", "ignore")))


def _number(given: Input) -> Any:
    match given.number(8):
        case 0:
            return given.choice((None, True, 1.5, "1", b"1", float("nan"), (1,)))
        case 1:
            return (1 << given.number(300)) - given.number(3)
        case 2:
            return -given.number(256)
        case _:
            return int.from_bytes(given.take(given.number(9)), "little")


def _key(given: Input) -> Any:
    match given.number(6):
        case 0:
            return _number(given)
        case 1:
            return given.take(given.number(40))
        case 2:
            return tuple(_key(given) for _ in range(given.number(4)))
        case _:
            return _text(given)


def _rate(given: Input) -> Any:
    match given.number(4):
        case 0:
            return _text(given)
        case 1:
            return Rate(_number(given), _number(given))
        case 2:
            units = ("s", "seconds", "minute", "h", "day", "week", "month", "year", "ms", "")
            return f"{_number(given)}{given.choice(('/', ' per ', ' '))}{_number(given)} {given.choice(units)}"
        case _:
            return given.choice(("5/minute", "1/second", "1000000000/second", "3 per 100 years", "2s"))


TARGETS: Final = {target.__name__: target for target in (attach, operations, neighbours, values)}
