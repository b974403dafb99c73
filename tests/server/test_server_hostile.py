"""Clients that are slow, huge or broken: what they occupy is bounded, and others are answered."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from decision_server import MILD, DecisionServer
from http2_frames import (
    BLOCK,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    connected,
    frame,
    until_closed,
)

Serve = Callable[..., DecisionServer]


@pytest.mark.parametrize(
    "begun", [b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: a\r\n", b"PRI * HT", PREFACE], ids=range(5)
)
def test_a_connection_without_a_whole_request_is_closed(patient: DecisionServer, begun: bytes) -> None:
    with connected(patient) as client:
        client.sendall(begun)
        until_closed(client)
    assert patient.get("/healthz")[0] == 200


def test_a_head_that_comes_slowly_is_cut_off(patient: DecisionServer) -> None:
    with connected(patient) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n")
        client.settimeout(0.05)
        is_open = True
        while is_open:
            try:
                client.sendall(b"X-A: b\r\n")
                is_open = client.recv(1) != b""
            except TimeoutError:
                pass
            except ConnectionError:
                is_open = False
    assert patient.get("/healthz")[0] == 200


def test_a_body_that_comes_slowly_is_cut_off(patient: DecisionServer) -> None:
    with connected(patient) as client:
        client.sendall(b"POST /v1/decide HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert b" 200 " not in until_closed(client)
    assert patient.get("/healthz")[0] == 200


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_a_large_head_is_refused(patient: DecisionServer, size: int) -> None:
    with connected(patient) as client:
        try:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * size + b"\r\n\r\n")
        except ConnectionError:
            pass
        else:
            assert b" 200 " not in until_closed(client)
    assert patient.get("/healthz")[0] == 200


def test_many_fields_are_refused(patient: DecisionServer) -> None:
    fields = b"".join(b"X-%d: a\r\n" % number for number in range(1000))
    with connected(patient) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n")
        assert until_closed(client).startswith(b"HTTP/1.1 431 ")
    assert patient.get("/healthz")[0] == 200


def test_a_large_body_is_refused(patient: DecisionServer) -> None:
    status, _, body = patient.get("/v1/decide", method="POST", body=b" " * 70_000)
    assert (status, b"at most 65536 bytes" in body) == (413, True)


@pytest.mark.parametrize(
    "junk",
    [b"\x00" * 100, b"\r\n" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"],
    ids=range(5),
)
def test_junk_is_refused(patient: DecisionServer, junk: bytes) -> None:
    with connected(patient) as client:
        client.sendall(junk)
        assert b" 200 " not in until_closed(client)
    assert patient.get("/healthz")[0] == 200


def test_connections_beyond_the_most_wait_for_a_place(serve: Serve) -> None:
    server = serve(MILD, "--connections", "2", "--idle", "60")
    question = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    with connected(server) as first, connected(server) as second, connected(server) as third:
        for client in (first, second):
            client.sendall(question)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        third.sendall(question)
        third.settimeout(0.2)
        with pytest.raises(TimeoutError):
            third.recv(100)
        first.close()
        third.settimeout(120)
        assert third.recv(100).startswith(b"HTTP/1.1 200")


def test_an_idle_listener_takes_no_place_from_another_one(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = serve(MILD, "--connections", "1", listen=("127.0.0.1:0", f"unix:{path}"))
    question = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(120)
            client.connect(str(path))
            client.sendall(question)
            assert until_closed(client).startswith(b"HTTP/1.1 200")
        assert server.get("/healthz")[0] == 200


def test_clients_that_go_at_once_delay_no_other(serve: Serve) -> None:
    server = serve(MILD, "--connections", "10")
    for _ in range(500):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert server.get("/healthz")[0] == 200


def test_a_response_that_nobody_reads_ends_its_connection(patient: DecisionServer) -> None:
    with connected(patient) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.2)
        try:
            while True:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        except (TimeoutError, ConnectionError):
            pass
        client.settimeout(120)
        until_closed(client)
    assert patient.get("/healthz")[0] == 200


@pytest.mark.parametrize(
    "request_line",
    [
        # A body behind the question, which a proxy in front may take for the next request.
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nhello",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\nhello",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET /auth/traefik HTTP/1.1\r\nHost: a\r\nX-Forwarded-Uri: /\x00\r\n\r\n",
    ],
    ids=range(7),
)
def test_a_request_that_can_be_read_in_two_ways_is_no_permission(patient: DecisionServer, request_line: bytes) -> None:
    behind = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with connected(patient) as client:
        client.sendall(request_line + behind)
        received = until_closed(client)
    assert not received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1") <= 2
    assert patient.get("/healthz")[0] == 200


JUNK = [
    b"", b"null", b"[]", b"{", b'{"uri": 7}', b'{"uri": "/", "uri": "/"}', b'{"uri": "\xff"}', b'{"uri": "\\ud800"}',
    b'{"uri": "/", "client": "192.0.2.1\\u0000"}', b'{"uri": "/", "headers": []}', b"[" * 60_000, b'{"uri":' * 8000,
    b'["/", "GET", "192.0.2.1"]', b'{"uri": "", "client": "192.0.2.1"}',
    b'{"uri": "/", "client": "192.0.2.1", "method": ""}',
    b'{"uri": "/", "client": "192.0.2.1", "method": "G T"}',
    b'{"uri": "/", "client": "192.0.2.1", "headers": {"a": "b", "a": "b"}}',
    b'{"uri": "/", "client": "192.0.2.1", "headers": {"a": "b", "A": "c"}}',
    b'{"uri": "/", "client": "192.0.2.1"} {}', b'{"uri": "/", "client": ["192.0.2.1"]}', b"\xef\xbb\xbf{}",
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_in_json_is_refused(patient: DecisionServer, junk: bytes) -> None:
    status, _, body = patient.get("/v1/decide", method="POST", body=junk)
    assert status == 422
    assert json.loads(body)["error"]


def test_streams_that_are_reset_at_once_end_their_connection(patient: DecisionServer) -> None:
    with connected(patient) as client:
        client.sendall(PREFACE + frame(SETTINGS, 0, 0))
        try:
            for number in range(20_000):
                stream = 2 * number + 1
                client.sendall(
                    frame(HEADERS, END_HEADERS | END_STREAM, stream, BLOCK)
                    + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
                )
            until_closed(client)
        except ConnectionError:
            pass
    assert patient.get("/healthz")[0] == 200


def test_a_head_without_an_end_ends_its_connection(patient: DecisionServer) -> None:
    field = bytes([0x00, 0x03]) + b"x-a" + bytes([0x7F, 0x80, 0x07]) + b"a" * 1023
    with connected(patient) as client:
        client.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_STREAM, 1, BLOCK))
        try:
            while True:
                client.sendall(frame(CONTINUATION, 0, 1, field))
        except ConnectionError:
            pass
    assert patient.get("/healthz")[0] == 200
