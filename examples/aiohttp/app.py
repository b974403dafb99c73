"""An aiohttp shop: each client may send 100 requests a minute and order 5 times a minute.

cd examples/aiohttp && gunicorn --workers 4 --worker-class aiohttp.GunicornWebWorker app:app
curl -i -X POST http://127.0.0.1:8000/orders      # six times
"""

import os

from aiohttp import web

from forebay import Store, TokenBucket
from forebay.contrib.aiohttp import limited, setup
from forebay.web import Rule

app = web.Application()
routes = web.RouteTableDef()

store = Store(os.environ.get("SHOP_STORE", "aiohttp-shop"), keys=100_000)
setup(app, [Rule(TokenBucket(store, "everything", "100/minute"))])
orders = TokenBucket(store, "orders", "5/minute")


@routes.post("/orders")
@limited(orders)
async def order(request):
    return web.json_response({"ordered": True, "worker": os.getpid()})


app.add_routes(routes)
