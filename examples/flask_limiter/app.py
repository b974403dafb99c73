"""The shop with Flask-Limiter. forebay needs one import and the storage's URI.

cd examples/flask_limiter && gunicorn --workers 4 app:app
curl -i -H 'X-Customer: ada' http://127.0.0.1:8000/
"""

import os

from flask import Flask, Response, request
from flask_limiter import Limiter

import forebay.limits  # noqa: F401  # from here on the limits library knows forebay://

LIMIT = os.environ.get("SHOP_LIMIT", "5/second")


def customer() -> str:
    return request.headers.get("X-Customer") or request.remote_addr or ""


app = Flask(__name__)
limiter = Limiter(
    customer,
    app=app,
    storage_uri=os.environ.get("SHOP_STORAGE", "forebay:///flask-shop?keys=100000"),
    strategy=os.environ.get("SHOP_STRATEGY", "fixed-window"),
    headers_enabled=True,
)


@app.get("/")
@limiter.limit(LIMIT)
def order() -> str:
    return "Ordered.\n"


@app.after_request
def name_worker(response: Response) -> Response:
    response.headers["X-Worker"] = str(os.getpid())
    return response
