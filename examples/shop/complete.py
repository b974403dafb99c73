"""A shop with many limits at once: of all clients, of each plan, of single endpoints and accounts, of bytes, of load.

cd examples/shop && gunicorn --worker-class gthread --threads 8 complete:app
curl -i -H 'X-API-Key: secret-of-ada' http://127.0.0.1:8000/
curl -o /dev/null http://127.0.0.1:8000/files/film      # 2 MiB at once, then 1 MiB a second

The limits are in limits.toml. All workers follow a change of that file within a second or two, without a restart.
"""

import os
from pathlib import Path

from forebay import Store
from forebay.rules import FileSource, LiveRules
from forebay.web import WSGIMiddleware

ACCOUNTS = {"secret-of-ada": ("ada", "pro"), "secret-of-ci": ("ci", "internal"), "secret-of-bob": ("bob", "free")}
"""The account and the plan of each API key. Without a key a client has the free plan, and counts by its address."""
LIMITS = os.environ.get("SHOP_LIMITS", Path(__file__).with_name("limits.toml"))
FILM_BYTES = int(os.environ.get("SHOP_FILM_BYTES", str(16 * 2**20)))

store = Store(os.environ.get("SHOP_STORE", "example-complete-shop"), keys=100_000)


def account(request):
    return ACCOUNTS.get(request.header("X-API-Key"), (None, "free"))[0]


def plan(request):
    return ACCOUNTS.get(request.header("X-API-Key"), (None, "free"))[1]


def shop(environ, start_response):
    path = environ["PATH_INFO"]
    if path.startswith("/files/"):
        start_response("200 OK", [("Content-Type", "video/mp4"), ("Content-Length", str(FILM_BYTES))])
        return (b"x" * min(2**18, FILM_BYTES - at) for at in range(0, FILM_BYTES, 2**18))
    is_known = path != "/login" or environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) == b"sesame"
    body = b"Done.\n" if is_known else b"Wrong.\n"
    fields = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("X-Worker", str(os.getpid()))]
    start_response("200 OK" if is_known else "401 Unauthorized", fields)
    return [body]


app = WSGIMiddleware(shop, LiveRules(FileSource(LIMITS), store=store, tier=plan, user=account))
