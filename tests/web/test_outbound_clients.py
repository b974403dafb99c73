"""Real clients in several processes against a real server: the tests check the server's record and its clock.

A request arrives later than the client sends it. The record therefore proves two facts: at any time, no more requests
have arrived than permits were granted by then, and no request arrives too early.
"""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import httpx
import pytest
import requests
from outbound_server import RecordingServer
from process_helpers import Crew, Meeting, increment_ns, nanoseconds

import forebay.contrib.aiohttp_client
import forebay.contrib.httpx
import forebay.contrib.requests
from forebay import AllOf, Concurrency, Credits, LeakyBucket, MinInterval, SlidingLog, Store, TokenBucket
from forebay.contrib import outbound
from forebay.contrib.aiohttp_client import LimitedMiddleware
from forebay.contrib.httpx import AsyncLimitedTransport, LimitedTransport
from forebay.contrib.requests import LimitedAdapter
from forebay.testing import ManualClock

NS: Final = 1_000_000_000
PROCESSES: Final = 3


class Send(Protocol):
    """Sends a request and returns the status of the final response."""

    def __call__(self, url: str, method: str = "GET", body: Any = None) -> int: ...


@contextmanager
def httpx_client(limiter: Any, **options: Any) -> Iterator[Send]:
    with httpx.Client(transport=LimitedTransport(limiter, **options), timeout=None) as client:
        yield lambda url, method="GET", body=None: client.request(method, url, content=body).status_code


@contextmanager
def async_client(limiter: Any, **options: Any) -> Iterator[Send]:
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=AsyncLimitedTransport(limiter, **options), timeout=None)

        async def send(url: str, method: str, body: Any) -> int:
            content = body if isinstance(body, (bytes, str, type(None))) else as_async(body)
            return (await client.request(method, url, content=content)).status_code

        yield lambda url, method="GET", body=None: runner.run(send(url, method, body))
        runner.run(client.aclose())


@contextmanager
def requests_client(limiter: Any, **options: Any) -> Iterator[Send]:
    with requests.Session() as session:
        session.mount("http://", LimitedAdapter(limiter, **options))
        yield lambda url, method="GET", body=None: session.request(method, url, data=body).status_code


@contextmanager
def aiohttp_client(limiter: Any, **options: Any) -> Iterator[Send]:
    with asyncio.Runner() as runner:

        async def connect() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(middlewares=[LimitedMiddleware(limiter, **options)])

        session = runner.run(connect())

        async def send(url: str, method: str, body: Any) -> int:
            content = body if isinstance(body, (bytes, str, type(None))) else as_async(body)
            async with session.request(method, url, data=content) as response:
                assert method == "HEAD" or await response.read() == b"there"
                return response.status

        yield lambda url, method="GET", body=None: runner.run(send(url, method, body))
        runner.run(session.close())


async def as_async(body: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in body:
        yield part


Client = Callable[..., Any]
CLIENTS: Final = {
    "httpx": httpx_client,
    "httpx async": async_client,
    "requests": requests_client,
    "aiohttp": aiohttp_client,
}
EACH_CLIENT = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())


@pytest.fixture
def server(crew: Crew) -> RecordingServer:
    return RecordingServer(crew)


@pytest.fixture
def shared(name: str) -> Iterator[Store]:
    with Store(name, keys=100) as store:
        yield store


@EACH_CLIENT
def test_server_receives_no_more_than_the_limit(
    crew: Crew, server: RecordingServer, shared: Store, client: Client
) -> None:
    rate, burst, each = "50/second", 5, 8

    def send_often(who: int) -> list[int]:
        with client(TokenBucket(shared, "partner", rate, burst=burst)) as send:
            return [send(f"{server.url}/ok") for _ in range(each)]

    begun_ns = nanoseconds()
    assert crew.run(PROCESSES, send_often) == [[200] * each] * PROCESSES
    seen = server.seen()
    assert len(seen) == PROCESSES * each
    for number, request in enumerate(seen, start=1):
        assert request.arrived_ns >= begun_ns + (number - burst) * increment_ns(rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda store: SlidingLog(store, "log", "4/200ms", keys=10),
        lambda store: AllOf(
            SlidingLog(store, "log", "4/200ms", keys=10), LeakyBucket(store, "queue", "1000/second", capacity=100)
        ),
    ],
    ids=["sliding log", "all of"],
)
def test_server_receives_no_more_than_the_limit_in_any_period(
    crew: Crew, server: RecordingServer, shared: Store, make: Callable[[Store], Any]
) -> None:
    def send_often(who: int) -> None:
        with httpx_client(make(shared), key="partner") as send:
            for _ in range(5):
                assert send(f"{server.url}/ok") == 200

    begun_ns = nanoseconds()
    crew.run(PROCESSES, send_often)
    seen = server.seen()
    assert len(seen) == PROCESSES * 5
    for number, request in enumerate(seen):
        assert request.arrived_ns >= begun_ns + number // 4 * 200_000_000


def test_clients_of_all_kinds_share_a_limit(crew: Crew, server: RecordingServer, shared: Store) -> None:
    def send_once(client: Client) -> int:
        with client(MinInterval(shared, "gap", "100 ms")) as send:
            return int(send(f"{server.url}/ok"))

    begun_ns = nanoseconds()
    assert crew.results([crew.start(send_once, client) for client in CLIENTS.values()]) == [200] * len(CLIENTS)
    for number, request in enumerate(server.seen()):
        assert request.arrived_ns >= begun_ns + number * 100_000_000


@EACH_CLIENT
def test_permit_is_held_until_the_response_is_read(
    crew: Crew, server: RecordingServer, shared: Store, client: Client
) -> None:
    limit = 2

    def send_often(who: int) -> None:
        with client(Concurrency(shared, "slots", limit), key="partner") as send:
            for _ in range(6):
                assert send(f"{server.url}/busy") == 200

    slots = Concurrency(shared, "slots", limit)
    crew.run(PROCESSES, send_often)
    assert len(server.seen()) == PROCESSES * 6
    assert 1 <= server.most_at_once() <= limit
    assert slots.acquire("partner", limit)


@EACH_CLIENT
def test_permit_is_released_before_the_process_ends(server: RecordingServer, shared: Store, client: Client) -> None:
    """The process lives on: the end of a process would release its permits anyway."""
    slots = Concurrency(shared, "slots", 1)
    with client(slots, key="partner", timeout=0) as send:
        for path in ("ok", "429/0/1", "429/soon/1", "503/0/9", "ok"):
            send(f"{server.url}/{path}")
            assert slots.peek("partner").remaining == 1
        with pytest.raises((httpx.ConnectError, requests.ConnectionError, aiohttp.ClientError)):
            send("http://127.0.0.1:1/no-server-listens-there")
    assert slots.peek("partner").remaining == 1


def test_streamed_response_holds_its_permit_until_it_is_closed(server: RecordingServer, shared: Store) -> None:
    slots = Concurrency(shared, "slots", 1)
    with httpx.Client(transport=LimitedTransport(slots, key="x")) as client:
        with client.stream("GET", f"{server.url}/ok") as response:
            assert not slots.peek("x")
            assert response.read() == b"there"
        assert slots.peek("x")
    with requests.Session() as session:
        session.mount("http://", LimitedAdapter(slots, key="x"))
        with session.get(f"{server.url}/ok", stream=True) as streamed:
            assert not slots.peek("x")
            assert streamed.content == b"there"
        assert slots.peek("x")


@EACH_CLIENT
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "429/1/1"), ("POST", "429/1/1"), ("PUT", "503/1/1"), ("GET", "503/date/1")]
)
def test_request_is_retried_after_the_demanded_pause(
    server: RecordingServer, shared: Store, client: Client, method: str, path: str
) -> None:
    body = b"order 7" if method != "GET" else None
    with client(TokenBucket(shared, "partner", "1000/second", burst=1000)) as send:
        assert send(f"{server.url}/{path}", method, body) == 200
    first, again = server.seen()
    assert again.arrived_ns >= first.pause_until_ns > first.arrived_ns
    assert first.checksum == again.checksum == zlib.crc32(body or b"")


@EACH_CLIENT
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "503/1/1", b"order 7"),  # An upstream server may have processed it.
        ("POST", "429/1/1", [b"order ", b"7"]),  # The iterator is consumed.
        ("GET", "429/soon/1", None),
        ("GET", "429/301/1", None),
        ("GET", "500/1/1", None),
    ],
    ids=["not idempotent", "a consumed body", "nonsense", "too long", "another error"],
)
def test_request_without_a_retry_gets_its_first_response(
    server: RecordingServer, shared: Store, client: Client, method: str, path: str, body: Any
) -> None:
    with client(TokenBucket(shared, "partner", "1000/second", burst=1000)) as send:
        assert send(f"{server.url}/{path}", method, iter(body) if isinstance(body, list) else body) == int(path[:3])
    [seen] = server.seen()
    assert seen.checksum == zlib.crc32(b"order 7" if body else b"")


@EACH_CLIENT
def test_caller_gets_the_last_response(server: RecordingServer, shared: Store, client: Client) -> None:
    with client(TokenBucket(shared, "partner", "1000/second", burst=1000), retries=2) as send:
        assert send(f"{server.url}/429/0/9") == 429
    assert len(server.seen()) == 3


def test_all_processes_pause(crew: Crew, server: RecordingServer, shared: Store) -> None:
    """One process gets a pause; all the others then send, and no request arrives before the pause ends."""
    paused = Meeting(1 + len(CLIENTS))

    def limiter() -> TokenBucket:
        return TokenBucket(shared, "partner", "1000/second", burst=1000)

    def get_the_pause() -> int:
        with httpx_client(limiter(), retries=0) as send:
            status = send(f"{server.url}/429/1/1")
            paused.wait(0)
            return int(status)

    def send_after(who: int, client: Client) -> list[int]:
        with client(limiter()) as send:
            paused.wait(who)
            return [send(f"{server.url}/ok") for _ in range(3)]

    first = crew.start(get_the_pause)
    others = [crew.start(send_after, who, client) for who, client in enumerate(CLIENTS.values(), start=1)]
    assert first.result() == 429
    assert crew.results(others) == [[200] * 3] * len(CLIENTS)
    refused, *rest = server.seen()
    assert refused.status == 429
    assert len(rest) == 3 * len(CLIENTS)
    for seen in rest:
        assert seen.arrived_ns >= refused.pause_until_ns


def test_limit_holds_after_a_pause(crew: Crew, server: RecordingServer, shared: Store) -> None:
    """Requests that a pause delayed arrive at the limit's rate, not all at the end of the pause."""
    limit, period_ns = 3, 300_000_000
    paused = Meeting(1 + PROCESSES)

    def send_often(who: int) -> None:
        with httpx_client(SlidingLog(shared, "log", "3/300ms", keys=10), key="partner", retries=0) as send:
            if who == 0:
                assert send(f"{server.url}/429/1/1") == 429
            paused.wait(who)
            for _ in range(3 if who else 0):
                assert send(f"{server.url}/ok") == 200

    crew.run(1 + PROCESSES, send_often)
    refused, *rest = server.seen()
    assert len(rest) == 3 * PROCESSES
    for number, seen in enumerate(rest):
        assert seen.arrived_ns >= refused.pause_until_ns + number // limit * period_ns


def test_only_the_key_of_the_response_pauses(server: RecordingServer, shared: Store) -> None:
    limiter = TokenBucket(shared, "partner", "1000/second", burst=1000)
    with httpx_client(limiter, key=lambda request: request.url.path, timeout=0, retries=0) as send:
        assert send(f"{server.url}/429/300/1") == 429
        assert send(f"{server.url}/ok") == 200
        with pytest.raises(outbound.WaitTimeout):
            send(f"{server.url}/429/300/1")


@EACH_CLIENT
def test_timeout_is_an_error_type_of_the_client(server: RecordingServer, shared: Store, client: Client) -> None:
    kinds: dict[Client, tuple[type[Exception], type[Exception]]] = {
        requests_client: (forebay.contrib.requests.WaitTimeout, requests.Timeout),
        aiohttp_client: (forebay.contrib.aiohttp_client.WaitTimeout, aiohttp.ClientError),
    }
    ours, theirs = kinds.get(client, (forebay.contrib.httpx.WaitTimeout, httpx.TimeoutException))
    assert issubclass(ours, outbound.WaitTimeout)
    bucket = TokenBucket(shared, "partner", "1/hour", burst=1)
    with client(bucket, timeout=0.01) as send:
        assert send(f"{server.url}/429/200/1") == 429
        with pytest.raises(ours, match=r"not sent: the end of the pause .* for \('http', '127.0.0.1', ") as paused:
            send(f"{server.url}/ok")
    assert isinstance(paused.value, theirs)
    with client(bucket, timeout=0.01, key="x", cost=lambda request: 1) as send:
        assert send(f"{server.url}/ok") == 200
        with pytest.raises(theirs, match="not sent: a permit of limiter 'partner' for 'x' would") as refused:
            send(f"{server.url}/ok")
    assert isinstance(refused.value, ours)
    if client is not aiohttp_client:
        assert refused.value.request.method == "GET"  # type: ignore[attr-defined]
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    assert len(server.seen()) == 2


def test_waiting_does_not_block_the_loop_and_a_cancelled_request_charges_nothing(
    crew: Crew, server: RecordingServer, shared: Store
) -> None:
    bucket = TokenBucket(shared, "partner", "1/hour", burst=1)

    async def cancel_while_it_waits() -> None:
        async with httpx.AsyncClient(transport=AsyncLimitedTransport(bucket, key="x")) as client:
            assert (await client.get(f"{server.url}/ok")).status_code == 200
            before = bucket.peek("x").reset_after
            task = asyncio.create_task(client.get(f"{server.url}/ok"))
            while bucket.peek("x").reset_after <= before:
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert bucket.peek("x").reset_after <= before

    # The crew ends a child process that hangs.
    crew.start(lambda: asyncio.run(cancel_while_it_waits())).result()
    assert len(server.seen()) == 1


def test_cancelled_request_in_flight_releases_its_permit(shared: Store) -> None:
    slots = Concurrency(shared, "slots", 1)

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    async def cancel() -> None:
        async with httpx.AsyncClient(transport=AsyncLimitedTransport(slots, transport=Silent(), key="x")) as client:
            task = asyncio.create_task(client.get("http://127.0.0.1:1"))
            while slots.peek("x"):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert slots.peek("x")

    asyncio.run(cancel())


def test_each_redirect_takes_a_permit(shared: Store) -> None:
    bucket = TokenBucket(shared, "partner", "1/hour", burst=10)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "/2"}) if request.url.path == "/1" else httpx.Response(200)

    with httpx.Client(transport=LimitedTransport(bucket, transport=httpx.MockTransport(answer))) as client:
        assert client.get("http://partner/1", follow_redirects=True).status_code == 200
    assert bucket.peek(("http", "partner", 80)).remaining == 8


def test_manual_clock_needs_no_sleep() -> None:
    clock = ManualClock()
    answers = [httpx.Response(503, headers={"Retry-After": "100"}), httpx.Response(200)]
    with Store.private(keys=10, clock=clock) as store:
        limited = LimitedTransport(
            TokenBucket(store, "partner", "1/minute"), transport=httpx.MockTransport(lambda _: answers.pop(0))
        )
        with httpx.Client(transport=limited) as client:
            assert client.get("https://partner").status_code == 200
        assert clock.now() >= 100


def test_inner_transport_is_closed(shared: Store) -> None:
    closed: list[str] = []

    class Within(httpx.BaseTransport):
        def close(self) -> None:
            closed.append("sync")

    class AsyncWithin(httpx.AsyncBaseTransport):
        async def aclose(self) -> None:
            closed.append("async")

    bucket = TokenBucket(shared, "partner", "1/hour")
    with httpx.Client(transport=LimitedTransport(bucket, transport=Within())):
        pass
    asyncio.run(AsyncLimitedTransport(bucket, transport=AsyncWithin()).aclose())
    assert closed == ["sync", "async"]


def test_adapter_refuses_pickle_and_copy(shared: Store) -> None:
    adapter = LimitedAdapter(TokenBucket(shared, "partner", "1/hour"))
    for function in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a LimitedAdapter can't be pickled or copied: make one with a limiter"):
            function(adapter)


@pytest.mark.parametrize("client", ["httpx", "requests", "aiohttp"])
def test_example_gets_fewer_refusals_with_a_limit(client: str, store_name: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "outbound"
    output = subprocess.run(
        [sys.executable, "send.py", client],
        cwd=example,
        env=os.environ | {"OUTBOUND_STORE": store_name},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    without, limited = re.findall(r"limit: *(\{.*\}) in .* refused (\d+)", output)
    assert "429" in without[0]
    assert int(without[1]) > int(limited[1])


@EACH_CLIENT
def test_request_without_credits_is_not_sent_even_without_a_timeout(
    server: RecordingServer, shared: Store, client: Client
) -> None:
    prepaid = Credits(shared, "paid")
    prepaid.add("partner", 1)
    with client(prepaid, key="partner") as send:
        assert send(f"{server.url}/ok") == 200
        with pytest.raises(outbound.WaitTimeout, match="a permit of limiter 'paid' for 'partner' comes in no time"):
            send(f"{server.url}/ok")
