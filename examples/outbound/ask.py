"""Four processes that ask a partner who bears 10 requests a second: with no limit, and with one that they share.

pip install "penstock[httpx]"
cd examples/outbound && python ask.py
"""

import multiprocessing
import threading
import time
from collections import Counter

import httpx
from partner import Partner

from penstock import Store, TokenBucket
from penstock.contrib.httpx import LimitedTransport

STORE = "outbound-example"
PROCESSES, EACH = 4, 10


def ask(url: str, limited: bool) -> Counter[int]:
    """What each process of a service does; under gunicorn, make the client where the application is imported."""
    transport = None
    if limited:
        # A little less than the partner bears: on their way, requests that were sent apart come closer together.
        bucket = TokenBucket(Store(STORE, keys=1000), "partner", "8/second", burst=2)
        transport = LimitedTransport(bucket)
    with httpx.Client(transport=transport) as client:
        return Counter(client.get(url).status_code for _ in range(EACH))


def main() -> None:
    for limited in (False, True):
        with Partner() as partner:
            threading.Thread(target=partner.serve_forever, daemon=True).start()
            begun = time.monotonic()
            with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
                answers = pool.starmap(ask, [(partner.url, limited)] * PROCESSES)
            seconds = time.monotonic() - begun
            partner.shutdown()
        print("with one limit: " if limited else "without a limit:", end=" ")
        print(f"{dict(sum(answers, Counter()))} in {seconds:.1f} s; the partner refused {partner.refused}")
    Store.unlink(STORE)


if __name__ == "__main__":
    main()
