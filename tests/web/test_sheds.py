"""Load shedders among the rules of frameworks' extensions: a request counts while its view runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp.test_utils
import flask
import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI

from forebay import Store
from forebay.contrib import aiohttp as aiohttp_limits
from forebay.contrib import fastapi as fastapi_limits
from forebay.contrib.flask import Limits
from forebay.shedding import BusyWorkers
from forebay.testing import ManualClock
from forebay.web import Shed


@pytest.fixture
def workers(clock: ManualClock) -> Iterator[BusyWorkers]:
    """A shedder for a host with one worker, which sheds a priority in one step."""
    with Store.private(keys=100, clock=clock) as store:
        yield BusyWorkers(store, "workers", 1, ["critical", "default"], step=1, interval="1s")


def shed_all(workers: BusyWorkers, clock: ManualClock) -> None:
    with workers.admit("critical"):
        clock.advance(1)
    assert workers.level == 1


def shed(workers: BusyWorkers) -> Shed:
    return Shed(workers, priority=lambda request: "critical" if request.path == "/pay" else "default")


def test_flask(workers: BusyWorkers, clock: ManualClock) -> None:
    app = flask.Flask("shop")
    Limits(app, [shed(workers)])

    @app.route("/pay")
    @app.route("/")
    def index() -> str:
        return str(workers.busy)

    client = app.test_client()
    assert client.get("/").text == "1"
    assert workers.busy == 0
    shed_all(workers, clock)
    denied = client.get("/")
    assert denied.status_code == 503
    assert 2 <= int(denied.headers["Retry-After"]) <= 4
    assert client.get("/pay").text == "1"
    assert workers.busy == 0


def test_fastapi(workers: BusyWorkers, clock: ManualClock) -> None:
    app = FastAPI()
    fastapi_limits.setup(app, [shed(workers)])

    @app.get("/pay")
    @app.get("/")
    def index() -> int:
        return workers.busy

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            assert (await client.get("/")).json() == 1
            assert workers.busy == 0
            shed_all(workers, clock)
            denied = await client.get("/")
            assert denied.status_code == 503
            assert 2 <= int(denied.headers["Retry-After"]) <= 4
            assert (await client.get("/pay")).json() == 1
            assert workers.busy == 0

    asyncio.run(run())


def test_aiohttp(workers: BusyWorkers, clock: ManualClock) -> None:
    async def index(request: web.Request) -> web.Response:
        return web.Response(text=str(workers.busy))

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/", index), web.get("/pay", index)])
        aiohttp_limits.setup(app, [shed(workers)])
        async with aiohttp.test_utils.TestClient(aiohttp.test_utils.TestServer(app)) as client:
            assert await (await client.get("/")).text() == "1"
            assert workers.busy == 0
            shed_all(workers, clock)
            denied = await client.get("/")
            assert denied.status == 503
            assert 2 <= int(denied.headers["Retry-After"]) <= 4
            assert await (await client.get("/pay")).text() == "1"
            assert workers.busy == 0

    asyncio.run(run())
