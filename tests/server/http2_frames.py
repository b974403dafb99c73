"""Frames of HTTP/2, for clients that no library would be."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from decision_server import DecisionServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
# HPACK: GET, http, and a path and an authority of the static table.
BLOCK = bytes([0x82, 0x86, 0x84, 0x41, 0x01, 0x61])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def setting(number: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", number, value))


def connected(server: DecisionServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=120)


def until_closed(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection; a test would time out if it never did."""
    received = b""
    while True:
        try:
            data = client.recv(65536)
        except ConnectionError:
            return received
        if not data:
            return received
        received += data


def frames_in(received: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The kind, the flags, the stream and the payload of each whole frame."""
    at = 0
    while len(received) >= at + 9:
        size = int.from_bytes(received[at : at + 3], "big")
        kind, flags = received[at + 3 : at + 5]
        yield kind, flags, int.from_bytes(received[at + 5 : at + 9], "big"), received[at + 9 : at + 9 + size]
        at += 9 + size


def text(value: bytes) -> bytes:
    """A string of HPACK, of less than 127 bytes."""
    return bytes([len(value)]) + value


def call_block(path: bytes) -> bytes:
    """The fields of a call by gRPC: HPACK without its tables."""
    content = b"\x00" + text(b"content-type") + text(b"application/grpc")
    return (
        bytes([0x83, 0x86, 0x41])
        + text(b"a")
        + b"\x04"
        + text(path)
        + content
        + b"\x00"
        + text(b"te")
        + text(b"trailers")
    )
