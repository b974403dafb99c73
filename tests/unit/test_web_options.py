"""Options of the gate that every middleware takes: switching limits off, and observing denials."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site

from forebay import InvalidLimiter, LimitsDisabledWarning, Store, TokenBucket
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import BodyLimit, Denial, Request, Rule, options

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def bucket(clock: ManualClock) -> Iterator[TokenBucket]:
    with Store.private(keys=100, clock=clock) as store:
        yield TokenBucket(store, "api", "1/minute")


@pytest.fixture(autouse=True)
def warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process warns once."""
    monkeypatch.setattr(options, "_warning", Seldom())


@pytest.mark.parametrize("switch", ["argument", "environment", "both"])
def test_limits_that_are_switched_off_count_nothing(
    site: MakeSite, bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str
) -> None:
    if switch != "argument":
        monkeypatch.setenv("FOREBAY_ENABLED", "false")
    given = {} if switch == "environment" else {"enabled": False}
    name = "FOREBAY_ENABLED" if switch == "environment" else "enabled=False"
    with pytest.warns(LimitsDisabledWarning, match=f"switched off by .*{name}.*every request is handled"):
        open_site = site([Rule(bucket), BodyLimit(1)], **given)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    answers = [open_site.request(body=b"four", method="POST") for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert "ratelimit" not in answers[0].fields
    assert bucket.peek(CLIENT).remaining == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        site([Rule(bucket)], **given)  # it was said


def test_mistakes_in_limits_that_are_switched_off_are_found(site: MakeSite, bucket: TokenBucket) -> None:
    with pytest.raises(InvalidLimiter, match="rules are of Rule, Deny, Shed, BodyLimit and ByteRate, not '5/minute'"):
        site([Rule(bucket), "5/minute"], enabled=False)


def test_limits_apply_unless_they_are_switched_off(
    site: MakeSite, bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_ENABLED", "true")
    limited = site([Rule(bucket)], enabled=True)
    assert [limited.request().status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("value", ["", "0", "False", "off", "yes"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(
    site: MakeSite, bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FOREBAY_ENABLED", value)
    with pytest.raises(InvalidLimiter, match=f"FOREBAY_ENABLED is true or false, not '{value}'"):
        site([Rule(bucket)])
    monkeypatch.delenv("FOREBAY_ENABLED")
    with pytest.raises(InvalidLimiter, match="enabled is True or False"):
        site([Rule(bucket)], enabled=value)


def test_each_denial_is_observed_once(site: MakeSite, bucket: TokenBucket) -> None:
    seen: list[tuple[str, str, int | None]] = []

    def note(request: Request, denial: Denial) -> None:
        seen.append((request.path, denial.rule.limiter.name, denial.retry_after_s))

    limited = site([Rule(bucket)], on_denied=note)
    assert [limited.request("/orders").status for _ in range(3)] == [200, 429, 429]
    assert seen == [("/orders", "api", 60)] * 2


def test_an_observer_that_fails_changes_no_answer(
    site: MakeSite, bucket: TokenBucket, caplog: pytest.LogCaptureFixture
) -> None:
    limited = site([Rule(bucket)], on_denied=lambda request, denial: 1 // 0)
    assert [limited.request().status for _ in range(2)] == [200, 429]
    assert "on_denied has failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def _observe(request: Request, denial: Denial) -> None: ...


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (5, "on_denied is a callable that takes a request and a denial, not 5"),
        (lambda request: None, "can't be called so"),
        (dict, "is a class"),
        (_observe, "has to be awaited"),
    ],
)
def test_an_observer_that_cannot_be_called_is_refused(
    site: MakeSite, bucket: TokenBucket, observer: Any, message: str
) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        site([Rule(bucket)], on_denied=observer)


def test_a_denial_is_one_line_of_the_log(site: MakeSite, bucket: TokenBucket, caplog: pytest.LogCaptureFixture) -> None:
    limited = site([Rule(bucket)])
    limited.request()
    limited.request()
    assert not caplog.records  # of level INFO, so usually silent
    with caplog.at_level(logging.INFO, "forebay.web.denied"):
        limited.request("/or\nders")
    [record] = caplog.records
    assert record.getMessage() == "429 for 'GET' '/or\\nders' by api"
    values = {name: value for name, value in vars(record).items() if name.startswith(("forebay_", "http_"))}
    assert values == {
        "forebay_limiter": "api",
        "forebay_violated": ("api",),
        "forebay_status": 429,
        "forebay_retry_after_s": 60,
        "forebay_is_unavailable": False,
        "forebay_is_ban": False,
        "forebay_is_shadow": False,
        "http_method": "GET",
        "http_path": "/or\nders",
    }
    assert CLIENT not in str(vars(record))
