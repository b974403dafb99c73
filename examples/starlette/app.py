"""A Starlette shop: each client may send 100 requests a minute and order 5 times a minute.

cd examples/starlette && uvicorn --workers 4 app:app
curl -i -X POST http://127.0.0.1:8000/orders      # six times
"""

import os

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from forebay import Store, TokenBucket
from forebay.web import ASGIMiddleware, Rule

store = Store(os.environ.get("SHOP_STORE", "starlette-shop"), keys=100_000)
rules = [
    Rule(TokenBucket(store, "everything", "100/minute")),
    Rule(TokenBucket(store, "orders", "5/minute"), path="/orders", methods="POST"),
]


async def order(request: Request) -> JSONResponse:
    return JSONResponse({"ordered": True, "worker": os.getpid()})


app = Starlette(
    routes=[Route("/orders", order, methods=["POST"])],
    middleware=[Middleware(ASGIMiddleware, rules=rules)],
)
