"""Four processes that ask a partner who bears 10 requests a second: with no limit, and with one that they share.

pip install "forebay[httpx]"        # or forebay[requests], forebay[aiohttp]
cd examples/outbound && python ask.py httpx
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

# What each process of a service does; under gunicorn, make the client where the application is imported.


def ask_httpx(url: str, bucket: TokenBucket | None) -> list[int]:
    import httpx

    from forebay.contrib.httpx import LimitedTransport

    with httpx.Client(transport=None if bucket is None else LimitedTransport(bucket)) as client:
        return [client.get(url).status_code for _ in range(EACH)]


def ask_requests(url: str, bucket: TokenBucket | None) -> list[int]:
    import requests

    from forebay.contrib.requests import LimitedAdapter

    with requests.Session() as session:
        if bucket is not None:
            session.mount("http://", LimitedAdapter(bucket))
        return [session.get(url).status_code for _ in range(EACH)]


def ask_aiohttp(url: str, bucket: TokenBucket | None) -> list[int]:
    import aiohttp

    from forebay.contrib.aiohttp_client import LimitedMiddleware

    async def ask() -> list[int]:
        async with aiohttp.ClientSession(middlewares=[] if bucket is None else [LimitedMiddleware(bucket)]) as session:
            return [(await session.get(url)).status for _ in range(EACH)]

    return asyncio.run(ask())


CLIENTS = {"httpx": ask_httpx, "requests": ask_requests, "aiohttp": ask_aiohttp}


def ask(client: str, url: str, limited: bool) -> Counter[int]:
    if not limited:
        return Counter(CLIENTS[client](url, None))
    with Store(STORE, keys=1000) as store:
        # A little less than the partner bears: on their way, requests that were sent apart come closer together.
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
                answers = pool.starmap(ask, [(client, partner.url, limited)] * PROCESSES)
            seconds = time.monotonic() - begun
            partner.shutdown()
        print("with one limit: " if limited else "without a limit:", end=" ")
        print(f"{dict(sum(answers, Counter()))} in {seconds:.1f} s; the partner refused {partner.refused}")
    Store.unlink(STORE)


if __name__ == "__main__":
    main()
