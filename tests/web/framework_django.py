"""Django and Django REST framework with their settings: see framework_limits.py.

The session alone identifies a user; there is no database. `/enter?user=` starts a session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from django.conf import settings
from framework_limits import answer, customer, is_internal, is_open, not_server_error, of_environment

from forebay.web import Rule, user

its = of_environment()
store = its.store
rules = [
    Rule(its.wide, path="/wide/*", key=customer, exempt=is_internal),
    Rule(its.users, path=["/account", "/account/other"], key=user(otherwise=customer)),
]

settings.configure(
    SECRET_KEY="known to everybody",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "forebay.contrib.django.LimitsMiddleware",
    ],
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    AUTHENTICATION_BACKENDS=[f"{__name__}.Backend"],
    FOREBAY={"RULES": f"{__name__}.rules", "STORE": f"{__name__}.store"},
    REST_FRAMEWORK={
        "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
        "DEFAULT_THROTTLE_CLASSES": [
            "forebay.contrib.rest_framework.AnonRateThrottle",
            "forebay.contrib.rest_framework.UserRateThrottle",
            "forebay.contrib.rest_framework.ScopedRateThrottle",
        ],
        "DEFAULT_THROTTLE_RATES": {"anon": "40/day", "user": "60/d", "uploads": "10/hour"},
    },
)

import django  # noqa: E402

django.setup()

from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY  # noqa: E402
from django.contrib.auth.backends import BaseBackend  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.exceptions import PermissionDenied  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse  # noqa: E402
from django.urls import path  # noqa: E402
from django.utils.asyncio import async_unsafe  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

from forebay.contrib.django import limited  # noqa: E402


class Backend(BaseBackend):
    # Unsafe in an event loop, as a database query is.
    @async_unsafe
    def get_user(self, user_id: int) -> User:
        return User(pk=int(user_id), username=f"user {user_id}")


def enter(request: HttpRequest) -> JsonResponse:
    somebody = Backend().get_user(int(request.GET["user"]))
    request.session[SESSION_KEY] = str(somebody.pk)
    request.session[BACKEND_SESSION_KEY] = f"{__name__}.Backend"
    request.session[HASH_SESSION_KEY] = somebody.get_session_auth_hash()
    return JsonResponse(answer())


def worker(request: HttpRequest, name: str = "") -> JsonResponse:
    return JsonResponse(answer())


async def worker_async(request: HttpRequest) -> JsonResponse:
    return JsonResponse(answer())


@limited(its.orders, key=customer)
def orders(request: HttpRequest) -> JsonResponse:
    return JsonResponse(answer())


@limited(its.orders, key=customer)
async def other_orders(request: HttpRequest) -> JsonResponse:
    return JsonResponse(answer())


@limited(its.ample, key=customer)
@limited(its.narrow, key=customer)
def both(request: HttpRequest) -> JsonResponse:
    return JsonResponse(answer())


@csrf_exempt
@limited(its.failures, key=customer, charge_on={401, 403})
def login(request: HttpRequest) -> JsonResponse:
    if request.GET["status"] == "403":
        raise PermissionDenied
    return JsonResponse(answer(), status=int(request.GET["status"]))


@limited(its.handled, key=customer, charge_on=not_server_error)
def fragile(request: HttpRequest) -> JsonResponse:
    status = int(request.GET["status"])
    if not status:
        raise RuntimeError("it broke")
    return JsonResponse(answer(), status=status)


@limited(*its.of_streams())
def held(request: HttpRequest) -> HttpResponseBase:
    def parts() -> Iterator[str]:
        yield "first\n"
        while not is_open():
            time.sleep(0.01)
            yield " "
        yield "second\n"

    async def parts_async() -> AsyncIterator[str]:
        yield "first\n"
        while not is_open():
            await asyncio.sleep(0.01)
            yield " "
        yield "second\n"

    return StreamingHttpResponse(parts_async() if hasattr(request, "scope") else parts())


class Api(APIView):
    def get(self, request: Any) -> Response:
        return Response(answer())


class Uploads(Api):
    throttle_scope = "uploads"


urlpatterns = [
    path("enter", enter),
    path("worker", worker),
    path("orders", orders),
    path("orders/other", other_orders),
    path("both", both),
    path("wide/<name>", worker),
    path("login", login),
    path("fragile", fragile),
    path("held", held),
    path("account", worker),
    path("account/other", worker_async),
    path("api", Api.as_view()),
    path("api/uploads", Uploads.as_view()),
]

app = get_wsgi_application()
asgi = get_asgi_application()
