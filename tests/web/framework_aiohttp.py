"""aiohttp: see framework_limits.py."""

from __future__ import annotations

import asyncio

from aiohttp import web
from framework_limits import answer, customer, is_internal, is_open, not_server_error, of_environment

from forebay.contrib.aiohttp import limited, setup
from forebay.web import Rule

its = of_environment()
routes = web.RouteTableDef()


@routes.get("/worker")
@routes.get("/wide/{name}")
async def worker(request: web.Request) -> web.Response:
    return web.json_response(answer())


@routes.get("/orders")
@limited(its.orders, key=customer)
async def orders(request: web.Request) -> web.Response:
    return web.json_response(answer())


@routes.view("/orders/other")
class OtherOrders(web.View):
    @limited(its.orders, key=customer)
    async def get(self) -> web.Response:
        return web.json_response(answer())


@routes.get("/both")
@limited(its.ample, key=customer)
@limited(its.narrow, key=customer)
async def both(request: web.Request) -> web.Response:
    return web.json_response(answer())


@routes.post("/login")
@limited(its.failures, key=customer, charge_on={401, 403})
async def login(request: web.Request) -> web.Response:
    if request.query["status"] == "403":
        raise web.HTTPForbidden
    return web.json_response(answer(), status=int(request.query["status"]))


@routes.get("/fragile")
@limited(its.handled, key=customer, charge_on=not_server_error)
async def fragile(request: web.Request) -> web.Response:
    status = int(request.query["status"])
    if not status:
        raise RuntimeError("it broke")
    return web.json_response(answer(), status=status)


@routes.get("/held")
@limited(*its.of_streams())
async def held(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"first\n")
    while not is_open():
        await asyncio.sleep(0.01)
        await response.write(b" ")
    await response.write(b"second\n")
    return response


@routes.get("/socket")
@limited(its.held, key=customer)
async def socket(request: web.Request) -> web.WebSocketResponse:
    websocket = web.WebSocketResponse()
    await websocket.prepare(request)
    async for message in websocket:
        await websocket.send_str(message.data)
    return websocket


app = web.Application()
setup(app, [Rule(its.wide, path="/wide/*", key=customer, exempt=is_internal)])
app.add_routes(routes)
