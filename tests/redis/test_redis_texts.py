"""Limits of views as text, in stores over Redis."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import flask
import pytest
from fastapi import Depends, FastAPI
from redis_server import RedisServer
from web_requests import CLIENT, Wire, asgi_scope, call_wsgi

import forebay.contrib.fastapi
from forebay import Store
from forebay.contrib.flask import Limits
from forebay.redis import AsyncRedisStore, LeasedStore, RedisStore


@pytest.mark.parametrize("is_leased", [False, True])
def test_flask_keeps_texts_in_redis(redis_store: RedisStore, is_leased: bool) -> None:
    with contextlib.ExitStack() as stack:
        store: Any = redis_store
        if is_leased:
            host = stack.enter_context(Store.private(keys=100))
            store = stack.enter_context(LeasedStore(redis_store, host, lease=60))
        app = flask.Flask("shop of " + "very " * 30 + "long names")
        limits = Limits(app, store=store)

        @app.get("/")
        @limits.limit("2/hour; 9/day")
        def view() -> str:
            return "there"

        assert [call_wsgi(app).status for _ in range(3)] == [200, 200, 429]


def test_fastapi_keeps_texts_in_redis(server: RedisServer) -> None:
    async def ask() -> list[int]:
        async with AsyncRedisStore(server.url, timeout=60) as store:
            app = FastAPI()
            forebay.contrib.fastapi.setup(app, store=store)

            @app.get("/", dependencies=[Depends(forebay.contrib.fastapi.limited("2/hour; 9/day"))])
            async def view() -> str:
                return "there"

            statuses = []
            for _ in range(3):
                wire = Wire({"type": "http.request"})
                await app(asgi_scope(client=CLIENT, query_string=b""), wire.receive, wire.send)
                statuses.append(wire.answered().status)
            return statuses

    assert asyncio.run(ask()) == [200, 200, 429]
