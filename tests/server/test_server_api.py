"""Calls of the JSON API beside the decision: batches, reservations, charges given back, and permits that are held."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from decision_server import DecisionServer

from forebay import Concurrency, FixedWindow, Store

Serve = Callable[..., DecisionServer]

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "3/hour"
align = "first"
[limits.slow]
algorithm = "token-bucket"
rate = "1/hour"
burst = 1
[limits.queue]
algorithm = "token-bucket"
rate = "1/second"
burst = 1
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
[[rules]]
name = "slow"
limits = ["slow"]
path = "/slow"
[[rules]]
name = "both"
limits = ["api", "slow"]
path = "/both"
[[rules]]
name = "queue"
limits = ["queue"]
path = "/queue"
"""
HELD = """
[limits.jobs]
algorithm = "concurrency"
limit = 2
lease = "1 hour"
[limits.started]
algorithm = "fixed-window"
rate = "4/hour"
align = "first"
[[rules]]
name = "jobs"
limits = ["started", "jobs"]
path = "/jobs"
[[rules]]
name = "other"
limits = ["started"]
path = "/other"
"""
CLIENT = "192.0.2.7"


@pytest.fixture
def api(serve: Serve) -> DecisionServer:
    return serve(RULES)


@pytest.fixture
def jobs(serve: Serve) -> DecisionServer:
    return serve(HELD, "--no-proxies")


def left(server: DecisionServer, uri: str = "/api/x") -> Any:
    return server.ask("peek", uri=uri, client=CLIENT)["limits"][0]["remaining"]


def test_a_batch_decides_each_question_by_itself(api: DecisionServer) -> None:
    question = {"uri": "/api/x", "client": CLIENT}
    replies = api.ask("batch", requests=[question] * 4 + [{"uri": "/other", "client": CLIENT}])["replies"]
    assert [reply["allowed"] for reply in replies] == [True, True, True, False, True]
    assert [reply["limits"][0]["remaining"] for reply in replies[:4]] == [2, 1, 0, 0]


def test_a_batch_with_one_bad_question_charges_nothing(api: DecisionServer) -> None:
    reply = api.ask("batch", requests=[{"uri": "/api/x", "client": CLIENT}, {"uri": "/api/x"}])
    assert reply["http"] == 422
    assert reply["error"].startswith("requests[1]: the rules need the client's address")
    assert left(api) == 3
    assert api.ask("batch", requests=[])["replies"] == []


def test_a_batch_is_bounded(api: DecisionServer) -> None:
    question = {"uri": "/other", "client": CLIENT}
    assert len(api.ask("batch", requests=[question] * 256)["replies"]) == 256
    reply = api.ask("batch", requests=[{"uri": "/api/x", "client": CLIENT}] * 257)
    assert (reply["http"], reply["error"]) == (422, "a batch has at most 256 requests")
    assert left(api) == 3
    listed = api.ask("batch", requests=[["/api/x", "GET", CLIENT]])
    assert (listed["http"], "expected an object" in listed["error"]) == (422, True)


def test_a_charge_of_a_long_key_is_given_back(serve: Serve) -> None:
    server = serve(RULES.replace('path = "/api/*"', 'path = "/api/*"\nkey = "header:user | address"'))
    question = {"uri": "/api/x", "client": CLIENT, "headers": {"user": "a" * 30_000}}
    reply = server.ask("decide", **question, refundable=True)
    assert server.ask("peek", **question)["limits"][0]["remaining"] == 2
    assert server.ask("refund", charge=reply["charge"])["refunded"] is True
    assert server.ask("peek", **question)["limits"][0]["remaining"] == 3


def test_a_charge_is_given_back_once(api: DecisionServer) -> None:
    reply = api.ask("decide", uri="/both", client=CLIENT, refundable=True)
    assert (reply["allowed"], left(api)) == (True, 2)
    assert not api.ask("decide", uri="/both", client=CLIENT)["allowed"]
    assert api.ask("refund", charge=reply["charge"])["refunded"] is True
    assert left(api) == 3
    assert api.ask("decide", uri="/both", client=CLIENT)["allowed"]
    for spelling in (reply["charge"], reply["charge"].upper(), f"20{reply['charge']}"):
        assert api.ask("refund", charge=spelling)["refunded"] is False
    assert left(api) == 2


@pytest.mark.parametrize("charge", ["", "zz", "7b", "7b7d", "5b5d", "ab" * 5000])
def test_a_charge_of_no_reply_is_refused(api: DecisionServer, charge: str) -> None:
    reply = api.ask("refund", charge=charge)
    assert (reply["http"], reply["error"]) == (422, "that is no charge of a reply")


def test_a_denied_question_and_one_without_refundable_have_no_charge(api: DecisionServer) -> None:
    assert "charge" not in api.ask("decide", uri="/slow", client=CLIENT)
    assert "charge" not in api.ask("decide", uri="/slow", client=CLIENT, refundable=True)


def test_a_reservation_books_ahead_and_is_given_back(api: DecisionServer) -> None:
    first = api.ask("reserve", uri="/queue", client=CLIENT, max_delay=0)
    assert (first["allowed"], first["delay"]) == (True, 0)
    assert not api.ask("reserve", uri="/queue", client=CLIENT, max_delay=0.5)["allowed"]
    second = api.ask("reserve", uri="/queue", client=CLIENT, max_delay=60)
    assert second["allowed"]
    assert 0 < second["delay"] <= 1
    third = api.ask("reserve", uri="/queue", client=CLIENT, max_delay=60)
    assert second["delay"] < third["delay"] <= 2
    assert api.ask("refund", charge=third["charge"])["refunded"]
    again = api.ask("reserve", uri="/queue", client=CLIENT, max_delay=60)
    assert again["delay"] < third["delay"]


def test_a_reservation_of_several_limits_books_all_or_none(api: DecisionServer) -> None:
    assert api.ask("reserve", uri="/both", client=CLIENT, max_delay=0)["allowed"]
    reply = api.ask("reserve", uri="/both", client=CLIENT, max_delay=1)
    assert (reply["allowed"], reply["limits"][0]["name"]) == (False, "slow")
    assert left(api) == 2


@pytest.mark.parametrize(
    ("call", "question", "reason"),
    [
        ("reserve", {}, "send max_delay"),
        ("reserve", {"max_delay": -1}, "send max_delay"),
        ("reserve", {"max_delay": 1e9}, "send max_delay"),
        ("decide", {"max_delay": 1}, "is for /v1/reserve"),
        ("peek", {"request_id": "a"}, "charges nothing"),
        ("peek", {"refundable": True}, "charges nothing"),
        ("decide", {"request_id": ""}, "has 1 to 256 characters"),
        ("decide", {"request_id": "a" * 257}, "has 1 to 256 characters"),
    ],
)
def test_a_question_for_another_call_is_refused(
    patient: DecisionServer, call: str, question: dict[str, Any], reason: str
) -> None:
    reply = patient.ask(call, uri="/", client=CLIENT, **question)
    assert reply["http"] == 422
    assert reason in reply["error"]


def test_a_question_that_is_sent_again_is_charged_once(api: DecisionServer) -> None:
    question = {"uri": "/api/x", "client": CLIENT, "request_id": "one"}
    first = api.ask("decide", **question)
    assert api.ask("decide", **question) == first
    assert left(api) == 2
    assert api.ask("batch", requests=[question])["replies"][0]["error"].endswith("another question: make one for each")
    reply = api.ask("decide", **{**question, "uri": "/api/y"})
    assert (reply["http"], reply["error"]) == (
        422,
        'the request_id "one" was that of another question: make one for each',
    )
    assert left(api) == 2


def test_a_request_id_has_a_number_of_characters(api: DecisionServer) -> None:
    question = {"uri": "/api/x", "client": CLIENT}
    assert api.ask("decide", **question, request_id="\u00e9" * 256)["allowed"]
    for request_id in ("", "\u00e9" * 257):
        reply = api.ask("decide", **question, request_id=request_id)
        assert (reply["http"], reply["error"]) == (422, "a request_id has 1 to 256 characters")


def test_what_a_full_store_has_allowed_gives_nothing_back(serve: Serve, store_name: str) -> None:
    server = serve(RULES, store=f"shm:///{store_name}?keys=64&on_full=allow")
    question = {"uri": "/api/x", "client": CLIENT}
    with Store(store_name, keys=64, on_full="allow") as store:
        others = FixedWindow(store, "others", "9/hour")
        for number in range(3000):
            others.allow(number)
        uncounted = [server.ask("decide", **question, refundable=True) for _ in range(4)]
        assert all(reply["allowed"] for reply in uncounted)
        for number in range(3000):
            others.reset(number)
    assert [server.ask("decide", **question)["allowed"] for _ in range(4)] == [True, True, True, False]
    for reply in uncounted:
        server.ask("refund", charge=reply["charge"])
    assert not server.ask("decide", **question)["allowed"]


def test_a_denied_question_is_decided_again(api: DecisionServer) -> None:
    question = {"uri": "/slow", "client": CLIENT, "request_id": "one", "refundable": True}
    other = api.ask("decide", uri="/slow", client=CLIENT, refundable=True)
    assert not api.ask("decide", **question)["allowed"]
    api.ask("refund", charge=other["charge"])
    first = api.ask("decide", **question)
    assert first["allowed"]
    assert api.ask("refund", charge=first["charge"])["refunded"]
    # Its charge was given back, so it is charged again.
    assert api.ask("decide", **question)["charge"] != first["charge"]


def test_permits_are_held_until_they_are_released(jobs: DecisionServer) -> None:
    first, second = (jobs.ask("acquire", uri="/jobs", client=CLIENT) for _ in range(2))
    assert first["lease"]["lasts"] == 3600
    denied = jobs.ask("acquire", uri="/jobs", client=CLIENT)
    assert (denied["allowed"], denied["status"], denied["retry_after"]) == (False, 429, 1)
    assert "lease" not in denied
    assert denied["limits"] == [
        {"name": "jobs", "allowed": False, "limit": 2, "remaining": 0, "retry_after": 1.0, "reset_after": 1.0}
    ]
    # A denied request is charged to none of its limits.
    assert left(jobs, "/other") == 2
    assert jobs.ask("renew", lease=first["lease"]["id"])["held"] is True
    assert jobs.ask("release", lease=first["lease"]["id"])["released"] is True
    assert jobs.ask("release", lease=first["lease"]["id"])["released"] is False
    assert jobs.ask("renew", lease=first["lease"]["id"])["held"] is False
    third = jobs.ask("acquire", uri="/jobs", client=CLIENT)
    assert third["allowed"]
    # The rate denies, so no permit is held.
    jobs.ask("release", lease=second["lease"]["id"])
    jobs.ask("decide", uri="/other", client=CLIENT)
    assert jobs.ask("acquire", uri="/jobs", client=CLIENT)["limits"][0]["name"] == "started"
    assert jobs.ask("release", lease=third["lease"]["id"])["released"]


def test_other_calls_hold_no_permits(jobs: DecisionServer) -> None:
    for call, more in (("decide", {}), ("peek", {}), ("reserve", {"max_delay": 1})):
        reply = jobs.ask(call, uri="/jobs", client=CLIENT, **more)
        assert (reply["allowed"], reply["status"]) == (False, 500)
        assert 'The rule \\"jobs\\" holds permits' in reply["body"]
    assert left(jobs, "/other") == 4
    assert "lease" not in jobs.ask("acquire", uri="/other", client=CLIENT)


def test_an_acquisition_that_is_sent_again_holds_one_permit(jobs: DecisionServer) -> None:
    question = {"uri": "/jobs", "client": CLIENT, "request_id": "one"}
    first = jobs.ask("acquire", **question)
    assert jobs.ask("acquire", **question) == first
    assert jobs.ask("release", lease=first["lease"]["id"])["released"]
    assert jobs.ask("acquire", **question)["lease"] != first["lease"]


def test_an_acquisition_that_is_sent_again_after_its_lease_is_another_one(serve: Serve) -> None:
    rules = HELD.replace('lease = "1 hour"', 'lease = "100ms"').replace("limit = 2", "limit = 1")
    server = serve(rules, "--no-proxies")
    question = {"uri": "/jobs", "client": CLIENT, "request_id": "one"}
    first = server.ask("acquire", **question)
    assert first["allowed"]
    # Once another one holds the permit, the lease is over.
    while not (other := server.ask("acquire", uri="/jobs", client=CLIENT))["allowed"]:
        pass
    again = server.ask("acquire", **question)
    assert again.get("lease") != first["lease"]
    assert other["lease"] != first["lease"]


def test_what_an_answer_that_is_over_still_holds_comes_back_before_the_next_one(serve: Serve) -> None:
    rules = HELD.replace('lease = "1 hour"', 'lease = "200ms"').replace('"jobs"]', '"jobs", "slots"]')
    slots = '[limits.slots]\nalgorithm = "concurrency"\nlimit = 1\nlease = "1 hour"\n'
    server = serve(slots + rules, "--no-proxies")
    question = {"uri": "/jobs", "client": CLIENT, "request_id": "one", "refundable": True}
    first = server.ask("acquire", **question)
    assert first["lease"]["lasts"] == 0.2
    assert not server.ask("acquire", **{**question, "request_id": "other"})["allowed"]
    while (again := server.ask("acquire", **question)) == first:
        pass
    # The slot of the first answer would last for an hour.
    assert again["allowed"]
    assert left(server, "/other") == 3
    assert server.ask("refund", charge=first["charge"])["refunded"] is False
    assert server.ask("release", lease=first["lease"]["id"])["released"] is False
    assert server.ask("release", lease=again["lease"]["id"])["released"] is True


def test_a_denied_acquisition_reports_no_time(jobs: DecisionServer) -> None:
    for _ in range(2):
        assert jobs.ask("acquire", uri="/jobs", client=CLIENT)["allowed"]
    denied = jobs.ask("acquire", uri="/jobs", client=CLIENT)
    # As in the middleware: nobody knows when a permit comes back.
    fields = {one["name"]: one["value"] for one in denied["headers"]}
    assert fields["RateLimit"] == '"jobs";r=0'
    assert fields["RateLimit-Policy"] == '"jobs";q=2;qu="concurrent-requests"'


def test_a_denied_acquisition_reports_the_permits_that_are_free(serve: Serve, store_name: str) -> None:
    rules = HELD.replace("limit = 2", "limit = 7").replace('["started", "jobs"]', '["jobs"]\ncost = 3')
    server = serve(rules, "--no-proxies")
    assert all(server.ask("acquire", uri="/jobs", client=CLIENT)["allowed"] for _ in range(2))
    denied = server.ask("acquire", uri="/jobs", client=CLIENT)
    with Store.attach(store_name) as store:
        expected = Concurrency(store, "jobs", 7, lease="1 hour").peek(CLIENT, 3)
    assert (expected.allowed, expected.remaining) == (False, 1)
    assert denied["limits"][0]["remaining"] == expected.remaining
    assert '"jobs";r=1' in [one["value"] for one in denied["headers"]]


def test_permits_of_a_killed_server_come_back(jobs: DecisionServer, serve: Serve) -> None:
    for _ in range(2):
        assert jobs.ask("acquire", uri="/jobs", client=CLIENT)["allowed"]
    jobs.kill()
    assert serve(HELD, "--no-proxies").ask("acquire", uri="/jobs", client=CLIENT)["allowed"]


def test_a_server_without_proxies_answers_none(jobs: DecisionServer) -> None:
    fields = {"X-Forwarded-Uri": "/other", "X-Forwarded-Method": "GET", "X-Forwarded-For": CLIENT}
    assert [jobs.get(f"/auth/{path}", fields)[0] for path in ("traefik", "nginx", "envoy/other")] == [404] * 3


def test_the_description_has_every_call_and_word(jobs: DecisionServer) -> None:
    document = json.loads(jobs.get("/openapi.json")[2])
    calls = {path.removeprefix("/v1/") for path in document["paths"] if path.startswith("/v1/")}
    assert calls == {"decide", "peek", "batch", "reserve", "refund", "acquire", "renew", "release"}
    for call in calls:
        assert jobs.ask(call, unknown=1)["error"].startswith("unknown field `unknown`")
    words = re.findall(r"`(\w+)`", jobs.ask("decide", unknown=1)["error"])
    schemas = document["components"]["schemas"]
    assert set(schemas["Question"]["properties"]) == set(words) - {"unknown"}
    booked = jobs.ask("reserve", uri="/other", client=CLIENT, max_delay=1)
    held = jobs.ask("acquire", uri="/jobs", client=CLIENT)
    assert set(schemas["Reply"]["properties"]) == (set(booked) | set(held)) - {"http"}
    assert set(schemas["Reply"]["required"]) == (set(booked) & set(held)) - {"http"}
    assert set(schemas["Limit"]["properties"]) == set(held["limits"][0])
    assert set(schemas["HeldLease"]["properties"]) == set(held["lease"])
