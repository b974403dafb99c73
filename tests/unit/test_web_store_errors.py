"""What requests are answered while the store of their limits fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_requests import Kind, Site

from forebay import Concurrency, DamagedSegment, InvalidLimiter, LeakyBucket, Store, TokenBucket
from forebay.seldom import Seldom
from forebay.web import Answer, Ban, Rule, denials


def banning(store: Store) -> list[Rule]:
    with Store.private(keys=100) as bans:
        return [Rule(TokenBucket(store, "api", "1/minute"), ban=Ban(bans, "guessers", "1/minute", lasts="1 hour"))]


RULES: dict[str, Callable[[Store], list[Rule]]] = {
    "one": lambda store: [Rule(TokenBucket(store, "api", "1/minute"), status=418, answer=Answer(200))],
    "several": lambda store: [Rule(TokenBucket(store, name, "1/minute")) for name in ("a", "b")],
    "banned": banning,
    "held": lambda store: [Rule(Concurrency(store, "places", 1))],
    "reserved": lambda store: [Rule(TokenBucket(store, "api", "1/minute"), charge_on={401})],
    "delayed": lambda store: [Rule(LeakyBucket(store, "turns", "1/minute", capacity=2), delay="2s")],
}


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=RULES)
def closed(request: pytest.FixtureRequest) -> list[Rule]:
    """Rules of a store that is closed."""
    with Store.private(keys=100) as store:
        return RULES[request.param](store)


@pytest.fixture(autouse=True)
def log_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process logs once a minute."""
    monkeypatch.setattr(denials, "_log_turns", Seldom(60))
    return


@pytest.mark.parametrize(("options", "status"), [({}, 503), ({"when_unavailable": "429"}, 429)])
def test_a_request_is_denied(
    kind: Kind, closed: list[Rule], options: dict[str, Any], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(kind, closed, options)
    answers = [site.request() for _ in range(3)]
    assert [answer.status for answer in answers] == [status] * 3
    assert answers[0]["retry-after"] == "1"
    assert "can't be checked at the moment" in answers[0].json["detail"]
    assert site.handled == 0
    [record] = [record for record in caplog.records if record.name == "forebay.web"]
    assert record.levelno == logging.ERROR
    assert f"requests are answered by {status}:" in record.getMessage()
    assert "closed" in record.getMessage()


def test_a_request_is_admitted(kind: Kind, closed: list[Rule], caplog: pytest.LogCaptureFixture) -> None:
    site = Site(kind, closed, {"when_unavailable": "allow"})
    answers = [site.request() for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert "ratelimit" not in answers[0]
    assert site.handled == 3
    [record] = [record for record in caplog.records if record.name == "forebay.web"]
    assert "requests are admitted without a limit:" in record.getMessage()


def test_a_damaged_segment_is_a_failing_store(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.private(keys=100) as store:

        def key(_: Any) -> str:
            raise DamagedSegment("/dev/shm/forebay-shop", "two limiters at one place", "one", "remove it")

        assert Site(kind, [Rule(TokenBucket(store, "api", "1/minute"), key=key)]).request().status == 503


def test_a_denial_stands_that_no_ban_can_count(kind: Kind) -> None:
    with Store.private(keys=100) as store:
        [rule] = banning(store)
        site = Site(kind, [rule], {"when_unavailable": "allow"})
        assert [site.request().status for _ in range(3)] == [200, 429, 429]


def test_a_limit_that_denies_still_denies(kind: Kind) -> None:
    with Store.private(keys=100) as store:
        site = Site(kind, [Rule(TokenBucket(store, "api", "1/minute"))], {"when_unavailable": "allow"})
        assert [site.request().status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("permits", [Concurrency, TokenBucket])
def test_a_store_that_is_closed_while_a_request_is_handled_changes_no_response(kind: Kind, permits: Any) -> None:
    store = Store.private(keys=100)
    rule = Rule(Concurrency(store, "places", 1))
    if permits is TokenBucket:
        rule = Rule(TokenBucket(store, "guesses", "5/minute"), charge_on={401})

    def handle() -> int:
        store.close()
        return 201

    assert Site(kind, [rule], handle=handle).request().status == 201


@pytest.mark.parametrize("wrong", [503, "deny", None, True, ["503"]])
def test_other_answers_are_refused(kind: Kind, wrong: Any) -> None:
    with pytest.raises(InvalidLimiter, match='when_unavailable is "503", "429" or "allow", not'):
        Site(kind, [], {"when_unavailable": wrong})
