"""Bans: after so many denials, a key is denied for a while, in all processes of a host."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site, wsgi_environ

from forebay import Concurrency, InvalidLimiter, InvalidRate, MinInterval, Store, TokenBucket
from forebay.contrib.views import AppGates, Visit, rules_of
from forebay.testing import ManualClock
from forebay.web import Answer, Ban, Denial, Gate, Request, Rule, everyone, header
from forebay.web.native_requests import WSGIRequest

MakeSite = Callable[..., Site]
OTHER = "192.0.2.9"


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def banning(store: Store, **more: Any) -> tuple[Rule, Ban]:
    """One request a second. Three denials in a minute ban for ten minutes."""
    ban = Ban(store, "guessers", "3/minute", lasts="10 minutes")
    return Rule(TokenBucket(store, "login", "1/second", burst=1), ban=ban, **more), ban


def statuses(site: Site, count: int, **options: Any) -> list[int]:
    return [site.request(**options).status for _ in range(count)]


def test_the_last_denial_bans_for_the_whole_time(site: MakeSite, store: Store, clock: ManualClock) -> None:
    rule, _ = banning(store)
    limited = site([rule])
    assert statuses(limited, 3) == [200, 429, 429]
    clock.advance(1)
    assert statuses(limited, 2) == [200, 429]
    assert limited.request()["retry-after"] == "600"
    clock.advance(599)
    assert limited.request()["retry-after"] == "1"
    clock.advance(1)
    assert statuses(limited, 3) == [200, 429, 429]
    clock.advance(1)
    assert statuses(limited, 1) == [200]  # counted anew


def test_a_banned_key_is_counted_nowhere(site: MakeSite, store: Store, clock: ManualClock) -> None:
    rule, ban = banning(store)
    limited = site([rule])
    statuses(limited, 4)
    clock.advance(1)
    assert rule.limiter.peek(CLIENT, 0).remaining == 1  # type: ignore[union-attr]
    before = store.stats()
    assert statuses(limited, 5) == [429] * 5
    assert store.stats() == before
    assert ban.peek(CLIENT).retry_after == 599  # not prolonged


def test_other_keys_are_not_banned(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([banning(store)[0]])
    statuses(limited, 4)
    assert statuses(limited, 2, client=OTHER) == [200, 429]
    clock.advance(1)
    assert [limited.request(client=client).status for client in (CLIENT, OTHER)] == [429, 200]


def test_denials_that_come_too_late_do_not_ban(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([banning(store)[0]])
    for _ in range(20):
        assert statuses(limited, 2) == [200, 429]
        clock.advance(31)


def test_after_a_ban_denials_are_counted_anew(site: MakeSite, store: Store, clock: ManualClock) -> None:
    """Also within the time in which those before the ban would count."""
    ban = Ban(store, "short", "2/day", lasts="1 minute")
    limited = site([Rule(TokenBucket(store, "a", "1/day"), ban=ban)])
    assert statuses(limited, 3) == [200, 429, 429]
    clock.advance(60)
    assert limited.request().json["violated-policies"] == ["a"]
    assert limited.request().json["violated-policies"] == ["a"]
    assert limited.request().json["violated-policies"] == ["short"]


def test_one_denial_may_ban(site: MakeSite, store: Store, clock: ManualClock) -> None:
    ban = Ban(store, "strict", "1/day", lasts=60)
    limited = site([Rule(TokenBucket(store, "a", "1/second"), ban=ban)])
    assert statuses(limited, 2) == [200, 429]
    clock.advance(59)
    assert statuses(limited, 1) == [429]
    clock.advance(1)
    assert statuses(limited, 1) == [200]


def test_a_ban_says_that_it_is_one(site: MakeSite, store: Store) -> None:
    denials: list[Denial] = []
    rule, _ = banning(store)
    limited = site([rule], on_denied=lambda request, denial: denials.append(denial))
    statuses(limited, 4)
    answer = limited.request()
    assert [(denial.is_ban, denial.violated) for denial in denials] == [
        *[(False, ("login",))] * 3,
        (True, ("guessers",)),
    ]
    assert denials[-1].rule is rule
    assert denials[-1].decision is not None
    assert denials[-1].decision.retry_after == 600
    assert answer.json["detail"] == "Too many requests were denied: ask again in 600 seconds."
    assert answer.json["violated-policies"] == ["guessers"]
    assert "ratelimit" not in answer


def test_a_ban_has_the_status_and_the_answer_of_its_rule(site: MakeSite, store: Store) -> None:
    answer = Answer(200, (("Content-Type", "text/plain"),), b"welcome")
    limited = site([banning(store, answer=answer)[0]])
    assert statuses(limited, 5) == [200] * 5
    assert limited.handled == 1
    assert limited.request().body == b"welcome"
    strict = Ban(store, "strict", "1/day", lasts=60)
    refusing = site([Rule(TokenBucket(store, "b", "1/hour"), ban=strict, status=403)])
    assert statuses(refusing, 3) == [200, 403, 403]


def test_an_operator_lifts_a_ban(site: MakeSite, store: Store, clock: ManualClock) -> None:
    rule, ban = banning(store)
    limited = site([rule])
    statuses(limited, 4)
    assert not ban.peek(CLIENT)
    clock.advance(1)
    Ban(store, "guessers", "3/minute", lasts="10 minutes").lift(CLIENT)  # as another process has it
    assert ban.peek(CLIENT)
    assert statuses(limited, 3) == [200, 429, 429]
    ban.lift(CLIENT)  # also what was counted so far
    assert statuses(limited, 2) == [429, 429]
    clock.advance(1)
    assert statuses(limited, 1) == [200]


def test_several_rules_ban_together(site: MakeSite, store: Store, clock: ManualClock) -> None:
    ban = Ban(store, "guessers", "3/minute", lasts="10 minutes")
    limited = site(
        [
            Rule(TokenBucket(store, "a", "1/hour"), path="/a", ban=ban),
            Rule(TokenBucket(store, "b", "1/hour"), path="/b", ban=ban),
            Rule(TokenBucket(store, "c", "9/hour"), path="/c"),
        ]
    )
    paths = ["/a", "/a", "/b", "/b", "/a", "/c", "/b"]
    assert [limited.request(path).status for path in paths] == [200, 429, 200, 429, 429, 200, 429]
    clock.advance(599)
    assert [limited.request(path).status for path in ("/a", "/b", "/c")] == [429, 429, 200]


def test_only_denials_of_its_rule_count(site: MakeSite, store: Store) -> None:
    ban = Ban(store, "guessers", "1/minute", lasts="10 minutes")
    wide = Rule(TokenBucket(store, "wide", "100/hour"), ban=ban)
    assert statuses(site([wide, Rule(TokenBucket(store, "narrow", "1/hour"))]), 5) == [200] + [429] * 4
    assert ban.peek(CLIENT)


def test_denials_of_another_rule_whose_limiter_has_the_same_name_do_not_count(
    site: MakeSite, store: Store, clock: ManualClock
) -> None:
    rule, ban = banning(store, key=everyone)
    with Store.private(keys=9, clock=clock) as another:
        limited = site([Rule(TokenBucket(another, "login", "1/day"), key=everyone), rule])
        clock.advance(1)
        assert [(limited.request().status, clock.advance(1))[0] for _ in range(5)] == [200, 429, 429, 429, 429]
    assert ban.peek("everyone").allowed


def test_denials_of_another_key_of_the_same_limiter_do_not_count(site: MakeSite, store: Store) -> None:
    bucket = TokenBucket(store, "both", "2/day")
    ban = Ban(store, "guessers", "3/minute", lasts="10 minutes")
    limited = site([Rule(bucket), Rule(bucket, key=header("X-API-Key", otherwise=everyone), ban=ban)])
    bucket.hit(CLIENT, 2)
    assert statuses(limited, 5, fields=[("X-API-Key", "victim")]) == [429] * 5
    assert statuses(limited, 1, fields=[("X-API-Key", "victim")], client=OTHER) == [200]


def test_all_rules_that_deny_count(site: MakeSite, store: Store) -> None:
    """Not only the binding one."""
    bans = [Ban(store, name, "2/hour", lasts="1 hour") for name in ("first", "second")]
    short, long = TokenBucket(store, "short", "1/minute"), TokenBucket(store, "long", "1/day")
    statuses(site([Rule(short, ban=bans[0]), Rule(long, ban=bans[1], key=everyone)]), 3)
    assert not bans[0].peek(CLIENT)
    assert not bans[1].peek("everyone")


def test_the_longest_ban_is_the_binding_one(site: MakeSite, store: Store) -> None:
    bans = [Ban(store, name, "1/hour", lasts=lasts) for name, lasts in (("a", 60), ("b", 90), ("c", 30))]
    limited = site([Rule(TokenBucket(store, ban.name, "1/day"), ban=ban) for ban in bans])
    statuses(limited, 2)
    answer = limited.request()
    assert (answer["retry-after"], answer.json["violated-policies"]) == ("90", ["b"])


@pytest.mark.parametrize("options", [{"charge_on": {401}}, {"delay": "1ms"}, {"path": "/*"}])
def test_rules_of_any_kind_ban(site: MakeSite, store: Store, options: dict[str, Any]) -> None:
    rule, ban = banning(store, **options)
    limited = site([rule])
    limited.handle = lambda: 401
    statuses(limited, 4)
    assert not ban.peek(CLIENT)
    assert limited.request().json["violated-policies"] == ["guessers"]


def test_all_tiers_of_a_rule_ban_together(site: MakeSite, store: Store) -> None:
    pro = TokenBucket(store, "pro", "1/hour")
    rule, ban = banning(store, tier=lambda request: request.path, tiers={"/pro": pro, "/internal": None})
    limited = site([rule])
    paths = ["/", "/", "/pro", "/pro", "/pro", "/pro", "/"]
    assert [limited.request(path).status for path in paths] == [200, 429, 200, 429, 429, 429, 429]
    assert not ban.peek(CLIENT)
    assert [limited.request(path).json["violated-policies"] for path in ("/", "/pro")] == [["guessers"]] * 2
    assert limited.request("/internal").status == 200


def test_held_permits_that_are_denied_ban(site: MakeSite, store: Store) -> None:
    limiter = Concurrency(store, "one", 1)
    ban = Ban(store, "impatient", "2/minute", lasts="1 minute")
    limited = site([Rule(limiter, key=everyone, ban=ban)])
    with limiter.acquire("everyone"):
        assert statuses(limited, 2) == [503, 503]
    assert statuses(limited, 1) == [503]
    ban.lift("everyone")
    assert statuses(limited, 1) == [200]


def test_exempt_requests_are_neither_counted_nor_denied(site: MakeSite, store: Store) -> None:
    rule, _ = banning(store, exempt=lambda request: request.path == "/free")
    limited = site([rule])
    statuses(limited, 4)
    assert [limited.request(path).status for path in ("/", "/free")] == [429, 200]


def test_preflights_are_counted_and_denied_as_the_client(site: MakeSite, store: Store) -> None:
    asks = [("Origin", "https://shop.example"), ("Access-Control-Request-Method", "POST")]
    rule, ban = banning(store)
    limited = site([rule])
    assert statuses(limited, 4, method="OPTIONS", fields=asks) == [200, 429, 429, 429]
    assert not ban.peek(CLIENT)
    assert statuses(limited, 1) == [429]
    assert statuses(limited, 1, method="OPTIONS", fields=asks) == [429]


def test_keys_that_are_awaited_are_banned(store: Store, clock: ManualClock) -> None:
    calls: list[Request] = []

    async def key(request: Request) -> str:
        calls.append(request)
        return request.header("X-Key") or "none"

    rule, ban = banning(store, key=key)
    limited = Site("asgi", [rule])
    assert statuses(limited, 5, fields=[("X-Key", "a")]) == [200, 429, 429, 429, 429]
    assert len(calls) == 5  # once for each request
    assert not ban.peek("a")
    clock.advance(1)
    assert statuses(limited, 1, fields=[("X-Key", "a")]) == [429]
    assert statuses(limited, 1, fields=[("X-Key", "b")]) == [200]


def test_keys_of_several_parts_are_banned(site: MakeSite, store: Store) -> None:
    rule, ban = banning(store, key=header("X-Key", otherwise=everyone))
    limited = site([rule])
    statuses(limited, 4, fields=[("X-Key", "a")])
    assert not ban.peek(("header", "x-key", "a"))


def test_a_client_without_an_address_is_answered_as_without_a_ban(site: MakeSite, store: Store) -> None:
    limited = site([banning(store)[0]])
    assert statuses(limited, 2, client=None) == [500, 500]
    assert limited.handled == 0


def test_limits_that_cannot_be_checked_do_not_ban(site: MakeSite, clock: ManualClock) -> None:
    """A full store denies keys that it has no room for: not the client's fault."""
    with Store.private(keys=1, clock=clock, on_full="deny") as full, Store.private(keys=100, clock=clock) as store:
        limiter = MinInterval(full, "a", "1 hour")
        limiter.allow_many(range(5000))
        ban = Ban(store, "b", "1/hour", lasts="1 hour")
        assert statuses(site([Rule(limiter, ban=ban)]), 3) == [503] * 3
        assert ban.peek(CLIENT)


def test_a_full_store_of_bans_bans_nobody_without_room(site: MakeSite, clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock, on_full="deny") as full, Store.private(keys=100, clock=clock) as store:
        MinInterval(full, "a", "1 day").allow_many(range(5000))
        ban = Ban(full, "b", "1/hour", lasts="1 hour")
        limited = site([Rule(TokenBucket(store, "c", "1/second"), ban=ban)])
        assert statuses(limited, 3) == [200, 429, 429]
        clock.advance(1)
        assert statuses(limited, 1) == [200]


def test_a_denial_that_finds_no_room_does_not_ban(clock: ManualClock) -> None:
    """A key's bans and denials have cells apart: one of them may find room where the other one finds none."""
    with Store.private(keys=1, clock=clock, on_full="deny") as full:
        MinInterval(full, "a", "1 day").allow_many(range(840))  # of 1024 cells
        ban = Ban(full, "b", "2/hour", lasts="1 hour")
        for key in range(200):
            ban.count_denial(key)
        assert full.stats().limiters["b denials"].full
        assert all(ban.peek(key) for key in range(200))


def _deny_twice(ban: Ban) -> None:
    for _ in range(2):
        ban.count_denial(CLIENT)


def test_processes_count_denials_together() -> None:
    with Store.private(keys=100) as store:
        ban = Ban(store, "guessers", "4/hour", lasts="1 hour")
        context = multiprocessing.get_context("fork")
        for expected in (True, False):
            child = context.Process(target=_deny_twice, args=(ban,))
            child.start()
            child.join()
            assert child.exitcode == 0
            assert ban.peek(CLIENT).allowed is expected


def test_views_of_the_extensions_ban(store: Store) -> None:
    ban = Ban(store, "guessers", "1/minute", lasts="10 minutes")
    rules = rules_of([TokenBucket(store, "login", "1/second")], {"ban": ban})
    gates = AppGates(Gate(()))
    request = WSGIRequest(wsgi_environ())
    answers = [gates.decide(request, Visit(), rules) for _ in range(3)]
    assert [answer and answer.status for answer in answers] == [None, 429, 429]
    assert not ban.peek(CLIENT)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("b", "3/fortnight", "10 minutes"), InvalidRate, "'3/fortnight' is not a rate"),
        (("b", "3/minute", "soon"), InvalidRate, "'soon' is not a length of time"),
        (("b", "3/minute", 0), InvalidRate, "a length of time is from 1 ns to 10 years, not 0"),
        ((3, "3/minute", 1), InvalidLimiter, 'a Ban has a name such as "guessers", not 3'),
    ],
)
def test_a_ban_that_cannot_be_is_refused(store: Store, arguments: Any, error: Any, message: str) -> None:
    name, denials, lasts = arguments
    with pytest.raises(error, match=message):
        Ban(store, name, denials, lasts=lasts)


def test_a_ban_without_a_host_store_is_refused(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match="a Ban is kept in the memory of a host, and 'store' is no Store"):
        Ban("store", "b", "3/minute", lasts="10 minutes")  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match="ban is a Ban, not '3/minute': write Ban"):
        Rule(TokenBucket(store, "a", "1/s"), ban="3/minute")  # type: ignore[arg-type]


def test_a_ban_shows_its_terms(store: Store) -> None:
    assert repr(Ban(store, "b", "3/minute", lasts=timedelta(hours=1))) == "<Ban 'b' after 3 per minute>"


def test_a_ban_and_a_limiter_of_one_name_are_apart(site: MakeSite, store: Store) -> None:
    ban = Ban(store, "login", "3/minute", lasts="10 minutes")
    limited = site([Rule(TokenBucket(store, "login", "9/minute"), ban=ban)])
    assert statuses(limited, 9) == [200] * 9
