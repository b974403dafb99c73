"""The ASGI middleware: how streams and WebSockets end, bodies over the limit, and the unchanged lifespan."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from web_requests import CLIENT, Wire, asgi_scope, call_asgi

from forebay import Concurrency, FixedWindow, Store
from forebay.testing import ManualClock
from forebay.web import DISCONNECTED, Answer, ASGIMiddleware, BodyLimit, Rule

START = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
REQUEST = {"type": "http.request", "body": b"", "more_body": False}
GONE = {"type": "http.disconnect"}
CONNECT, ACCEPT, CLOSE = {"type": "websocket.connect"}, {"type": "websocket.accept"}, {"type": "websocket.close"}
PATIENCE_S = 120.0  # A wait of this length fails the test. No test asserts another duration.
CLOSED = {"type": "websocket.disconnect", "code": 1001}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def socket_scope(**more: Any) -> dict[str, Any]:
    scope = asgi_scope("/socket") | {"type": "websocket", "extensions": {"websocket.http.response": {}}, **more}
    del scope["method"]
    return scope


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=100, clock=clock)


class Ending:
    """Rules that record a request's end: the statuses that `charge_on` received, and whether the permit is back."""

    def __init__(self, store: Store, lease: str = "30s") -> None:
        self.statuses: list[int] = []
        self.booked, self.held = FixedWindow(store, "booked", "100/hour"), Concurrency(store, "held", 2, lease)

        def charge_on(status: int) -> bool:
            self.statuses.append(status)
            return status < 400

        self.rules = [Rule(self.booked, charge_on=charge_on), Rule(self.held)]

    @property
    def is_held(self) -> bool:
        return self.held.peek(CLIENT, 0).remaining == 1

    def check(self, status: int) -> None:
        assert self.statuses[-1:] == [status]
        assert not self.is_held
        assert self.booked.peek(CLIENT, 0).remaining == 100 - (status < 400)


@pytest.fixture
def ending(store: Store) -> Ending:
    return Ending(store)


def run(app: Callable[..., Any], rules: Any, *messages: Any, scope: Any = None) -> Wire:
    wire = Wire(*messages)
    asyncio.run(ASGIMiddleware(app, rules)(scope or asgi_scope(), wire.receive, wire.send))
    return wire


def test_middleware_is_a_coroutine_function_for_servers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(part(b"all"))

    limited: Any = ASGIMiddleware(app, ())
    assert inspect.iscoroutinefunction(limited.__call__)
    assert list(inspect.signature(limited).parameters) == ["scope", "receive", "send"]
    assert list(inspect.signature(ASGIMiddleware).parameters)[:2] == ["app", "rules"]
    wire = Wire()
    asyncio.run(limited.__call__(asgi_scope(), wire.receive, wire.send))
    assert wire.answered().body == b"all"


class TestEnds:
    def test_permit_is_held_until_the_stream_ends(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            for _ in range(3):
                await send(part(b"part", more=True))
                assert ending.is_held
            await send(part(b""))

        assert run(app, ending.rules).answered().body == b"part" * 3
        ending.check(200)

    @pytest.mark.parametrize("parts", [0, 1, 2])
    def test_disconnect_ends_the_request(self, ending: Ending, parts: int) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            if parts:
                await send(START)
            for _ in range(parts):
                await send(part(b"part", more=True))
            assert (await receive())["type"] == "http.disconnect"

        run(app, ending.rules, REQUEST, GONE)
        ending.check(DISCONNECTED)

    def test_disconnect_after_the_response_changes_nothing(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b"all"))
            await receive()

        run(app, ending.rules, GONE)
        ending.check(200)

    def test_failed_send_is_a_disconnect(self, ending: Ending) -> None:
        class Gone(Wire):
            async def send(self, message: Any) -> None:
                await super().send(message)
                if message["type"] == "http.response.body":
                    raise OSError("gone")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b"part", more=True))

        wire = Gone()
        with pytest.raises(OSError, match="gone"):
            asyncio.run(ASGIMiddleware(app, ending.rules)(asgi_scope(), wire.receive, wire.send))
        ending.check(DISCONNECTED)

    @pytest.mark.parametrize("has_begun", [True, False])
    @pytest.mark.parametrize("error", [LookupError, OSError, ExceptionGroup("some", [LookupError()])])
    def test_error_of_the_handler_ends_the_request(self, ending: Ending, has_begun: bool, error: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if has_begun:
                await send(START)
                await send(part(b"part", more=True))
            raise error

        with pytest.raises(error if isinstance(error, type) else ExceptionGroup):
            run(app, ending.rules)
        ending.check(500)

    def test_error_after_the_response_changes_nothing(self, ending: Ending) -> None:
        """A background task raises after the client has the whole response."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b"all"))
            raise LookupError

        with pytest.raises(LookupError):
            run(app, ending.rules)
        ending.check(200)

    def test_application_without_a_response_ends_the_request(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None: ...

        run(app, ending.rules)
        ending.check(500)

    @pytest.mark.parametrize("has_begun", [True, False])
    def test_cancelled_task_ends_the_request(self, ending: Ending, has_begun: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if has_begun:
                await send(START)
            await asyncio.Event().wait()

        async def main() -> None:
            wire = Wire()
            task = asyncio.create_task(ASGIMiddleware(app, ending.rules)(asgi_scope(), wire.receive, wire.send))
            while not ending.is_held or (has_begun and not wire.sent):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        ending.check(DISCONNECTED)

    def test_finished_request_leaves_no_timer(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b""))

        async def main() -> list[Any]:
            wire = Wire()
            await ASGIMiddleware(app, ending.rules)(asgi_scope(), wire.receive, wire.send)
            loop: Any = asyncio.get_running_loop()
            return [timer for timer in loop._scheduled if not timer.cancelled()]

        assert asyncio.run(main()) == []

    def test_lease_is_renewed_while_the_handler_runs(
        self, store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The handler runs for ten leases, and its permit stays held."""
        ending = Ending(store, "30ms")
        delays: list[float] = []
        call_later = asyncio.BaseEventLoop.call_later

        def noted(loop: Any, delay: float, *arguments: Any, **options: Any) -> Any:
            delays.append(delay)
            return call_later(loop, delay, *arguments, **options)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            assert delays, "a renewal is due"
            for renewals in range(2, 12):
                async with asyncio.timeout(PATIENCE_S):
                    while len(delays) < renewals:
                        await asyncio.sleep(0)
                clock.advance(0.029)
                assert ending.is_held
            await send(part(b""))

        monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", noted)
        run(app, ending.rules)
        assert set(delays) == {0.01}
        ending.check(200)


class TestFields:
    @pytest.mark.parametrize("charge_on", [None, {200}])
    def test_header_fields_come_once_after_the_applications(self, store: Store, charge_on: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b"all"))

        for _ in range(2):
            wire = run(app, [Rule(FixedWindow(store, "x", "9/hour"), charge_on=charge_on)])
            assert [name for name, _ in wire.answered().fields] == ["x-own", "ratelimit-policy", "ratelimit"]
        assert START["headers"] == [(b"x-own", b"1")], "the application's message is its own"

    def test_response_without_headers_gets_header_fields(self, store: Store) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204})
            await send({"type": "http.response.body"})

        assert "ratelimit" in run(app, [Rule(FixedWindow(store, "x", "9/hour"))]).answered()

    def test_other_messages_are_unchanged(self, store: Store) -> None:
        messages = [
            {"type": "http.response.early_hint", "links": [b"</a.css>"]},
            START,
            part(b"a", more=True),
            {"type": "http.response.pathsend", "path": "/dev/null"},
            {"type": "http.response.trailers", "headers": []},
        ]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for message in messages:
                await send(message)

        wire = run(app, [Rule(FixedWindow(store, "x", "9/hour"), charge_on={200})])
        assert [wire.sent[i] for i in (0, 2, 3, 4)] == [messages[i] for i in (0, 2, 3, 4)]

    @pytest.mark.parametrize("kind", ["lifespan", "something.else"])
    def test_other_scopes_pass_unchanged(self, store: Store, kind: str) -> None:
        seen: list[Any] = []

        async def app(*arguments: Any) -> None:
            seen.extend(arguments)

        wire = Wire()
        scope, receive, send = {"type": kind}, wire.receive, wire.send
        asyncio.run(
            ASGIMiddleware(app, [BodyLimit(1), Rule(FixedWindow(store, "x", "1/hour"), cost=2)])(scope, receive, send)
        )
        assert seen == [scope, receive, send]

    def test_denial_has_lower_case_header_names_in_bytes(self, store: Store) -> None:
        """ASGI servers require bytes, and names in lower case."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        wire = run(app, [Rule(FixedWindow(store, "x", "1/hour"), cost=2)])
        assert all(type(n) is bytes and n == n.lower() and type(v) is bytes for n, v in wire.sent[0]["headers"])


class TestWebSockets:
    async def accepts(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send(ACCEPT)
        while (await receive())["type"] != "websocket.disconnect":
            pass

    def test_accepted_websocket_gets_header_fields(self, store: Store, ending: Ending) -> None:
        wire = run(
            self.accepts,
            ending.rules,
            CONNECT,
            {"type": "websocket.receive", "text": "x"},
            CLOSED,
            scope=socket_scope(),
        )
        assert wire.sent[0]["type"] == "websocket.accept"
        assert [name for name, _ in wire.sent[0]["headers"]] == [b"ratelimit-policy", b"ratelimit"]
        ending.check(101)
        assert "headers" not in ACCEPT

    def test_permit_is_held_until_the_websocket_is_closed(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(ACCEPT)
            assert ending.is_held
            await receive()
            assert ending.is_held
            await send(CLOSE)

        run(app, ending.rules, CONNECT, {"type": "websocket.receive", "text": "x"}, scope=socket_scope())
        ending.check(101)

    def test_websocket_closed_by_the_application_is_403(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(CLOSE)

        run(app, ending.rules, CONNECT, scope=socket_scope())
        ending.check(403)

    def test_websocket_refused_with_a_response_has_its_status(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"who?"})

        run(app, ending.rules, CONNECT, scope=socket_scope())
        ending.check(401)

    def test_disconnect_before_acceptance_is_499(self, ending: Ending) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await receive()

        run(app, ending.rules, CONNECT, CLOSED, scope=socket_scope())
        ending.check(DISCONNECTED)

    def test_denied_websocket_gets_a_response(self, store: Store) -> None:
        wire = run(self.accepts, [Rule(FixedWindow(store, "x", "1/hour"), cost=2)], CONNECT, scope=socket_scope())
        assert [message["type"] for message in wire.sent] == [
            "websocket.http.response.start",
            "websocket.http.response.body",
        ]
        assert wire.received == 1
        answer = wire.answered()
        assert (answer.status, answer.json["status"]) == (429, 429)

    @pytest.mark.parametrize("extensions", [None, {}, {"tls": {}}, "absent"])
    def test_denied_websocket_is_closed_if_the_server_cannot_send_a_response(
        self, store: Store, extensions: Any
    ) -> None:
        scope = socket_scope(extensions=extensions)
        if extensions == "absent":
            del scope["extensions"]
        wire = run(self.accepts, [Rule(FixedWindow(store, "x", "1/hour"), cost=2)], CONNECT, scope=scope)
        assert [(message["type"], message["code"]) for message in wire.sent] == [("websocket.close", 1013)]

    def test_rule_can_match_websockets_only(self, store: Store) -> None:
        rules = [Rule(FixedWindow(store, "x", "1/hour"), cost=2, methods="WEBSOCKET")]
        assert run(self.accepts, rules, CONNECT, scope=socket_scope()).answered().status == 429

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b""))

        assert run(app, rules).answered().status == 200

    def test_body_limits_do_not_apply_to_websockets(self) -> None:
        messages = [CONNECT, {"type": "websocket.receive", "bytes": b"x" * 100}, CLOSED]
        wire = run(self.accepts, [BodyLimit(1)], *messages, scope=socket_scope())
        assert wire.received == 3

    def test_denied_websocket_gets_the_answer_of_its_rule(self, store: Store) -> None:
        rules = [Rule(FixedWindow(store, "x", "1/hour"), cost=2, answer=Answer(418, (), b"tea"))]
        assert run(self.accepts, rules, CONNECT, scope=socket_scope()).answered().body == b"tea"


LIMIT = 100


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


class TestBodies:
    @pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
    def test_body_within_the_limit_is_read(self, size: int) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(await read(receive)))

        answer = call_asgi(ASGIMiddleware(app, [BodyLimit(LIMIT)]), "/", "POST", body=b"x" * size, chunked=True)
        assert (answer.status, answer.body) == (200, b"x" * size)

    @pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT])
    @pytest.mark.parametrize("shape", ["plain", "swallows", "wraps", "grouped", "reads again", "answers and raises"])
    def test_body_over_the_limit_is_413(self, store: Store, size: int, shape: str) -> None:
        statuses: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await read(receive)
            except OSError as error:
                if shape == "wraps":
                    raise LookupError from error
                if shape == "grouped":
                    raise ExceptionGroup("some", [error]) from None
                if shape == "reads again":
                    await read(receive)
                if shape == "plain":
                    raise
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send(part(b"what?"))
            if shape == "answers and raises":
                raise LookupError

        def charge_on(status: int) -> bool:
            statuses.append(status)
            return True

        rules = [BodyLimit(LIMIT), Rule(FixedWindow(store, "x", "9/hour"), charge_on=charge_on)]
        answer = call_asgi(ASGIMiddleware(app, rules), "/", "POST", body=b"x" * size, chunked=True)
        assert (answer.status, answer.json["status"]) == (413, 413)
        assert statuses[-1:] == [413]

    def test_response_that_has_started_continues(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            try:
                await read(receive)
            except OSError:
                await send(part(b"too much"))

        answer = call_asgi(ASGIMiddleware(app, [BodyLimit(LIMIT)]), "/", "POST", body=b"x" * 200, chunked=True)
        assert (answer.status, answer.body) == (200, b"too much")

    def test_error_of_another_type_is_raised(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await read(receive)
            raise LookupError

        with pytest.raises(LookupError):
            call_asgi(ASGIMiddleware(app, [BodyLimit(LIMIT)]), "/", "POST", body=b"x", chunked=True)

    @pytest.mark.parametrize(("version", "has_connection"), [("1.1", True), ("2", False), ("3", False)])
    def test_declared_length_over_the_limit_is_413(self, version: str, has_connection: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        limited = ASGIMiddleware(app, [BodyLimit(LIMIT)])
        answer = call_asgi(limited, "/", "POST", body=b"x" * 200, http_version=version)
        assert answer.status == 413
        if not has_connection:
            assert "connection" not in answer, "what HTTP/2 forbids"


@pytest.mark.parametrize("last", [{"type": "http.response.body", "body": b"b"}, {"type": "http.response.pathsend"}])
def test_permit_is_released_before_the_last_part(store: Store, last: dict[str, Any]) -> None:
    """A client that has the whole response can send its next request at once."""
    held, wrong = Concurrency(store, "slots", 1), FixedWindow(store, "wrong", "1/hour")
    seen: list[tuple[int, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send(last)

    async def send(message: Any) -> None:
        seen.append((held.peek("all", 0).remaining, wrong.peek("all", 0).remaining))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    rules = [Rule(held, key=lambda request: "all"), Rule(wrong, key=lambda request: "all", charge_on={401})]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 1)}
    asyncio.run(ASGIMiddleware(app, rules)(scope, receive, send))
    # A charge that no end would keep is refunded when the response starts.
    assert seen == [(0, 1), (0, 1), (1, 1)]


def test_messages_of_the_application_are_not_mutated(store: Store) -> None:
    kept = {"type": "http.response.start", "status": 200, "headers": ((b"x", b"y"),)}
    begun: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(kept)
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        begun.extend([message] if message["type"] == "http.response.start" else [])

    limited = ASGIMiddleware(app, [Rule(FixedWindow(store, "x", "5/hour"))])
    for _ in range(2):
        asyncio.run(limited(asgi_scope(), Wire().receive, send))
    assert kept["headers"] == ((b"x", b"y"),)
    assert [[name for name, _ in message["headers"]] for message in begun] == [
        [b"x", b"ratelimit-policy", b"ratelimit"]
    ] * 2
