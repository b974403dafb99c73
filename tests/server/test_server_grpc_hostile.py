"""Hostile clients of HTTP/2 and gRPC: the server's memory is bounded, nothing is stuck, and others are answered."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
from decision_server import DecisionServer
from grpc_client import Client
from http2_frames import (
    BLOCK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_block,
    connected,
    frame,
    frames_in,
    setting,
    until_closed,
)  # fmt: skip

Serve = Callable[..., DecisionServer]

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "1000000/hour"
[[rules]]
name = "api"
limits = ["api"]
key = "header:user | address"
"""
CALL = call_block(b"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
BEGIN = PREFACE + frame(SETTINGS, 0, 0)
# Far less than what each attack sends, and more than what an allocator keeps.
MOST_GROWTH = 96 << 20


class Attacked:
    """A server, and a client of it that must be answered all the time."""

    def __init__(self, server: DecisionServer, client: Client) -> None:
        self.server, self._client = server, client
        self._process = psutil.Process(server.process.pid)
        self.check()
        self._before = self._size()

    def _size(self) -> int:
        return int(self._process.memory_info().rss)

    def check(self) -> None:
        assert self._client.codes(1, [("user", "a")]) == ["OK"]

    def end(self) -> None:
        """The memory during the attack is bounded, and others are answered."""
        self.check()
        assert self._size() - self._before < MOST_GROWTH


@pytest.fixture
def attacked(serve: Serve) -> Iterator[Attacked]:
    server = serve(RULES, "--idle", "2")
    with Client(server) as client:
        yield Attacked(server, client)


def send(client: socket.socket, data: bytes) -> bool:
    """Whether the connection is still open."""
    try:
        client.sendall(data)
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize("block", [BLOCK, CALL])
def test_calls_that_are_reset_at_once_end_their_connections(attacked: Attacked, block: bytes) -> None:
    for _ in range(20):
        with connected(attacked.server) as client:
            is_open = send(client, BEGIN)
            for first in range(1, 20_000, 200):
                streams = range(first, first + 200, 2)
                data = b"".join(
                    frame(HEADERS, END_HEADERS, one, block) + frame(RST_STREAM, 0, one, b"\0\0\0\x08")
                    for one in streams
                )
                is_open = is_open and send(client, data)
            until_closed(client)
        attacked.check()
    attacked.end()


def test_heads_without_an_end_end_their_connections(attacked: Attacked) -> None:
    field = bytes([0x00, 0x03]) + b"x-a" + bytes([0x7F, 0x80, 0x07]) + b"a" * 1023
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(attacked.server)) for _ in range(100)]
        for client in clients:
            send(client, BEGIN + frame(HEADERS, END_STREAM, 1, CALL))
            for _ in range(60):
                send(client, frame(CONTINUATION, 0, 1, field))
        attacked.end()
        for client in clients:
            while send(client, frame(CONTINUATION, 0, 1, field)):
                pass
    # Without any field in them.
    with connected(attacked.server) as client:
        send(client, BEGIN + frame(HEADERS, END_STREAM, 1, CALL))
        while send(client, frame(CONTINUATION, 0, 1)):
            pass
    attacked.end()


def test_large_fields_in_a_small_head_are_refused(attacked: Attacked) -> None:
    # One entry of the table of fields, and then many references to it.
    entry = bytes([0x40, 0x03]) + b"x-a" + bytes([0x7F, 0x81, 0x1E]) + b"a" * 3968
    with connected(attacked.server) as client:
        block = BLOCK + entry + bytes([0xBE]) * 10_000
        send(client, BEGIN + frame(HEADERS, END_STREAM | END_HEADERS, 1, block))
        send(client, frame(PING, 0, 0, b"12345678"))
        send(client, frame(GOAWAY, 0, 0, bytes(8)))
        answers = [payload for kind, _, _, payload in frames_in(until_closed(client)) if kind == HEADERS]
        # 0x88 is the status 200.
        assert not any(payload.startswith(b"\x88") for payload in answers)
    attacked.end()


def test_a_huge_frame_ends_its_connection(attacked: Attacked) -> None:
    for size in (16_385, 1 << 20, (1 << 24) - 1):
        with connected(attacked.server) as client:
            head = struct.pack(">I", size)[1:] + bytes([HEADERS, END_HEADERS]) + struct.pack(">I", 1)
            is_open = send(client, BEGIN + head)
            for _ in range(0, size, 65536):
                is_open = is_open and send(client, bytes(65536))
            until_closed(client)
        attacked.end()


def test_streams_beyond_the_most_are_refused_and_the_others_answered(attacked: Attacked) -> None:
    with connected(attacked.server) as client:
        send(client, BEGIN + b"".join(frame(HEADERS, END_HEADERS, one, CALL) for one in range(1, 401, 2)))
        # Those that are open end with an empty message.
        for one in range(1, 257, 2):
            send(client, frame(DATA, END_STREAM, one, bytes(5)))
        ended: set[int] = set()
        refused: set[int] = set()
        received = b""
        while len(ended) + len(refused) < 200:
            data = client.recv(65536)
            assert data
            received += data
            found = list(frames_in(received))
            ended = {stream for kind, flags, stream, _ in found if kind == HEADERS and flags & END_STREAM}
            refused = {stream for kind, _, stream, _ in found if kind == RST_STREAM}
        assert (len(ended), len(refused)) == (128, 72)
    attacked.end()


def test_messages_that_never_come_occupy_little(attacked: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(connected(attacked.server))
            send(client, BEGIN)
            for stream in range(1, 257, 2):
                announced = frame(DATA, 0, stream, b"\0" + struct.pack(">I", 500_000))
                send(client, frame(HEADERS, END_HEADERS, stream, CALL) + announced)
        attacked.end()


def test_a_client_that_takes_no_responses_is_closed(attacked: Attacked) -> None:
    message = frame(DATA, END_STREAM, 1, bytes(5))
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(attacked.server)) for _ in range(20)]
        for client in clients:
            send(client, PREFACE + setting(INITIAL_WINDOW_SIZE, 0))
            for stream in range(1, 2001, 2):
                call = frame(HEADERS, END_HEADERS, stream, call_block(b"/grpc.health.v1.Health/Check"))
                send(client, call + message[:5] + struct.pack(">I", stream) + message[9:])
        attacked.end()
        for client in clients:
            until_closed(client)
    attacked.end()


FLOODS = [
    frame(PING, 0, 0, b"12345678"),
    frame(SETTINGS, 0, 0),
    setting(INITIAL_WINDOW_SIZE, 1),
    frame(DATA, 0, 1),
    frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
    frame(HEADERS, END_HEADERS, 0, BLOCK),
]


def test_a_flood_of_small_frames_leaves_others_their_answers(attacked: Attacked) -> None:
    for flood in FLOODS:
        with connected(attacked.server) as client:
            client.settimeout(1)
            is_open = send(client, BEGIN + frame(HEADERS, END_HEADERS, 1, CALL))
            try:
                # It never reads what the server replies.
                for _ in range(100):
                    is_open = is_open and send(client, flood * 2000)
            except TimeoutError:
                pass
            attacked.end()


def test_half_open_connections_are_closed(attacked: Attacked) -> None:
    begun = [
        PREFACE[:10],
        PREFACE,
        BEGIN,
        BEGIN + frame(HEADERS, END_HEADERS, 1, CALL),
        BEGIN + frame(HEADERS, END_HEADERS, 1, CALL) + frame(DATA, 0, 1, b"\0\0\0"),
        BEGIN + frame(HEADERS, END_STREAM, 1, CALL[:10]),
    ]
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(attacked.server)) for _ in begun * 20]
        for client, data in zip(clients, begun * 20, strict=True):
            send(client, data)
            client.shutdown(socket.SHUT_WR)
        attacked.end()
        for client in clients:
            until_closed(client)


def test_a_watch_by_each_connection_leaves_places_to_others(serve: Serve) -> None:
    server = serve(RULES, "--connections", "8", "--idle", "1")
    watch = frame(HEADERS, END_HEADERS, 1, call_block(b"/grpc.health.v1.Health/Watch")) + frame(
        DATA, END_STREAM, 1, bytes(5)
    )
    with ExitStack() as stack:
        for _ in range(7):
            client = stack.enter_context(connected(server))
            client.sendall(BEGIN + watch)
        assert server.get("/healthz")[0] == 200
    # Their places are free once they are gone.
    with ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(connected(server))
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
