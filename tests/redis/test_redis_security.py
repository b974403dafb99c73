"""TLS, and users that may do only what limiters need."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from blocking import blocking_store
from redis_cluster import RedisCluster
from redis_server import PATIENCE_S, RedisServer, redis_server
from test_redis_store import EVERY_KIND

from forebay import AllOf, StoreUnavailable, TokenBucket
from forebay.redis import RedisStore
from forebay.redis.transport.deadline import Patience

# The rules that docs/redis.md lists.
PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
RULES = re.findall(r"[+~][a-z|*:]+", PAGE.partition("The user needs these rules:")[2].partition("\n\nRedis ")[0])
FOR_CLUSTERS = ["+cluster|slots", "+asking", "+command"]


def use_everything(store: Any) -> None:
    """Run every script in every way."""
    for name, make in EVERY_KIND.items():
        limiter = make(store, name)
        assert limiter.allow("ada")
        limiter.refund("ada")
        for _ in range(limiter.limit):
            assert limiter.hit("ada")
        assert not limiter.hit("ada")
        assert not limiter.reserve("ada", limiter.limit, 0)
        limiter.refund("ada", min(limiter.limit, 2))
        assert limiter.allow("ada")
        if name != "concurrency":
            assert limiter.hit("bob", request_id="r")
            limiter.refund("bob", request_id="r")
        else:
            lease = limiter.acquire("bob")
            assert lease.renew()
            assert lease.release()
        booked = limiter.reserve("cid", limiter.limit)
        assert booked.allowed
        booked.cancel()
        assert limiter.allow_many(["cid", "dan"]) == [True, True]
        assert limiter.wait("eve", timeout=1)
        for key in ("ada", "bob", "cid", "dan", "eve"):
            limiter.reset(key)
            assert limiter.peek(key).remaining == limiter.limit
    both = AllOf(*(make(store, f"all {name}") for name, make in EVERY_KIND.items()))
    assert both.allow("ada")
    both.reset("ada")


# Users


@pytest.fixture
def user(server: RedisServer) -> Iterator[str]:
    """A URL with a user that has just the permissions that the docs list."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">secret", *RULES)
        yield server.url.replace("//", "//shop:secret@")
        client.execute_command("ACL", "DELUSER", "shop")


def test_a_user_with_the_listed_permissions_can_use_everything(user: str, is_async: bool) -> None:
    assert len(RULES) > 20
    for protocol in ("", "?protocol=2", "?protocol=3"):
        with blocking_store(user + protocol, is_async, timeout=PATIENCE_S) as store:
            use_everything(store)


def test_a_user_without_permissions_gets_an_error_with_a_remedy(
    user: str, server: RedisServer, client: redis.Redis, is_async: bool
) -> None:
    def denied(store: Any) -> None:
        for limiter in (TokenBucket(store, "api", "5/minute"), AllOf(TokenBucket(store, "api", "5/minute"))):
            for ask in (limiter.allow, limiter.hit, limiter.peek, limiter.reset):
                with pytest.raises(StoreUnavailable, match=r"(?i)permission|password|can't run"):
                    ask("ada")
            with pytest.raises(StoreUnavailable, match=r"(?i)permission|password|can't run"):
                limiter.allow_many(["ada"])

    with blocking_store(user, is_async, timeout=PATIENCE_S, namespace="other") as store:
        denied(store)
    with blocking_store(user.replace("secret", "guess"), is_async, timeout=PATIENCE_S) as store:
        denied(store)
    client.execute_command("ACL", "SETUSER", "shop", "-set")

    with blocking_store(user, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "5/minute")
        with pytest.raises(StoreUnavailable, match=r"can't run|permission"):
            bucket.allow("ada")
        assert bucket.peek("ada")
    assert client.keys() == []


def test_a_user_with_the_listed_permissions_can_use_a_cluster(cluster: RedisCluster, is_async: bool) -> None:
    for node in cluster.nodes:
        cluster.ask(node, "ACL SETUSER", "shop", "reset", "on", ">secret", *RULES, *FOR_CLUSTERS)
    with blocking_store(cluster.url.replace("//", "//shop:secret@"), is_async, timeout=PATIENCE_S) as store:
        use_everything(store)
    cluster.on_masters("FLUSHALL")


# TLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, a server's certificate, a client's certificate, and a CA that has signed neither."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    for name in ("127.0.0.1", "shop@example.org"):
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def tls_server(folder: Path) -> Iterator[RedisServer]:
    """A server that requires a client certificate."""
    client = {
        "ssl": True,
        "ssl_ca_certs": str(folder / "authority.pem"),
        "ssl_certfile": str(folder / "shop@example.org.pem"),
        "ssl_keyfile": str(folder / "shop@example.org.pem"),
    }
    certificate = str(folder / "127.0.0.1.pem")
    files = ("--tls-cert-file", certificate, "--tls-key-file", certificate)
    authority = ("--tls-ca-cert-file", str(folder / "authority.pem"))
    with redis_server(*files, *authority, **client) as server:
        yield server


def own_certificate(folder: Path) -> str:
    return "&".join(f"ssl_{part}={folder}/shop@example.org.pem" for part in ("certfile", "keyfile"))


def url_of(server: RedisServer, *options: str) -> str:
    return f"rediss://127.0.0.1:{server.port}/0?{'&'.join(options)}"


def test_a_limiter_over_tls(tls_server: RedisServer, folder: Path, is_async: bool) -> None:
    url = url_of(tls_server, f"ssl_ca_certs={folder}/authority.pem", own_certificate(folder))
    with blocking_store(url, is_async, timeout=PATIENCE_S) as store:
        use_everything(store)

    def client() -> Any:
        kind = redis.asyncio.Redis if is_async else redis.Redis
        return kind(host="127.0.0.1", port=tls_server.port, socket_timeout=PATIENCE_S, retry=None, **tls_server.options)

    with blocking_store(client, is_async, namespace="other") as store:
        use_everything(store)


def test_a_tls_handshake_ends_at_the_deadline_of_the_call() -> None:
    """The server accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0"
        with RedisStore(url, timeout="1 hour") as store:
            both = AllOf(TokenBucket(store, "api", "5/minute"), TokenBucket(store, "all", "5/minute"))
            refused: list[StoreUnavailable] = []

            def ask() -> None:
                try:
                    both.hit_each_within(Patience(0.05), "ada", 1)
                except StoreUnavailable as error:
                    refused.append(error)

            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(PATIENCE_S)
            assert len(refused) == 1


def test_a_client_sends_nothing_to_an_untrusted_server(tls_server: RedisServer, folder: Path, is_async: bool) -> None:
    own = own_certificate(folder)

    for url in (
        url_of(tls_server, own),
        url_of(tls_server, own, f"ssl_ca_certs={folder}/other.pem"),
        # Without a certificate of its own; and without any.
        url_of(tls_server, f"ssl_ca_certs={folder}/authority.pem"),
        f"redis://127.0.0.1:{tls_server.port}/0",
    ):
        with blocking_store(url, is_async, timeout=PATIENCE_S) as store:
            bucket = TokenBucket(store, "api", "5/minute")
            with pytest.raises(StoreUnavailable, match="has not decided"):
                bucket.allow("ada")
            with pytest.raises(StoreUnavailable, match="has not decided"):
                bucket.allow_many(["ada"])
