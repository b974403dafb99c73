"""A shop that limits each customer's orders per second; all gunicorn workers count together.

cd examples/shop && gunicorn app:app
curl -i -H 'X-Customer: ada' http://127.0.0.1:8000/
"""

import math
import os

from forebay import Decision, Store, TokenBucket

RATE = os.environ.get("SHOP_RATE", "5/second")
BURST = int(os.environ.get("SHOP_BURST", "10"))

store = Store(os.environ.get("SHOP_STORE", "example-shop"), keys=100_000)
orders = TokenBucket(store, "orders", RATE, burst=BURST)


def app(environ, start_response):
    decision = orders.hit(environ.get("HTTP_X_CUSTOMER") or environ["REMOTE_ADDR"])
    status, headers, body = answer(decision)
    start_response("200 OK" if status == 200 else "429 Too Many Requests", headers)
    return [body]


def answer(decision: Decision) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body of a decision, with the worker's pid."""
    if decision.allowed:
        status, headers, body = 200, [], f"Ordered. {decision.remaining} more at once.\n".encode()
    else:
        # Rounded up to whole seconds: a client that waits that long is not denied again.
        wait = math.ceil(decision.retry_after)
        status, headers, body = 429, [("Retry-After", str(wait))], f"Too many orders. Ask again in {wait} s.\n".encode()
    headers += [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("X-Worker", str(os.getpid()))]
    return status, headers, body
