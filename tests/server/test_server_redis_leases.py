"""Permits over Redis, and questions about limits in Redis that are sent again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from decision_server import CLIENT as PROXIES
from decision_server import HEAD, DecisionServer
from envoy.service.auth.v3.external_auth_pb2 import CheckRequest
from grpc_client import Client
from redis_server import RedisServer, until
from test_server_api import HELD
from test_server_live import Host
from test_server_redis import MODES, THREE, GateServer, is_asked, steady, unanswered, url_of
from test_server_retries import KEY
from test_server_rules import HELD as HELD_LIMIT
from test_server_rules import RULE

from forebay import Concurrency, FixedWindow, InvalidLimiter, InvalidRuleFile, StoreUnavailable
from forebay.redis import RedisLease, RedisStore
from forebay.serving.decided import Decided
from forebay.serving.first_answers import FirstAnswers
from forebay.serving.leases import HeldLeases
from forebay.serving.plan import plan_of

Serve = Callable[..., DecisionServer]

JOB = {"uri": "/jobs", "client": "192.0.2.7"}


@pytest.fixture
def held(redis: RedisServer, serve: Serve) -> DecisionServer:
    return serve(HELD, "--no-proxies", store=f"{redis.url}?timeout=60")


def holding(redis: RedisServer, limit: int = 2) -> int:
    """How many permits of the client are held in Redis."""
    with RedisStore(redis.url, timeout=60) as store:
        limiter = Concurrency(store, "jobs", limit, lease="1 hour")
        return limit - limiter.peek(JOB["client"]).remaining


# Permits


def test_permits_are_held_as_in_memory(redis: RedisServer, serve: Serve) -> None:
    pair = [serve(HELD, "--no-proxies", store=store) for store in (f"{redis.url}?timeout=60", "")]
    leases: list[list[str]] = []

    def compare_replies(call: str, **question: Any) -> Any:
        replies = [steady(server.ask(call, **question)) for server in pair]
        ids = [reply["lease"].pop("id") for reply in replies if "lease" in reply]
        leases.extend([ids] if ids else [])
        assert replies[0] == replies[1]
        return replies[0]

    def compare_leases(call: str, number: int) -> Any:
        replies = [server.ask(call, lease=lease) for server, lease in zip(pair, leases[number], strict=True)]
        assert replies[0] == replies[1]
        return replies[0]

    for _ in range(2):
        reply = compare_replies("acquire", **JOB)
        assert (reply["allowed"], reply["lease"], [limit["name"] for limit in reply["limits"]]) == (
            True,
            {"lasts": 3600.0},
            ["started"],
        )
    denied = compare_replies("acquire", **JOB)
    assert (denied["status"], denied["limits"]) == (
        429,
        [{"name": "jobs", "allowed": False, "limit": 2, "remaining": 0}],
    )
    assert "lease" not in denied
    assert compare_leases("renew", 0)["held"] is True
    assert [compare_leases("release", 0)["released"] for _ in range(2)] == [True, False]
    assert compare_leases("renew", 0)["held"] is False
    assert holding(redis) == 1
    assert compare_replies("acquire", **JOB)["allowed"]
    compare_leases("release", 1)
    # The rate denies, so no permit is held.
    compare_replies("decide", uri="/other", client=JOB["client"])
    assert compare_replies("acquire", **JOB)["limits"][0]["name"] == "started"
    assert holding(redis) == 1
    for call, more in (("decide", {}), ("peek", {}), ("reserve", {"max_delay": 1})):
        assert 'The rule \\"jobs\\" holds permits' in compare_replies(call, **JOB, **more)["body"]
    assert "lease" not in compare_replies("acquire", uri="/free", client=JOB["client"])
    assert [server.ask("release", lease="")["released"] for server in pair] == [False, False]


def test_servers_share_permits_but_not_leases(redis: RedisServer, serve: Serve) -> None:
    servers = [serve(HELD, "--no-proxies", store=f"{redis.url}?timeout=60") for _ in range(2)]
    replies = [server.ask("acquire", **JOB) for server in servers]
    assert [reply["allowed"] for reply in replies] == [True, True]
    assert [server.ask("acquire", **JOB)["limits"][0]["name"] for server in servers] == ["jobs", "jobs"]
    lease = replies[0]["lease"]["id"]
    assert servers[1].ask("renew", lease=lease)["held"] is False
    assert servers[1].ask("release", lease=lease)["released"] is False
    # Those of a server that has ended come back with their leases.
    servers[0].kill()
    assert holding(redis) == 2
    assert not servers[1].ask("acquire", **JOB)["allowed"]
    assert servers[1].ask("release", lease=replies[1]["lease"]["id"])["released"] is True
    assert holding(redis) == 1


def test_permits_come_back_at_the_end_of_their_lease(redis: RedisServer, serve: Serve) -> None:
    rules = HELD.replace('lease = "1 hour"', 'lease = "100ms"').replace("limit = 2", "limit = 1").replace("4/", "1000/")
    server = serve(rules, "--no-proxies", store=f"{redis.url}?timeout=60")
    first = server.ask("acquire", **JOB, request_id="one")
    assert first["allowed"]
    while not (other := server.ask("acquire", **JOB))["allowed"]:
        pass
    again = server.ask("acquire", **JOB, request_id="one")
    assert again.get("lease") != first["lease"]
    assert other["lease"] != first["lease"]
    assert server.ask("renew", lease=first["lease"]["id"])["held"] is False
    assert server.ask("release", lease=first["lease"]["id"])["released"] is False


TWO = """
[limits.jobs]
algorithm = "concurrency"
limit = 2
lease = "1 hour"
[limits.site]
algorithm = "concurrency"
limit = 3
lease = "30 minutes"
[[rules]]
name = "jobs"
limits = ["jobs"]
[[rules]]
name = "site"
limits = ["site"]
key = "everyone"
"""


def test_permits_of_several_limits_are_held_together(redis: RedisServer, serve: Serve) -> None:
    server = serve(TWO, "--no-proxies", store=f"{redis.url}?timeout=60")
    leases = [server.ask("acquire", uri="/", client=f"192.0.2.{n}")["lease"] for n in (7, 7, 8)]
    assert {lease["lasts"] for lease in leases} == {1800.0}
    denied = server.ask("acquire", uri="/", client="192.0.2.9")
    assert [limit["name"] for limit in denied["limits"]] == ["site"]
    # A lease that has lost permits of one limit holds none of the other.
    with redis.client() as client:
        client.delete(*[key for key in client.keys("*") if b"site" in key])
    assert server.ask("renew", lease=leases[0]["id"])["held"] is False
    assert holding(redis) == 1
    assert server.ask("release", lease=leases[1]["id"])["released"] is True
    assert holding(redis) == 0


def test_a_charge_beside_permits_is_given_back_alone(held: DecisionServer, redis: RedisServer) -> None:
    reply = held.ask("acquire", **JOB, refundable=True)
    assert held.ask("refund", charge=reply["charge"])["refunded"] is True
    assert holding(redis) == 1
    other = {"uri": "/other", "client": JOB["client"]}
    assert held.ask("peek", **other)["limits"][0]["remaining"] == 4
    assert held.ask("release", lease=reply["lease"]["id"])["released"] is True


ONCE = HELD.replace('path = "/jobs"', 'path = "/jobs"\nmethods = ["PUT"]') + (
    f'[limits.paid]\nalgorithm = "fixed-window"\nrate = "1/hour"\nalign = "first"\n'
    f'[[rules]]\nname = "paid"\nlimits = ["paid"]\nrequest_id = {{ field = "{KEY}" }}\n'
)


@pytest.mark.parametrize("store", ["redis", "memory"])
def test_retries_are_charged_once_and_take_permits_of_their_own(redis: RedisServer, serve: Serve, store: str) -> None:
    server = serve(ONCE, "--no-proxies", store=f"{redis.url}?timeout=60" if store == "redis" else "")
    job = {**JOB, "method": "PUT", "headers": {KEY: "a"}}
    first, second = server.ask("acquire", **job), server.ask("acquire", **job)
    assert [first["allowed"], second["allowed"]] == [True, True]
    assert first["lease"]["id"] != second["lease"]["id"]
    assert server.ask("acquire", **job)["limits"][0]["name"] == "jobs"
    assert server.ask("release", lease=second["lease"]["id"])["released"]
    # The one that is charged once denies, so no permit is held.
    denied = server.ask("acquire", **{**job, "headers": {KEY: "b"}})
    assert [limit["name"] for limit in denied["limits"] if not limit["allowed"]] == ["paid"]
    # A charge that may be given back is always made.
    denied = server.ask("acquire", **job, refundable=True)
    assert [limit["name"] for limit in denied["limits"] if not limit["allowed"]] == ["paid"]
    assert server.ask("acquire", **job)["allowed"]
    if store == "redis":
        assert holding(redis) == 2


def test_more_permits_than_a_limit_has_are_denied_for_good(redis: RedisServer, serve: Serve) -> None:
    rules = HELD.replace('["started", "jobs"]', '["jobs"]\ncost = 2')
    server = serve(rules, "--no-proxies", store=f"{redis.url}?timeout=60")
    assert server.ask("acquire", **JOB)["allowed"]
    denied = server.ask("acquire", **JOB)
    assert (denied["status"], denied["limits"][0]["remaining"]) == (429, 0)


def test_leased_and_synced_limits_hold_no_permits(tmp_path: Path, redis: RedisServer, store_name: str) -> None:
    file = tmp_path / "limits.toml"
    for mode in ("leased", "synced"):
        file.write_text(f'version = 1\nstore = "{url_of(redis, mode, store_name)}"\n{PROXIES}{HELD_LIMIT}{RULE}')
        with pytest.raises((InvalidRuleFile, InvalidLimiter), match="Concurrency"):
            plan_of(file, holds_permits=True)
        with pytest.raises(InvalidRuleFile, match="start the server with --no-proxies"):
            plan_of(file)


# Redis is away


def test_a_lease_that_redis_may_have_renewed_or_ended_is_asked_for_again(own_redis: RedisServer, serve: Serve) -> None:
    server = serve(HELD, "--no-proxies", store=f"{own_redis.url}?timeout=0.3")
    leases = [server.ask("acquire", **JOB)["lease"]["id"] for _ in range(2)]
    with own_redis.stopped():
        renewed = server.ask("renew", lease=leases[0])
        assert (renewed["http"], "renew it again" in renewed["error"]) == (503, True)
        released = server.ask("release", lease=leases[1])
        assert (released["http"], "release it again" in released["error"]) == (503, True)
        assert server.ask("acquire", **JOB)["status"] == 503

    def renewed_again() -> bool:
        reply = server.ask("renew", lease=leases[0])
        return reply["http"] == 200 and reply["held"] is True

    until(renewed_again, "the lease is renewed")
    # Redis may have done it before.
    until(lambda: server.ask("release", lease=leases[1])["http"] == 200, "the permits are released")
    assert holding(own_redis) <= 2
    assert server.ask("release", lease=leases[0])["released"] is True


def test_permits_that_were_not_released_can_be_released_again(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD_LIMIT}{RULE}")

    def fail(lease: Any) -> bool:
        raise StoreUnavailable("nobody answers")

    with RedisStore(redis.url, timeout=60) as store:
        plan: Any = plan_of(file, store, holds_permits=True)
        lease = plan.charging.hold([(0, "a", 3)], None, False).lease
        for call, flow in (("renew", "renewing"), ("release", "releasing")):
            with monkeypatch.context() as patch:
                patch.setattr(RedisLease, flow, fail)
                assert getattr(plan.charging, call)(lease) is None
            assert getattr(plan.charging, call)(lease) is True
        assert plan.charging.hold([(0, "a", 3)], None, False).allowed


@pytest.mark.parametrize("policy", ["allow", "local"])
def test_the_policy_of_the_store_holds_permits_while_redis_is_away(
    own_redis: RedisServer, serve: Serve, store_name: str, policy: str
) -> None:
    options = "when_unavailable=allow" if policy == "allow" else f"hosts=1&fallback=shm:///{store_name}?keys=1000"
    server = serve(HELD, "--no-proxies", store=f"{own_redis.url}?{options}")
    before = server.ask("acquire", **JOB)["lease"]["id"]
    own_redis.process.kill()
    own_redis.process.wait()
    replies = [server.ask("acquire", **JOB) for _ in range(3)]
    assert [reply["allowed"] for reply in replies] == [True] * 3 if policy == "allow" else [True, True, False]
    lease = replies[0]["lease"]["id"]
    assert server.ask("renew", lease=lease)["held"] is True
    # By the policy that allows everything, none is counted.
    assert server.ask("release", lease=lease)["released"] is (policy == "local")
    # Nobody knows whether Redis still has it.
    for call in ("renew", "release", "release"):
        assert server.ask(call, lease=before)["http"] == 503


@pytest.mark.parametrize("policy", ["deny", "allow", "local"])
def test_permits_that_no_policy_has_released_are_released_once_redis_is_back(
    own_redis: RedisServer, serve: Serve, store_name: str, policy: str
) -> None:
    local = f"hosts=1&fallback=shm:///{store_name}?keys=1000"
    options = local if policy == "local" else f"when_unavailable={policy}"
    server = serve(HELD, "--no-proxies", store=f"{own_redis.url}?{options}")
    lease = server.ask("acquire", **JOB)["lease"]["id"]
    with own_redis.client() as client:
        # Redis refuses to write, so nothing is done.
        client.config_set("min-replicas-to-write", 1)
        until(lambda: server.ask("release", lease=lease)["http"] == 503, "nobody knows")
        assert holding(own_redis) == 1
        client.config_set("min-replicas-to-write", 0)

    def is_answered() -> bool:
        reply = server.ask("release", lease=lease)
        return reply["http"] == 200 and reply["released"] is True

    until(is_answered, "the permits are released")
    assert holding(own_redis) == 0


def test_permits_come_back_if_the_time_of_their_question_is_used_up(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{ONCE}")

    def fail(once: Any, request_id: Any, keys: Any, costs: Any, cleanup: Any) -> Any:
        cleanup.patience.left_s = 0.0
        raise StoreUnavailable("too late")

    with RedisStore(redis.url, timeout=60) as store:
        plan: Any = plan_of(file, store, holds_permits=True)
        names = [limiter.name for limiter in plan.charging._limiters]
        uses = [(names.index("jobs"), JOB["client"], 1), (names.index("paid"), JOB["client"], 1)]
        with monkeypatch.context() as patch:
            patch.setattr("forebay.web.charging_once.ChargedOnce.charge_by", fail)
            assert plan.charging.hold(uses, (1, ["/jobs", "a"]), False) is None
        assert holding(redis) == 0
        assert plan.charging.hold(uses, (1, ["/jobs", "a"]), False).allowed


SEVERAL = "".join(
    f'[limits.{name}]\nalgorithm = "fixed-window"\nrate = "9/day"\n[[rules]]\nname = "{name}"\nlimits = ["{name}"]\n'
    for name in ("one", "two", "three")
)
ANOTHER = (
    '[limits.other]\nalgorithm = "fixed-window"\nrate = "9/day"\n[[rules]]\nname = "another"\nlimits = ["other"]\n'
)


def fail(*arguments: Any) -> Any:
    raise StoreUnavailable("nobody answers")


@contextlib.contextmanager
def three_limits(redis: RedisServer, folder: Path) -> Iterator[tuple[Any, ...]]:
    """What charges limits, and a use of each: permits, and two rates."""
    file = folder / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD}{ANOTHER}")
    with RedisStore(redis.url, timeout=60) as store:
        charging = cast(Any, plan_of(file, store, holds_permits=True)).charging
        names = [limiter.name for limiter in charging._limiters]
        yield charging, *((names.index(name), JOB["client"], 1) for name in ("jobs", "started", "other"))


@pytest.mark.parametrize("left", ["permits", "charge"])
def test_an_answer_is_replaced_once_it_is_given_back(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    with three_limits(redis, tmp_path) as (charging, jobs, started, other):

        def ask(*uses: Any) -> Any:
            return charging.ask_once("a", "q", "hold", [list(uses), None, True])

        first = ask(jobs, started)
        with monkeypatch.context() as patch:
            if left == "permits":
                patch.setattr(RedisLease, "releasing", fail)
            else:
                patch.setattr(charging._executor, "give_back", fail)
            assert ask(jobs, other) is None
            # The first limits again: a part of their answer may have come back.
            assert ask(jobs, started) is None or left == "charge"
        assert ask(jobs, other).allowed
        assert ask(jobs, other).lease not in (None, first.lease)
        assert holding(redis) == 1
        # Nobody knows whether a charge has come back that was given back once.
        remaining = [charging.peek([use]).each[0][2] for use in (started, other)]
        assert remaining == [4 if left == "permits" else 3, 8]


def test_an_answer_that_was_given_back_is_not_given_again(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_limits(redis, tmp_path) as (charging, jobs, started, other):
        first = charging.ask_once("a", "q", "hold", [[jobs, started], None, True])
        with monkeypatch.context() as patch:
            patch.setattr(charging, "_hold", fail)
            assert charging.ask_once("a", "q", "hold", [[jobs, other], None, True]) is None
        assert holding(redis) == 0
        again = charging.ask_once("a", "q", "hold", [[jobs, started], None, True])
        assert (again.is_first, again.lease == first.lease, again.charge == first.charge) == (True, False, False)
        assert holding(redis) == 1


def test_a_lease_that_redis_may_have_renewed_can_be_released(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD_LIMIT}{RULE}")
    now_s = time.monotonic()
    monkeypatch.setattr("forebay.serving.leases.time.monotonic", lambda: now_s)
    with RedisStore(redis.url, timeout=60) as store:
        charging = cast(Any, plan_of(file, store, holds_permits=True)).charging
        add = charging._remembered.leases.add
        renewed, lost, kept = (add([Fake(*results)], ["a"], 1, [100.0]) for results in [(None, True), (None,), ()])
        mixed = add([Fake(True, None, True), Fake(False, False, False)], ["a", "b"], 2, [100.0, 100.0])
        now_s += 60
        assert [charging.renew(lease) for lease in (renewed, mixed)] == [None, None]
        # Redis may have renewed it just before its end.
        now_s += 130
        assert [charging.release(lease) for lease in (renewed, mixed, lost, kept)] == [True, True, False, False]


def test_a_charge_of_several_limits_is_given_back_by_one_call(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{SEVERAL}")
    with RedisStore(redis.url, timeout=60, when_unavailable="allow") as store:
        charging = cast(Any, plan_of(file, store)).charging
        uses = [(number, JOB["client"], 1) for number in range(3)]
        send = store.executor.send
        sent: list[int] = []

        def count(commands: list[Any]) -> list[Any]:
            sent.append(len(commands))
            # The policy decides others meanwhile.
            store.executor.breaker.decided()
            return send(commands)

        monkeypatch.setattr(store.executor, "send", count)
        for charge in (charging.take(uses).charge, charging.book(uses, 0).charge):
            assert charging.give_back(charge) is True
            assert charging.give_back(charge) is False
        assert sent == [3, 3]
        assert [numbers[2] for numbers in charging.peek(uses).each] == [9] * 3
        charge = charging.take(uses).charge
        monkeypatch.setattr(store.executor, "send", lambda commands: [ConnectionError("nobody")] * len(commands))
        assert charging.give_back(charge) is None


class Fake:
    """A lease whose renewals and releases give these results, one after the other."""

    def __init__(self, *results: bool | None, takes_s: float = 0.0) -> None:
        self.results, self.takes_s = list(results), takes_s

    def renewing(self) -> Any:
        yield from ()
        time.sleep(self.takes_s)
        result = self.results.pop(0)
        if result is None:
            raise StoreUnavailable("nobody answers")
        return result

    releasing = renewing


def test_each_limit_of_a_lease_has_its_turn(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD_LIMIT}{RULE}")
    with RedisStore(redis.url, timeout=60) as store:
        plan: Any = plan_of(file, store, holds_permits=True)
        add = plan.charging._remembered.leases.add
        # A renewal finds that permits are lost, and then gives back the others: nobody knows whether it has.
        lease = add([Fake(True, None, True), Fake(False, False, False)], ["a", "b"], 2, [1e9, 1e9])
        assert [plan.charging.renew(lease), plan.charging.release(lease)] == [None, True]
        assert [plan.charging.renew(lease), plan.charging.release(lease)] == [False, False]
        # The time is over after the first one: the other one comes first the next time.
        slow, other = Fake(None, None, None, takes_s=0.1), Fake(True)
        lease = add([slow, other], ["a", "b"], 2, [1e9, 1e9])
        monkeypatch.setattr(plan.charging._redis, "timeout_s", 0.05)
        assert plan.charging.release(lease) is None
        assert (len(slow.results), len(other.results)) == (2, 1)
        assert plan.charging.release(lease) is None
        assert len(other.results) == 0


class HoldingServer(GateServer):
    """It holds permits, and says which it releases. It has two threads."""

    CODE = GateServer.CODE.replace("threads=1, within_s", "threads=2, within_s").replace(
        "    def take(self",
        """    known = {}

    def hold(self, uses, once, is_refundable):
        return (*self.hit(uses, once)[:3], "a lease", True)

    def ask_once(self, request_id, question, method, arguments):
        if request_id not in self.known:
            self.known[request_id] = getattr(self, method)(*arguments)
        return self.known[request_id]

    def release(self, lease):
        act(lease)
        print("released", lease, flush=True)
        return True

    def take(self""",
    )


def test_permits_that_come_too_late_are_released(tmp_path: Path) -> None:
    with HoldingServer(tmp_path, within_s=0.5) as server:
        for more in ({}, {"request_id": "one"}):
            assert server.ask("acquire", uri="/", headers={"user": "/hang"}, **more)["status"] == 503
            assert server.said() == "hanging"
            server.go_on()
            if not more:
                assert server.said() == "released a lease"
        # That question is sent again, so its permits stay.
        until(lambda: server.get("/auth/envoy/", {"user": "b"})[0] == 200, "the gate goes on")
        server.process.terminate()
        assert server.process.communicate(timeout=60)[0] == ""


def test_permits_that_come_too_late_are_released_however_many_questions_wait(tmp_path: Path) -> None:
    check = CheckRequest()
    check.attributes.request.http.method = "GET"
    check.attributes.request.http.path = "/"
    check.attributes.request.http.headers["user"] = "/waiting"
    with HoldingServer(tmp_path, within_s=0.5) as server, Client(server) as client:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.get, "/auth/envoy/", {"user": "/hang"})
            assert server.said() == "hanging"
            assert server.ask("acquire", uri="/", headers={"user": "/hang"})["status"] == 503
            assert server.said() == "hanging"
            asking = [client.authorization.Check.future(check, timeout=60) for _ in range(1100)]
            until(lambda: unanswered(server)["full"] > 0, "there is no room for more")
            server.go_on()
            server.go_on()
            assert any("released a lease" in line for line in iter(server.said, ""))
            assert other.result(60)[0] == 503
        for call in asking:
            call.result()


class LateServer(HoldingServer):
    """Nobody knows whether its first release has been done."""

    CODE = HoldingServer.CODE.replace(
        "return True\n\n    def take",
        'self.releases = getattr(self, "releases", 0) + 1\n        return self.releases > 1 or None\n\n    def take',
    )


def test_permits_that_nobody_has_are_released_until_redis_replies(tmp_path: Path) -> None:
    with LateServer(tmp_path, within_s=0.5) as server:
        assert server.ask("acquire", uri="/", headers={"user": "/hang"})["status"] == 503
        assert server.said() == "hanging"
        server.go_on()
        assert [server.said(), server.said()] == ["released a lease"] * 2
        server.process.terminate()
        assert server.process.communicate(timeout=60)[0] == ""


class LateServerOfOneThread(LateServer):
    CODE = LateServer.CODE.replace("threads=2, within_s", "threads=1, within_s")


def test_permits_that_nobody_has_are_released_once_more_at_the_end(tmp_path: Path) -> None:
    with LateServerOfOneThread(tmp_path, within_s=0.5) as server:
        assert server.ask("acquire", uri="/", headers={"user": "/hang"})["status"] == 503
        assert server.said() == "hanging"
        server.go_on()
        assert server.said() == "released a lease"
        # The thread is done with that.
        until(lambda: server.get("/auth/envoy/", {"user": "b"})[0] == 200, "the gate goes on")
        server.process.terminate()
        assert server.process.communicate(timeout=60)[0] == "released a lease\n"


class StuckServer(LateServerOfOneThread):
    """Its releases hang, and nobody knows what becomes of those of permits that nobody has."""

    CODE = (
        LateServerOfOneThread.CODE.replace("        act(lease)", '        act("/hang")')
        .replace('print("released", lease, flush=True)', "print(lease, flush=True)")
        .replace("return self.releases > 1 or None", 'return None if lease == "a lease" else True')
    )


def test_permits_that_nobody_has_leave_other_releases_their_turns(tmp_path: Path) -> None:
    with StuckServer(tmp_path, within_s=0.5) as server, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        # Its thread hangs at the end.
        stack.callback(server.process.kill)
        for _ in range(8):
            assert server.ask("acquire", uri="/", headers={"user": "/hang"})["status"] == 503
            for said in ("hanging", "hanging", "a lease"):
                assert server.said() == said
                if said == "hanging":
                    server.go_on()
        # All of them are released again: the first one is under way.
        assert server.said() == "hanging"
        mine = pool.submit(server.ask, "release", lease="mine")
        ended: list[str] = []
        while "mine" not in ended and len(ended) < 5:
            assert not ended or server.said() == "hanging"
            time.sleep(0.1)
            server.go_on()
            ended.append(server.said())
        assert "mine" in ended
        assert mine.result(60)["released"] is True


def test_questions_with_one_id_take_one_thread(tmp_path: Path) -> None:
    hanging = {"uri": "/", "headers": {"user": "/hang"}, "request_id": "one"}
    with HoldingServer(tmp_path, within_s=600) as server, ThreadPoolExecutor(20) as pool:
        replies = [pool.submit(server.ask, "decide", **hanging) for _ in range(4)]
        assert server.said() == "hanging"
        for _ in range(2):
            # Those whose services have gone wait for no thread, either.
            connection = server.connect()
            connection.request("POST", "/v1/decide", json.dumps(hanging), {"Content-Type": "application/json"})
            connection.close()
        assert server.ask("decide", uri="/", headers={"user": "b"})["allowed"]
        server.go_on()
        assert all(reply.result(60)["allowed"] for reply in replies)
        # It was decided once, and so is each release of a lease.
        first = pool.submit(server.ask, "release", lease="/hang")
        assert server.said() == "hanging"
        second = pool.submit(server.ask, "release", lease="/hang")
        assert server.ask("decide", uri="/", headers={"user": "b"})["allowed"]
        assert not second.done()
        server.go_on()
        assert first.result(60)["released"] is True
        assert [server.said(), server.said()] == ["released /hang", "hanging"]
        server.go_on()
        assert second.result(60)["released"] is True


# Questions that are sent again


@pytest.mark.parametrize("mode", MODES)
def test_a_question_that_is_sent_again_is_charged_once(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    server = serve(THREE, store=url_of(redis, mode, store_name))
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    first = server.ask("decide", **question, request_id="a")
    assert [server.ask("decide", **question, request_id="a") for _ in range(5)] == [first] * 5
    other = server.ask("decide", **question, method="POST", request_id="a")
    assert (other["http"], "that of another question" in other["error"]) == (422, True)
    assert server.ask("reserve", **question, max_delay=0, request_id="a")["http"] == (501 if mode == "leased" else 422)
    again = {**question, "request_id": "b", "refundable": True}
    batch = server.ask("batch", requests=[again, again, {**again, "uri": "/api/y"}])["replies"]
    assert (batch[0]["allowed"], batch[1]) == (True, batch[0])
    assert batch[2]["error"].startswith("requests[2]: the request_id 'b' was that of another question")
    # One of three is left.
    assert [server.ask("decide", **question)["allowed"] for _ in range(2)] == [True, False]
    # A denied question is decided again, and one that was given back, too.
    assert [server.ask("decide", **question, request_id="c")["allowed"] for _ in range(2)] == [False, False]
    assert server.ask("refund", charge=batch[0]["charge"])["refunded"] is True
    assert server.ask("batch", requests=[again])["replies"][0]["charge"] != batch[0]["charge"]
    assert server.ask("decide", **question, request_id="a") == first
    assert server.ask("decide", uri="/free", client="192.0.2.7", request_id="d")["allowed"] is True
    assert server.ask("peek", **question, request_id="a")["http"] == 422


def test_an_acquisition_that_is_sent_again_holds_one_permit(held: DecisionServer, redis: RedisServer) -> None:
    first = held.ask("acquire", **JOB, request_id="one")
    assert held.ask("acquire", **JOB, request_id="one") == first
    assert holding(redis) == 1
    assert held.ask("renew", lease=first["lease"]["id"])["held"] is True
    assert held.ask("acquire", **JOB, request_id="one") == first
    assert held.ask("release", lease=first["lease"]["id"])["released"] is True
    assert held.ask("acquire", **JOB, request_id="one")["lease"] != first["lease"]


def test_questions_with_one_id_at_once_are_charged_once(redis: RedisServer, serve: Serve, store_name: str) -> None:
    server = serve(THREE, store=url_of(redis, "strict", store_name))
    question = {"uri": "/api/x", "client": "192.0.2.7", "request_id": "a"}
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: json.dumps(server.ask("decide", **question)), range(40)))
    assert len(set(replies)) == 1
    assert server.ask("peek", uri="/api/x", client="192.0.2.7")["limits"][0]["remaining"] == 2


def test_a_question_whose_service_has_gone_is_charged_once(own_redis: RedisServer, serve: Serve) -> None:
    server = serve(HELD, "--no-proxies", store=f"{own_redis.url}?timeout=60")
    body = json.dumps({**JOB, "request_id": "one"}).encode()
    with own_redis.stopped():
        connection = server.connect()
        connection.request("POST", "/v1/acquire", body, {"Content-Type": "application/json"})
        until(lambda: is_asked(own_redis), "Redis is asked")
        connection.close()
    first = server.ask("acquire", **JOB, request_id="one")
    assert first["allowed"]
    assert holding(own_redis) == 1
    assert server.ask("release", lease=first["lease"]["id"])["released"] is True
    assert holding(own_redis) == 0


SEEN = THREE + (
    '[limits.all]\nalgorithm = "fixed-window"\nrate = "9/day"\n'
    '[[rules]]\nname = "seen"\nlimits = ["all"]\nshadow = true\nkey = "everyone"\n'
)


def test_a_rule_in_the_shadow_is_charged_once(redis: RedisServer, serve: Serve, store_name: str) -> None:
    server = serve(SEEN, store=url_of(redis, "strict", store_name))
    for request_id in ("a", "a", "a", "b"):
        assert server.ask("decide", uri="/api/x", client="192.0.2.7", request_id=request_id)["allowed"]
    with RedisStore(redis.url, timeout=60) as store:
        limiter = FixedWindow(store, "all", "9/day")
        until(lambda: limiter.peek("everyone").remaining == 7, "both questions are charged, each once")


ONE = '[limits.{0}]\nalgorithm = "fixed-window"\nrate = "{1}"\n[[rules]]\nname = "{0}"\nlimits = ["{0}"]\n'


def test_a_question_is_decided_anew_by_other_limits(redis: RedisServer, store_name: str, tmp_path: Path) -> None:
    url = f"{redis.url}?timeout=60&host=shm:///{store_name}?keys=10000"
    question = {"uri": "/", "client": "192.0.2.7", "request_id": "one"}
    with contextlib.ExitStack() as started:
        pair = Host(tmp_path / "live.toml", url, HEAD + ONE.format("api", "9/day"), started)
        first = pair.server.ask("decide", **question)
        assert [limit["name"] for limit in first["limits"]] == ["api"]
        assert pair.server.ask("decide", **question) == first
        pair.publish(HEAD + ONE.format("other", "5/day"))
        again = pair.server.ask("decide", **question)
        assert [(limit["name"], limit["limit"]) for limit in again["limits"]] == [("other", 5)]
        assert pair.server.ask("decide", **question) == again


@contextlib.contextmanager
def charging_held(redis: RedisServer, tmp_path: Path) -> Iterator[Any]:
    """What charges the limits of `HELD` in Redis."""
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD}")
    with RedisStore(redis.url, timeout=60) as store:
        yield cast(Any, plan_of(file, store, holds_permits=True)).charging


def use_of(charging: Any, name: str) -> tuple[int, str, int]:
    """One permit of the limit with this name."""
    [number] = [number for number, limiter in enumerate(charging._limiters) if limiter.name == name]
    return number, JOB["client"], 1


def test_a_lease_of_an_answer_that_is_replaced_is_released(redis: RedisServer, tmp_path: Path) -> None:
    with charging_held(redis, tmp_path) as charging:
        jobs, started = (use_of(charging, name) for name in ("jobs", "started"))
        questions = [[jobs, started], [jobs]]
        first, second = (charging.ask_once("a", "q", "hold", [uses, None, False]) for uses in questions)
        assert [first.allowed, second.allowed, second.is_first] == [True, True, True]
        assert holding(redis) == 1
        assert charging.release(first.lease) is False


def test_a_renewal_of_a_lease_that_is_forgotten_meanwhile_holds_nothing(redis: RedisServer, tmp_path: Path) -> None:
    with charging_held(redis, tmp_path) as charging:
        leases = charging._remembered.leases
        lease = charging.hold([use_of(charging, "jobs")], None, False).lease
        held = leases.get(lease)
        [of_jobs] = held.leases

        def renewing() -> Generator[Any, Any, bool]:
            is_held: bool = yield from of_jobs.renewing()
            leases.remove(lease)
            return is_held

        held.leases = [SimpleNamespace(renewing=renewing, releasing=of_jobs.releasing)]
        assert charging.renew(lease) is False
        assert holding(redis) == 0


def test_a_lease_that_is_given_back_meanwhile_is_not_renewed(redis: RedisServer, tmp_path: Path) -> None:
    with charging_held(redis, tmp_path) as charging:
        lease = charging.ask_once("a", "q", "hold", [[use_of(charging, "jobs")], None, False]).lease
        held = charging._remembered.leases.get(lease)
        [of_jobs] = held.leases
        renewed = []

        def releasing() -> Generator[Any, Any, bool]:
            if not renewed:
                renewed.append(None)
                renewed.append(charging.renew(lease))
            return (yield from of_jobs.releasing())

        held.leases = [SimpleNamespace(renewing=of_jobs.renewing, releasing=releasing)]
        charging.release(lease)
        assert renewed == [None, False]
        assert holding(redis) == 0


# What a server remembers


def test_the_newest_answers_are_remembered() -> None:
    answers = FirstAnswers()
    made: list[str] = []

    def undo(answer: Decided) -> bool:
        # Nobody renews what is given back.
        assert answer.charge is not None
        assert not answers.prolong(answer.charge, 1e9)
        return True

    def ask(request_id: str, question: str = "q", charged: str = "", lasts_s: float = 1e9) -> Any:
        def decide() -> tuple[Any, float]:
            made.append(request_id)
            return Decided(True, [None] * 100, charge=f"charge of {request_id}"), lasts_s

        return answers.once(request_id, question, charged, decide, undo)

    first = ask("first")
    assert (first.is_first, ask("first")) == (True, first.given_again())
    assert ask("first", "other") == "the request_id 'first' was that of another question: make one for each"
    assert ask("first", charged="other limits").is_first
    answers.forget("charge of first")
    assert ask("first").is_first
    assert ask("short", lasts_s=0).is_first
    assert ask("short", lasts_s=0).is_first
    answers.prolong("charge of short", 1e9)
    assert not ask("short").is_first
    for number in range(5000):
        ask(str(number))
    del made[:]
    assert [ask(str(number)).is_first for number in (0, 4999)] == [True, False]
    assert made == ["0"]


def test_an_answer_lasts_from_the_time_of_its_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("forebay.serving.first_answers.time.monotonic", lambda: now_s)
    answers = FirstAnswers()

    def decide() -> tuple[Any, float]:
        nonlocal now_s
        now_s += 0.4
        return Decided(True, []), 0.5

    undone: list[Decided] = []

    def undo(answer: Decided) -> bool:
        undone.append(answer)
        return len(undone) != 1

    # Redis may have begun the lease at once, and its end is at 100.5.
    assert answers.once("a", "q", "", decide, undo).is_first  # type: ignore[union-attr]
    now_s = 100.49
    assert not answers.once("a", "q", "", decide, undo).is_first  # type: ignore[union-attr]
    assert not undone
    now_s = 100.51
    # Its permits may be held still: a renewal had no reply. They are given back before others are taken.
    assert answers.once("a", "q", "", decide, undo) is None
    assert answers.once("a", "q", "", decide, undo).is_first  # type: ignore[union-attr]
    assert len(undone) == 2
    now_s = 102.0
    # Another question may have the id now, and the first one keeps what it has used.
    assert answers.once("a", "other", "", decide, undo).is_first  # type: ignore[union-attr]
    assert len(undone) == 2


def test_an_answer_that_fails_or_denies_is_not_remembered() -> None:
    answers = FirstAnswers()

    def fail(*arguments: Any) -> Any:
        raise LookupError("nothing")

    for _ in range(2):
        with pytest.raises(LookupError):
            answers.once("a", "q", "", fail, fail)
        for answer in (None, "why", Decided(False, [None])):
            assert answers.once("a", "q", "", lambda answer=answer: (answer, 1e9), fail) is answer
    allowed = Decided(True, [])
    assert answers.once("a", "other", "", lambda: (allowed, 1e9), fail) == allowed


def test_a_lease_is_forgotten_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.serving.leases._MOST", 3000)
    monkeypatch.setattr("forebay.serving.leases._GRACE_S", 0.0)
    leases = HeldLeases()
    old = [leases.add(["held"], ["a"], 1, [0.0]) for _ in range(2500)]
    kept = leases.add(["kept"], ["a"], 1, [1e9])
    assert [leases.get(lease) for lease in old] == [None] * 2500
    assert len(leases._by_id) == 2501
    assert leases.have_room()
    assert len(leases._by_id) == 1
    assert leases.get(kept) is not None
    leases.remove(kept)
    assert leases.get(kept) is None
    assert all(leases.have_room() and leases.add([], ["a"], 1, [1e9]) for _ in range(3000))
    assert not leases.have_room()


def test_a_lease_that_is_renewed_at_its_end_is_kept() -> None:
    leases = HeldLeases()
    [lease, *_] = [leases.add(["held"], ["a"], 1, [0.0]) for _ in range(2000)]
    assert leases.have_room()
    held = leases.get(lease)
    # A renewal may be under way.
    assert held is not None
    assert leases.restart(lease, held, is_sure=True)
    assert leases.get(lease) is held
    # One that was released meanwhile isn't held again.
    leases.remove(lease)
    assert not leases.restart(lease, held, is_sure=True)
    assert leases.get(lease) is None


def test_a_lease_is_known_until_redis_has_surely_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("forebay.serving.leases.time.monotonic", lambda: now_s)
    leases = HeldLeases()
    # Of two limits: the second one's permits are held for longer.
    lease = leases.add(["short", "long"], ["a", "a"], 2, [2.0, 100.0])
    held = leases.get(lease)
    assert held is not None
    assert (held.lasts_s, held.end_s) == (2.0, 100.0)
    now_s = 50.0
    # Redis may do this renewal at 150, however a later one was answered.
    assert leases.restart(lease, held, is_sure=False)
    now_s = 60.0
    assert leases.restart(lease, held, is_sure=True)
    assert held.end_s == 250.0
    now_s = 200.0
    assert leases.restart(lease, held, is_sure=True)
    assert held.end_s == 300.0
    now_s = 311.0
    assert leases.get(lease) is None


def test_the_bytes_of_leases_have_a_bound() -> None:
    leases = HeldLeases()
    added = 0
    while leases.have_room():
        leases.add(["held"], [("header", "a" * 60_000)], 1, [1e9])
        added += 1
    assert 2000 < added < 2500
    leases, added = HeldLeases(), 0
    while leases.have_room():
        leases.add(["held"], ["a"], 10_000, [1e9])
        added += 1
    assert 100 < added < 200


def test_a_server_with_too_many_leases_takes_no_permits(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.serving.leases._MOST", 1)
    file = tmp_path / "limits.toml"
    file.write_text(f"version = 1\n{PROXIES}{HELD_LIMIT}{RULE}")
    with RedisStore(redis.url, timeout=60) as store:
        plan: Any = plan_of(file, store, holds_permits=True)
        first = plan.charging.hold([(0, "a", 1)], None, False)
        assert first.allowed
        assert plan.charging.hold([(0, "a", 1)], None, False) == "the server holds too many leases: release some"
        assert plan.charging.release(first.lease) is True
        assert plan.charging.hold([(0, "a", 3)], None, False).allowed
