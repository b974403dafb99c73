"""FastAPI: see framework_limits.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from framework_limits import answer, customer, is_internal, is_open, not_server_error, of_environment

from forebay.contrib.fastapi import limited, setup
from forebay.web import Rule

its = of_environment()
app = FastAPI()
setup(app, [Rule(its.wide, path="/wide/*", key=customer, exempt=is_internal)])
inner = APIRouter(dependencies=[Depends(limited(its.orders, key=customer))])


@app.get("/worker")
@app.get("/wide/{name}")
async def worker() -> Any:
    return answer()


@app.get("/orders", dependencies=[Depends(limited(its.orders, key=customer))])
async def orders() -> Any:
    return answer()


@inner.get("/orders/other")
def other_orders() -> Any:
    return answer()


@app.get("/both", dependencies=[Depends(limited(its.ample, its.narrow, key=customer))])
async def both() -> Any:
    return answer()


@app.post("/login", dependencies=[Depends(limited(its.failures, key=customer, charge_on={401, 403}))])
async def login(status: int) -> Any:
    return JSONResponse(answer(), status)


@app.get("/fragile", dependencies=[Depends(limited(its.handled, key=customer, charge_on=not_server_error))])
def fragile(status: int) -> Any:
    if not status:
        raise RuntimeError("it broke")
    return JSONResponse(answer(), status)


@app.get("/held", dependencies=[Depends(limited(*its.of_streams()))])
async def held() -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        yield "first\n"
        while not is_open():
            await asyncio.sleep(0.01)
            yield " "
        yield "second\n"

    return StreamingResponse(parts())


@app.websocket("/socket", dependencies=[Depends(limited(its.held, key=customer))])
async def socket(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


app.include_router(inner)
