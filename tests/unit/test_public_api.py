"""The public names, and their signatures as help() and editors show them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import penstock
from penstock import Store, TokenBucket, errors
from penstock.core.limiter import Limiter
from penstock.testing import ManualClock


def test_the_public_names() -> None:
    names = {"Decision", "LimiterStats", "Rate", "Store", "StoreStats", "TokenBucket", "__version__", *errors.__all__}
    assert set(penstock.__all__) == names
    for name in names - {"__version__"}:
        thing = getattr(penstock, name)
        assert inspect.getdoc(thing), name
    assert penstock.__version__.count(".") == 2


def test_every_error_is_penstocks_own_and_documented() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, (errors.PenstockError, UserWarning)), name
        assert error.__doc__, name


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("allow", "(key, /)"),
        ("hit", "(key, cost=1, *, rate=None, burst=None)"),
        ("peek", "(key, cost=1, *, rate=None, burst=None)"),
        ("refund", "(key, cost=1, *, rate=None, burst=None)"),
        ("reset", "(key)"),
        ("allow_many", "(keys, costs=None)"),
    ],
)
def test_signatures_of_a_limiters_methods(store: Store, method: str, signature: str) -> None:
    bound = getattr(TokenBucket(store, "api", "1/hour"), method)
    assert str(inspect.signature(bound)) == signature
    assert inspect.getdoc(bound)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (Store, "name *keys *on_full *clock *mode *group *path"),
        (Store.private, "*keys *on_full *clock"),
        (Store.unlink, "name *path *missing_ok"),
        (Store.stats, "self"),
        (Store.close, "self"),
        (penstock.Rate, "limit period"),
        (penstock.Rate.parse, "text"),
        (ManualClock, "start"),
        (ManualClock.set, "self seconds"),
        (ManualClock.advance, "self seconds"),
        (ManualClock.now, "self"),
    ],
)
def test_signatures_of_everything_else(function: Any, parameters: str) -> None:
    shown = [
        "*" * (parameter.kind is parameter.KEYWORD_ONLY) + parameter.name
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert " ".join(shown) == parameters


def test_a_token_bucket_can_be_made_with_keywords(store: Store) -> None:
    limiter = TokenBucket(store=store, name="api", rate="5/minute", burst=7)
    assert (limiter.store, limiter.name, str(limiter.rate), limiter.burst) == (store, "api", "5 per minute", 7)
    for name in ("store", "name", "rate", "burst"):
        with pytest.raises(AttributeError):
            setattr(limiter, name, None)


def test_the_base_of_limiters_is_not_a_limiter(store: Store) -> None:
    with pytest.raises(TypeError, match="use TokenBucket"):
        Limiter(store, "api")
    with pytest.raises(TypeError):
        type("Mine", (TokenBucket,), {})


def test_wrong_calls_are_type_errors(store: Store) -> None:
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
        lambda: Store("a name"),
        lambda: Store("a name", 5),
        lambda: Store.private(5),
    ):
        with pytest.raises(TypeError):
            call()
    assert store.stats().live_keys == 0
