"""Flask: see framework_limits.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Flask, Response, request
from framework_limits import answer, customer, is_internal, is_open, not_server_error, of_environment

from forebay.contrib.flask import Limits, TooManyRequests
from forebay.web import Rule

its = of_environment()
app = Flask(__name__)
limits = Limits(rules=[Rule(its.wide, path="/wide/*", key=customer, exempt=is_internal)])
limits.init_app(app)
inner = Blueprint("inner", __name__)
limits.limit(its.orders, key=customer)(inner)


@app.get("/worker")
def worker() -> Any:
    return answer()


@app.get("/orders")
@limits.limit(its.orders, key=customer)
def orders() -> Any:
    return answer()


@inner.get("/orders/other")
def other_orders() -> Any:
    return answer()


@app.get("/both")
@limits.limit(its.ample, key=customer)
@limits.limit(its.narrow, key=customer)
def both() -> Any:
    return answer()


@app.get("/wide/<name>")
def wide(name: str) -> Any:
    return answer()


@app.get("/wide/exempt")
@limits.exempt
def exempt() -> Any:
    return answer()


@app.post("/login")
@limits.limit(its.failures, key=customer, charge_on={401, 403})
def login() -> Any:
    return answer(), int(request.args["status"])


@app.get("/fragile")
@limits.limit(its.handled, key=customer, charge_on=not_server_error)
def fragile() -> Any:
    status = int(request.args["status"])
    if not status:
        raise RuntimeError("it broke")
    return answer(), status


@app.get("/held")
@limits.limit(*its.of_streams())
def held() -> Response:
    def parts() -> Iterator[str]:
        yield "first\n"
        while not is_open():
            time.sleep(0.01)
            yield " "
        yield "second\n"

    return Response(parts())


@app.get("/handled")
@limits.limit(its.orders, key=customer)
def handled() -> Any:
    return answer()


@app.errorhandler(429)
def slow_down(error: Exception) -> Any:
    if request.path != "/handled":
        return error
    assert isinstance(error, TooManyRequests)
    return {"violated": error.denial.violated}, 429


app.register_blueprint(inner)
