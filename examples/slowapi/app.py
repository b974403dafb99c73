"""The shop with slowapi. forebay needs one import and the storage's URI.

cd examples/slowapi && uvicorn --workers 4 app:app
curl -i -H 'X-Customer: ada' http://127.0.0.1:8000/
"""

import os

from fastapi import FastAPI, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded

import forebay.limits  # noqa: F401  # from here on the limits library knows forebay://

LIMIT = os.environ.get("SHOP_LIMIT", "5/second")


def customer(request: Request) -> str:
    return request.headers.get("X-Customer") or (request.client.host if request.client else "")


app = FastAPI()
app.state.limiter = limiter = Limiter(
    customer,
    storage_uri=os.environ.get("SHOP_STORAGE", "forebay:///slowapi-shop?keys=100000"),
    strategy=os.environ.get("SHOP_STRATEGY", "fixed-window"),
    headers_enabled=True,
)
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


@app.middleware("http")
async def name_worker(request: Request, call_next) -> Response:
    response = await call_next(request)
    response.headers["X-Worker"] = str(os.getpid())
    return response


@app.get("/")
@limiter.limit(LIMIT)
async def order(request: Request, response: Response) -> dict[str, bool]:
    return {"ordered": True}
