"""A FastAPI shop: each client may send 100 requests and 5 orders a minute, and have one report made at a time.

cd examples/fastapi && uvicorn --workers 4 app:app
curl -i -X POST http://127.0.0.1:8000/orders      # six times
"""

import asyncio
import os

from fastapi import Depends, FastAPI

from forebay import Concurrency, Store, TokenBucket
from forebay.contrib.fastapi import limited, setup
from forebay.web import Rule

app = FastAPI()

store = Store(os.environ.get("SHOP_STORE", "fastapi-shop"), keys=100_000)
setup(app, [Rule(TokenBucket(store, "everything", "100/minute"))])
orders = TokenBucket(store, "orders", "5/minute")
reports = Concurrency(store, "reports", 1)


@app.post("/orders", dependencies=[Depends(limited(orders))])
async def order():
    return {"ordered": True, "worker": os.getpid()}


@app.get("/report", dependencies=[Depends(limited(reports))])
async def report():
    await asyncio.sleep(5)
    return {"worker": os.getpid()}
