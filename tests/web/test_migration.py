"""The replacement for Flask-Limiter in docs/migration.md decides as Flask-Limiter does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import flask
import pytest
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

from forebay import FixedWindow, Store
from forebay.contrib.flask import Limits
from forebay.web import ClientAddress, Request, Rule

PATHS = ("/a", "/b", "/a", "/a", "/b", "/c", "/b")
REQUESTS = [(client, path) for client in ("192.0.2.1", "192.0.2.2") for path in PATHS]

client = ClientAddress()


def client_and_route(request: Request) -> tuple[str, str]:
    return str(client(request)), flask.request.endpoint or ""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=100) as store:
        yield store


def default_limits(app: flask.Flask, store: Store | None) -> None:
    if store is None:
        Limiter(get_remote_address, app=app, default_limits=["2/hour"], storage_uri="memory://")
    else:
        Limits(app, [Rule(FixedWindow(store, "default", "2/hour", align="first"), key=client_and_route)])


def application_limits(app: flask.Flask, store: Store | None) -> None:
    if store is None:
        Limiter(get_remote_address, app=app, application_limits=["4/hour"], storage_uri="memory://")
    else:
        Limits(app, [Rule(FixedWindow(store, "application", "4/hour", align="first"))])


def statuses(limit: Callable[[flask.Flask, Store | None], None], store: Store | None) -> list[int]:
    app = flask.Flask("shop")
    for name in "abc":
        app.add_url_rule(f"/{name}", name, lambda: "")
    limit(app, store)
    test_client = app.test_client()
    return [test_client.get(path, environ_overrides={"REMOTE_ADDR": address}).status_code for address, path in REQUESTS]


@pytest.mark.parametrize("limit", [default_limits, application_limits])
def test_limits_of_all_routes_decide_as_flask_limiter(
    limit: Callable[[flask.Flask, Store | None], None], store: Store
) -> None:
    theirs = statuses(limit, None)
    assert statuses(limit, store) == theirs
    assert set(theirs) == {200, 429}
