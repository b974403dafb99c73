"""The middleware under real servers with four workers: one limit per host, and true header fields."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import pytest
from middleware_app_limits import KEYS, LIMIT
from middleware_server import UVICORN, MiddlewareServer
from shop_server import wait_until

from forebay import Concurrency, Store, TokenBucket

every_server = pytest.mark.parametrize("server", ["sync", "gthread", "gevent", UVICORN, "uvicorn"])


@every_server
def test_servers_admit_exactly_the_limit_and_count_down_the_remaining_permits(
    server: str, store_name: str, tmp_path: Path
) -> None:
    with MiddlewareServer(tmp_path, server, store_name=store_name) as site:
        site.wait_made(site.workers)
        answers = site.send_requests("/", 2 * LIMIT)
        allowed = [answer for answer in answers if answer.status == 200]
        denied = [answer for answer in answers if answer.status == 429]
        assert (len(allowed), len(denied)) == (LIMIT, LIMIT)
        assert len({answer.body for answer in allowed}) > 1, "several workers answered"
        fields = [re.fullmatch(r'"limit";r=(\d+);t=(\d+)', answer.ratelimit) for answer in answers]
        assert sorted(int(match[1]) for match in fields[: len(fields)] if match) == sorted(
            [*range(LIMIT), *[0] * LIMIT]
        )
        assert sorted(int(answer.ratelimit.split("=")[1].split(";")[0]) for answer in allowed) == list(range(LIMIT))
        for answer in denied:
            assert answer.ratelimit == f'"limit";r=0;t={answer.retry_after}'


@every_server
def test_disconnect_during_the_response_releases_permits_and_charges(
    server: str, store_name: str, tmp_path: Path
) -> None:
    with MiddlewareServer(tmp_path, server, store_name=store_name) as site, Store(store_name, keys=KEYS) as store:
        site.wait_made(site.workers)
        held = Concurrency(store, "held", 3, "10 minutes")
        kept = TokenBucket(store, "kept", "100/year", 100)
        for _ in range(2):
            streams = [site.open_stream() for _ in range(3)]
            assert [status for status, _ in streams] == [200] * 3
            assert held.peek("everyone", 0).remaining == 0
            assert kept.peek("everyone", 0).remaining == 97
            status, refused = site.open_stream()
            assert status == 503
            refused.close()
            for _, connection in streams:
                # Reset the connection: no FIN.
                connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            wait_until(lambda: held.peek("everyone", 0).remaining == 3, "the held permits are released")
            wait_until(lambda: kept.peek("everyone", 0).remaining == 100, "the charges are refunded")
