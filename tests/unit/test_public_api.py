"""The public names, and their signatures as ``help()`` and editors show them."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import forebay
from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
    errors,
    testing,
)
from forebay.core.algorithms.gcra import GcraLimiter
from forebay.core.algorithms.window import WindowLimiter
from forebay.core.cell_limiter import CellLimiter
from forebay.core.limiter import Limiter
from forebay.testing import ManualClock

LIMITERS: dict[str, Callable[[Store], Any]] = {
    "AllOf": lambda store: AllOf(TokenBucket(store, "one", "5/minute"), MinInterval(store, "two", "2s")),
    "BucketedWindow": lambda store: BucketedWindow(store, "api", "5/minute", buckets=6, keys=4),
    "Concurrency": lambda store: Concurrency(store, "api", 5, lease="30s", keys=4),
    "Credits": lambda store: Credits(store, "api"),
    "FixedWindow": lambda store: FixedWindow(store, "api", "5/minute", align="first"),
    "LeakyBucket": lambda store: LeakyBucket(store, "api", "5/minute", capacity=7),
    "MinInterval": lambda store: MinInterval(store, "api", "2s"),
    "SlidingLog": lambda store: SlidingLog(store, "api", "5/minute", keys=4),
    "SlidingWindow": lambda store: SlidingWindow(store, "api", "5/minute"),
    "TokenBucket": lambda store: TokenBucket(store, "api", "5/minute", burst=7, refill="interval"),
}


def test_package_exports_the_public_names() -> None:
    answers = {"Decision", "HotKey", "Lease", "LimiterStats", "Reservation", "StoreStats"}
    functions = {"connect", "connect_async", "get_include"}
    names = {"Rate", "Store", "__version__", "native", *functions, *answers, *LIMITERS, *errors.__all__}
    assert set(forebay.__all__) == names
    for name in names - {"__version__", "native"}:
        thing = getattr(forebay, name)
        assert inspect.getdoc(thing), name
    assert forebay.__version__.count(".") == 2
    for name in testing.__all__:
        assert inspect.getdoc(getattr(testing, name)), name


@pytest.mark.parametrize("name", [name for name in forebay.__all__ if inspect.isclass(getattr(forebay, name))])
def test_every_public_class_has_its_own_signature_and_docstring(name: str) -> None:
    kind = getattr(forebay, name)
    if not issubclass(kind, Exception):
        assert f"{name}(" in pydoc.plain(pydoc.render_doc(kind))
        assert inspect.signature(kind)
    assert kind.__doc__
    assert kind.__doc__ != kind.__base__.__doc__


def test_every_error_derives_from_forebays_and_is_documented() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, (errors.ForebayError, UserWarning)), name
        assert error.__doc__, name


COMMON = {
    "allow": "(key, /)",
    "allow_many": "(keys, costs=None)",
    "hit": "(key, cost=1)",
    "peek": "(key, cost=1)",
    "refund": "(key, cost=1)",
    "reserve": "(key, cost=1, max_delay=None)",
    "reset": "(key)",
    "wait": "(key, cost=1, timeout=None, *, jitter=0.0)",
    "wait_async": "(key, cost=1, timeout=None, *, jitter=0.0)",
    "limited": "(key, cost=1, timeout=None, *, jitter=0.0)",
    "exceeded": "(key, cost=1)",
}
SEVERAL = COMMON | {
    "hit": "(key, cost=1, *, request_id=None, request_ttl=None)",
    "refund": "(key, cost=1, *, request_id=None)",
}
HELD = COMMON | {
    "acquire": "(key, cost=1, *, request_id=None)",
    "hit": "(key, cost=1, *, request_id=None)",
    "refund": "(key, cost=1, *, request_id=None)",
    "limited": "(key, cost=1, timeout=None)",
    "exceeded": "(key)",
}
WITH_TIERS = COMMON | {
    "take_up_to": "(key, most, *, rate=None, burst=None)",
    "hit": "(key, cost=1, *, rate=None, burst=None, request_id=None, request_ttl=None)",
    "peek": "(key, cost=1, *, rate=None, burst=None)",
    "refund": "(key, cost=1, *, rate=None, burst=None, request_id=None)",
    "reserve": "(key, cost=1, max_delay=None, *, rate=None, burst=None)",
    "wait": "(key, cost=1, timeout=None, *, jitter=0.0, rate=None, burst=None)",
    "wait_async": "(key, cost=1, timeout=None, *, jitter=0.0, rate=None, burst=None)",
}


ADDING = WITH_TIERS | {"add": "(key, permits, *, rate=None, burst=None)"}
PREPAID = WITH_TIERS | {"add": "(key, permits)"}
METHODS = {"AllOf": SEVERAL, "Concurrency": HELD, "Credits": PREPAID, "TokenBucket": ADDING}


def shown(function: Any) -> str:
    """A signature without annotations, which only the pure-Python fallback has."""
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


@pytest.mark.parametrize("name", LIMITERS)
def test_limiter_methods_have_their_signatures(store: Store, name: str) -> None:
    limiter = LIMITERS[name](store)
    for method, signature in METHODS.get(name, WITH_TIERS).items():
        bound = getattr(limiter, method)
        assert shown(bound) == signature
        assert inspect.getdoc(bound), method


CONSTRUCTORS = {
    "AllOf": "(*limiters)",
    "BucketedWindow": "(store, name, rate, buckets=60, *, keys=None)",
    "Concurrency": "(store, name, limit, lease='30s', *, keys=None)",
    "Credits": "(store, name)",
    "FixedWindow": "(store, name, rate, align='clock', *, timezone=None)",
    "LeakyBucket": "(store, name, rate, capacity)",
    "MinInterval": "(store, name, interval)",
    "SlidingLog": "(store, name, rate, *, keys)",
    "SlidingWindow": "(store, name, rate, *, rounding=None)",
    "TokenBucket": "(store, name, rate, burst=None, refill='continuous', *, initial=None, start=None)",
}


@pytest.mark.parametrize("name", LIMITERS)
def test_wrong_arguments_are_refused_with_the_constructors_signature(store: Store, name: str) -> None:
    kind = getattr(forebay, name)
    assert shown(kind.__init__).replace("(self, /, ", "(self, ") == CONSTRUCTORS[name].replace("(", "(self, ", 1)
    assert str(inspect.signature(kind)) == CONSTRUCTORS[name]
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [((), {"other": 1}, "")]
    if name != "AllOf":
        calls += [
            ((), {}, "missing a required argument: 'store'"),
            ((store,), {}, "'name'"),
            ((*"abcdefg",), {}, "too"),
        ]
        calls += [((store, "x"), {"name": "y"}, "'name'")]
    if name not in ("AllOf", "Credits"):
        calls += [((store, "x"), {}, "missing a required argument")]
    for arguments, by_name, text in calls:
        with pytest.raises(TypeError) as caught:
            kind(*arguments, **by_name)
        assert str(caught.value).startswith(f"{name}{CONSTRUCTORS[name]}: ")
        assert text in str(caught.value)
    # Newer versions of Python say that it is a keyword-only argument.
    with pytest.raises(TypeError, match=r"SlidingLog\(.*: missing a required (keyword-only )?argument: 'keys'"):
        SlidingLog(store, "x", "1/s")  # type: ignore[call-arg]
    with pytest.raises(
        TypeError,
        match=r"the first argument of TokenBucket is a Store, or a RedisStore\(url\) of forebay.redis, not a str",
    ):
        TokenBucket("x", "api", "1/s")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Limiter, CellLimiter, GcraLimiter, WindowLimiter])
def test_base_class_makes_no_limiter(store: Store, kind: Any) -> None:
    for arguments in ((), (store, "api"), (store, "api", "5/minute")):
        for make in (kind, partial(kind.__new__, kind)):
            with pytest.raises(TypeError, match="is a base of the limiters"):
                make(*arguments)


@pytest.mark.parametrize("name", LIMITERS)
def test_every_limiter_shows_its_parameters_and_is_immutable(store: Store, name: str) -> None:
    limiter = LIMITERS[name](store)
    assert name in repr(limiter)
    assert all(f"{part!r}" in repr(limiter) for part in limiter.name.split(" + "))
    assert limiter.store is store
    for attribute in ("store", "name", "rate", "other"):
        with pytest.raises(AttributeError):
            setattr(limiter, attribute, None)
    with pytest.raises(TypeError):
        type("Mine", (type(limiter),), {})


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (Store, "name *keys *on_full *clock *mode *group *path *directory *hot_keys"),
        (Store.private, "*keys *on_full *clock *hot_keys"),
        (Store.unlink, "name *path *directory *missing_ok"),
        (Store.stats, "self"),
        (Store.close, "self"),
        (forebay.Rate, "limit period"),
        (forebay.Rate.parse, "text"),
        (ManualClock, "start"),
        (ManualClock.set, "self time"),
        (ManualClock.advance, "self duration"),
        (ManualClock.now, "self"),
        (testing.private_stores, "clock *keys"),
        (testing.reset_store, "store"),
    ],
)
def test_other_functions_have_their_signatures(function: Any, parameters: str) -> None:
    shown = [
        "*" * (parameter.kind is parameter.KEYWORD_ONLY) + parameter.name
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert " ".join(shown) == parameters


def test_limiter_parameters_become_its_attributes(store: Store) -> None:
    bucket = TokenBucket(store=store, name="bucket", rate="5/minute", burst=7)
    assert (bucket.store, bucket.name, str(bucket.rate), bucket.burst) == (store, "bucket", "5 per minute", 7)
    assert (bucket.refill, TokenBucket(store, "b", "5/minute", refill="interval").refill) == ("continuous", "interval")
    queue = LeakyBucket(store=store, name="queue", rate="5/minute", capacity=7)
    assert (str(queue.rate), queue.capacity) == ("5 per minute", 7)
    gap = MinInterval(store=store, name="gap", interval="1.5s")
    assert (str(gap.rate), gap.interval_ns) == ("1 per 1500 milliseconds", 1_500_000_000)
    fixed = FixedWindow(store=store, name="fixed", rate="5/minute", align="stagger")
    assert (str(fixed.rate), fixed.align) == ("5 per minute", "stagger")
    assert str(SlidingWindow(store=store, name="sliding", rate="5/minute").rate) == "5 per minute"
    bucketed = BucketedWindow(store=store, name="bucketed", rate="5/minute", buckets=6, keys=4)
    assert (str(bucketed.rate), bucketed.buckets, bucketed.keys) == ("5 per minute", 6, 4)
    log = SlidingLog(store=store, name="log", rate="5/minute", keys=4)
    assert (str(log.rate), log.keys) == ("5 per minute", 4)
    slots = Concurrency(store=store, name="slots", limit=5, lease="30s", keys=4)
    assert (slots.limit, slots.lease_ns, slots.keys) == (5, 30_000_000_000, 4)
    both = AllOf(bucket, gap)
    assert both.limiters == (bucket, gap)


@pytest.mark.parametrize("base", [Limiter, CellLimiter, GcraLimiter, WindowLimiter])
def test_base_classes_name_the_class_to_use(store: Store, base: Any) -> None:
    with pytest.raises(TypeError, match="use TokenBucket"):
        base(store, "api", "1/minute")


@pytest.mark.parametrize("name", LIMITERS)
def test_only_limiters_make_answers(store: Store, name: str) -> None:
    limiter = LIMITERS[name](store)
    for answer in (limiter.hit("k"), limiter.peek("k"), limiter.reserve("k")):
        with pytest.raises(TypeError, match="made by limiters"):
            type(answer)()
        for attribute in ("allowed", "delay", "delay_ns", "remaining", "other"):
            with pytest.raises(AttributeError):
                setattr(answer, attribute, 1)


def test_wrong_calls_raise_type_errors(store: Store) -> None:
    limiter = TokenBucket(store, "api", "5/minute")
    for call in (
        lambda: limiter.allow(),
        lambda: limiter.allow("k", 1),
        lambda: limiter.allow(key="k"),
        lambda: limiter.hit(),
        lambda: limiter.hit("k", 1, "1/s"),
        lambda: limiter.hit("k", price=1),
        lambda: limiter.allow_many(),
        lambda: TokenBucket(store, "api"),
        lambda: TokenBucket(store),
        lambda: TokenBucket(),
        lambda: TokenBucket("a name", "api", "1/minute"),
        lambda: LeakyBucket(store, "api", "1/minute"),
        lambda: FixedWindow(store, "api", "1/minute", "clock", 5),
        lambda: SlidingLog(store, "api", "1/minute", 5),
        lambda: SlidingLog(store, "api", "1/minute"),
        lambda: BucketedWindow(store, "api", "1/minute", 6, 5),
        lambda: MinInterval(store, "api"),
        lambda: Concurrency(store, "api"),
        lambda: Store("a name"),
        lambda: Store("a name", 5),
        lambda: Store.private(5),
    ):
        with pytest.raises(TypeError):
            call()
    assert store.stats().live_keys == 0
