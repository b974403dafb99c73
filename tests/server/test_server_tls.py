"""TLS with certificates made for the test."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import trustme
from decision_server import HEAD, MILD, DecisionServer
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from grpc_client import OK, descriptor

Serve = Callable[..., DecisionServer]


class Files:
    """A certificate for 127.0.0.1 and its key, in files."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "certificate.pem", directory / "key.pem"
        self.options = ("--tls-certificate", str(self.certificate), "--tls-key", str(self.key))
        self.write()

    def write(self) -> None:
        """A new one, of another authority."""
        self.authority = trustme.CA()
        made = self.authority.issue_cert("127.0.0.1")
        self.certificate.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
        self.key.write_bytes(made.private_key_pem.bytes())

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ask(server: DecisionServer, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


def test_https_is_served_by_the_versions_that_are_safe(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = files.context()
        context.minimum_version = context.maximum_version = version
        assert ask(server, context) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server, ssl.create_default_context())


@pytest.mark.parametrize("offered", ["h2", "http/1.1"])
def test_the_protocol_is_negotiated(serve: Serve, files: Files, offered: str) -> None:
    server, context = serve(MILD, *files.options), files.context()
    context.set_alpn_protocols([offered])
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        assert client.selected_alpn_protocol() == offered


def test_grpc_is_served(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    credentials = grpc.ssl_channel_credentials(files.authority.cert_pem.bytes())
    request = RateLimitRequest(domain="limits", descriptors=[descriptor([("remote_address", "192.0.2.7")])])
    with grpc.secure_channel(f"127.0.0.1:{server.port}", credentials) as channel:
        call = channel.unary_unary(
            "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
            RateLimitRequest.SerializeToString,
            RateLimitResponse.FromString,
        )
        assert call(request, timeout=60).overall_code == OK


def test_a_unix_socket_has_no_tls(serve: Serve, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "s"
    serve(MILD, *files.options, listen=("127.0.0.1:0", f"unix:{path}"))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_without_tls_or_a_whole_handshake_is_closed(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options, "--idle", "1", "--connections", "2")
    for begun in (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b""):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(begun)
            received = b""
            while data := client.recv(1000):
                received += data
            assert b"200" not in received
    # Their places are free.
    assert ask(server, files.context()) == 200


HTTP = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
HELLO = b"\x01\x00\xff\x00" + b"a" * 60_000
"""The beginning of a message of 65,280 bytes."""
PARTS = [HELLO[at : at + 16_000] for at in range(0, 60_000, 16_000)]
RECORDS = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in PARTS)


def send(server: DecisionServer, data: bytes) -> bytes:
    """What the server sends back until it closes the connection."""
    received = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
    ):
        client.sendall(data)
        while part := client.recv(1000):
            received += part
    return received


def reports(server: DecisionServer) -> list[str]:
    """What the server has reported by its end."""
    assert server.stop() == 0
    assert server.process.stderr is not None
    return server.process.stderr.read().splitlines()


def test_a_client_that_speaks_no_tls_is_reported_once(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    for _ in range(3):
        # An alert.
        assert send(server, HTTP).startswith(b"\x15\x03")
    # One that only looks for the port is none.
    socket.create_connection(("127.0.0.1", server.port), timeout=60).close()
    assert reports(server) == ["forebay: 127.0.0.1 has sent something else than TLS: let it ask by https, or by TLS"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_refuses_the_certificate_is_reported(serve: Serve, files: Files, version: ssl.TLSVersion) -> None:
    server, strict = serve(MILD, *files.options), ssl.create_default_context()
    strict.minimum_version = strict.maximum_version = version
    for _ in range(2):
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, strict)
    assert ask(server, files.context()) == 200
    [line] = reports(server)
    assert "127.0.0.1 has refused the TLS handshake: UnknownCA" in line


def test_a_handshake_that_comes_slowly_is_reported(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options, "--idle", "0.2")
    assert send(server, RECORDS[:100]) == b""
    [line] = reports(server)
    assert "the TLS handshake of 127.0.0.1 took longer than 0.2 s" in line


def test_a_message_that_is_too_large_is_refused(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    send(server, b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + b"a" * 0x3FFC)
    send(server, b"\x16\x03\x01\xff\xff" + b"a" * 100_000)
    assert ask(server, files.context()) == 200
    assert any("the TLS handshake of 127.0.0.1 has failed" in line for line in reports(server))


def test_a_handshake_that_has_begun_delays_no_end(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options, "--idle", "3600", "--drain", "3600")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(RECORDS)
        assert ask(server, files.context()) == 200
        # Else it would be reported as slow.
        assert reports(server) == []


def test_handshakes_that_have_begun_take_a_bounded_memory(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    assert ask(server, files.context()) == 200
    before = memory_of(server)
    with contextlib.ExitStack() as clients:
        for _ in range(200):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall(RECORDS)
        assert ask(server, files.context()) == 200
        assert memory_of(server) - before < 200 * (200 << 10)


def memory_of(server: DecisionServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_sighup_reads_another_certificate(serve: Serve, files: Files) -> None:
    server, earlier = serve(MILD, *files.options), files.context()
    kept = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=earlier)
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    files.write()
    server.process.send_signal(signal.SIGHUP)
    is_new = False
    while not is_new:
        with contextlib.suppress(ssl.SSLCertVerificationError):
            is_new = ask(server, files.context()) == 200
    # A connection that has begun goes on.
    kept.request("GET", "/healthz")
    assert kept.getresponse().status == 200
    kept.close()


def test_an_unreadable_certificate_leaves_the_earlier_one(serve: Serve, files: Files) -> None:
    server = serve(MILD, *files.options)
    assert ask(server, files.context()) == 200
    files.certificate.write_text("nothing")
    server.process.send_signal(signal.SIGHUP)
    assert server.process.stderr is not None
    assert "earlier certificate is used further" in server.process.stderr.readline()
    assert ask(server, files.context()) == 200


def test_files_that_are_no_certificate_and_key_are_refused(store_name: str, tmp_path: Path, files: Files) -> None:
    rules = tmp_path / "limits.toml"
    rules.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{MILD}')
    directory = tmp_path / "other"
    directory.mkdir()
    other = Files(directory)
    missing, empty, locked = str(tmp_path / "none"), tmp_path / "empty", tmp_path / "locked"
    empty.touch()
    joined = tmp_path / "joined"
    joined.write_text(files.key.read_text().replace("\n", " "))
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for options, reason in (
        (("--tls-certificate", str(files.certificate)), "give --tls-certificate and --tls-key"),
        (("--tls-certificate", missing, "--tls-key", str(files.key)), "none can't be read: No such file"),
        (("--tls-certificate", str(empty), "--tls-key", str(files.key)), "empty has no certificate"),
        (("--tls-certificate", str(files.certificate), "--tls-key", missing), "none can't be read: No such file"),
        (("--tls-certificate", str(files.certificate), "--tls-key", str(empty)), "empty has no private key in PEM"),
        (("--tls-certificate", str(files.certificate), "--tls-key", str(joined)), "joined has no private key in PEM"),
        (("--tls-certificate", str(joined), "--tls-key", str(files.key)), "joined has no certificate in PEM"),
        (("--tls-certificate", str(files.certificate), "--tls-key", str(locked)), "locked has a private key with a p"),
        (
            ("--tls-certificate", str(files.certificate), "--tls-key", str(other.key)),
            "has no certificate of the key in",
        ),
    ):
        command = [sys.executable, "-m", "forebay", "serve", str(rules), "--listen", "127.0.0.1:0", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, reason in " ".join(done.stderr.split())) == (2, True), done.stderr
        # No part of a key.
        assert len(done.stderr) < 600
