"""Four processes send to a partner that serves 10 requests a second: with no limit, and with a shared limit.

pip install "forebay[httpx]"        # or forebay[requests], forebay[aiohttp]
cd examples/outbound && python send.py httpx
"""

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter

from partner import Partner

from forebay import Store, TokenBucket

STORE = os.environ.get("OUTBOUND_STORE", "outbound-example")
PROCESSES, EACH = 4, 10

# The code of each process of a service. Under gunicorn, make the client in the module of the application.


def send_httpx(url: str, bucket: TokenBucket | None) -> list[int]:
    import httpx

    from forebay.contrib.httpx import LimitedTransport

    with httpx.Client(transport=None if bucket is None else LimitedTransport(bucket)) as client:
        return [client.get(url).status_code for _ in range(EACH)]


def send_requests(url: str, bucket: TokenBucket | None) -> list[int]:
    import requests

    from forebay.contrib.requests import LimitedAdapter

    with requests.Session() as session:
        if bucket is not None:
            session.mount("http://", LimitedAdapter(bucket))
        return [session.get(url).status_code for _ in range(EACH)]


def send_aiohttp(url: str, bucket: TokenBucket | None) -> list[int]:
    import aiohttp

    from forebay.contrib.aiohttp_client import LimitedMiddleware

    async def send() -> list[int]:
        async with aiohttp.ClientSession(middlewares=[] if bucket is None else [LimitedMiddleware(bucket)]) as session:
            return [(await session.get(url)).status for _ in range(EACH)]

    return asyncio.run(send())


CLIENTS = {"httpx": send_httpx, "requests": send_requests, "aiohttp": send_aiohttp}


def send(client: str, url: str, limited: bool) -> Counter[int]:
    if not limited:
        return Counter(CLIENTS[client](url, None))
    with Store(STORE, keys=1000) as store:
        # A little less than the partner serves: requests that were sent apart may arrive closer together.
        return Counter(CLIENTS[client](url, TokenBucket(store, "partner", "8/second", burst=2)))


def main() -> None:
    client = sys.argv[1] if len(sys.argv) > 1 else "httpx"
    if client not in CLIENTS:
        sys.exit(f"no client {client!r}: it is one of {', '.join(CLIENTS)}")
    for limited in (False, True):
        with Partner() as partner:
            threading.Thread(target=partner.serve_forever, daemon=True).start()
            begun = time.monotonic()
            with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
                answers = pool.starmap(send, [(client, partner.url, limited)] * PROCESSES)
            seconds = time.monotonic() - begun
            partner.shutdown()
        print("with one limit: " if limited else "without a limit:", end=" ")
        print(f"{dict(sum(answers, Counter()))} in {seconds:.1f} s; the partner refused {partner.refused}")
    Store.unlink(STORE)


if __name__ == "__main__":
    main()
