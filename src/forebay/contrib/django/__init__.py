"""Limits in a Django project: for all requests and for views, sync and async. See docs/frameworks.md.

``"forebay.contrib.django.LimitsMiddleware"`` in ``MIDDLEWARE``, the rules in ``FOREBAY``, ``@limited(limiter)`` and
``@exempt``. With ``"forebay.contrib.django"`` in ``INSTALLED_APPS``, ``manage.py check`` checks the settings. Needs
``forebay[django]``. For Django REST framework see ``forebay.contrib.rest_framework``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, Final, TypeVar, Unpack

from forebay.extras import Needs

with Needs("django", __name__):
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured
    from django.core.signals import setting_changed
    from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
    from django.urls import Resolver404, get_resolver
    from django.utils.module_loading import import_string
# After Django, which brings it, so that the error names Django where both are missing.
with Needs("django", __name__):
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction

from forebay.contrib.endpoints import Endpoint, endpoint_of
from forebay.contrib.views import (
    AppGates,
    AsyncVisit,
    Limit,
    NotInstalled,
    RuleOptions,
    Rules,
    Visit,
    check_loop_of,
    remember_rules,
    rules_of,
    unstacked,
    without_body_limits,
)
from forebay.errors import InvalidLimiter, short_repr
from forebay.web import DISCONNECTED, Answer
from forebay.web.live_gate import at_start, gate_of
from forebay.web.native_requests import methods, readings
from forebay.web.options import GateOptions
from forebay.web.renewals import RENEWALS, Renewals
from forebay.web.rules import check_event_loop, outcome

__all__ = ["DjangoRequest", "LimitsMiddleware", "exempt", "limited", "setting"]

SETTINGS: Final = {
    "RULES": (),
    "CLIENT": None,
    "HEADERS": "draft-10",
    "PARTITION_KEYS": False,
    "ENABLED": True,
    "ON_DENIED": None,
    "WHEN_UNAVAILABLE": "503",
    "STORE": None,
}
WORDS: Final = ("HEADERS", "WHEN_UNAVAILABLE")
"""The settings whose text is no dotted path."""
VISIT: Final = "_forebay_visit"
EXEMPT: Final = "_forebay_exempt"
View = TypeVar("View", bound=Callable[..., Any])


class DjangoRequest:
    """The request that key functions receive: `django` is Django's own, `native` its ``META``."""

    __slots__ = ("django", "native")

    def __init__(self, request: HttpRequest) -> None:
        self.django = request
        self.native: Mapping[str, Any] = request.META

    @property
    def method(self) -> str:
        return self.django.method or ""

    @property
    def methods(self) -> tuple[str, ...]:
        return methods(self.method, self.header)

    @property
    def path(self) -> str:
        return self.django.path

    @property
    def paths(self) -> tuple[str, ...]:
        """Django routes by the second, which has no ``SCRIPT_NAME`` in front.

        An ASGI server may leave it out of the first, too.
        """
        whole, inside = self.django.path, self.django.path_info
        root = self.native.get("SCRIPT_NAME", "").rstrip("/")
        return readings(whole, inside, root + inside) if root else readings(whole, inside)

    @property
    def peer(self) -> str | None:
        return self.native.get("REMOTE_ADDR") or None

    @property
    def user(self) -> str | None:
        """The primary key of the user whom Django's ``AuthenticationMiddleware`` has authenticated."""
        user = getattr(self.django, "user", None)
        return str(user.pk) if user is not None and user.is_authenticated else None

    def header(self, name: str) -> str | None:
        return self.django.headers.get(name)


class _UserUnknown(BaseException):
    """A key function reads the user, which has to be awaited first."""


class _AsyncRequest(DjangoRequest):
    """A request whose user is read from the database by ``fetch_user``, as an event loop must not wait for it."""

    __slots__ = ("fetched",)

    def __init__(self, request: HttpRequest) -> None:
        super().__init__(request)
        self.fetched: str | type[_UserUnknown] | None = _UserUnknown

    @property
    def user(self) -> str | None:
        if self.fetched is _UserUnknown:
            raise _UserUnknown
        return self.fetched  # type: ignore[return-value]

    async def fetch_user(self) -> None:
        if self.fetched is not _UserUnknown:
            return
        fetch: Callable[[], Awaitable[Any]] | None = getattr(self.django, "auser", None)
        user = None if fetch is None else await fetch()
        self.fetched = str(user.pk) if user is not None and user.is_authenticated else None


def options() -> dict[str, Any]:
    """``settings.FOREBAY``."""
    given = getattr(settings, "FOREBAY", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(
            f'FOREBAY is a dict such as {{"RULES": "shop.limits.rules"}}, not {short_repr(given)}'
        )
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise ImproperlyConfigured(f"FOREBAY has no {min(map(short_repr, unknown))}: there are {', '.join(SETTINGS)}")
    return given


def setting(name: str) -> Any:
    """A value of ``settings.FOREBAY``, or the object at its dotted path."""
    value = options().get(name, SETTINGS[name])
    if not isinstance(value, str) or name in WORDS:
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(f'FOREBAY["{name}"] is the dotted path of nothing: {error}') from error


def make_gates() -> AppGates:
    """The gates that the settings describe."""
    options: GateOptions = {
        "client": setting("CLIENT"),
        "headers": setting("HEADERS"),
        "partition_keys": setting("PARTITION_KEYS"),
        "enabled": setting("ENABLED"),
        "on_denied": setting("ON_DENIED"),
        "when_unavailable": setting("WHEN_UNAVAILABLE"),
    }
    gate = gate_of(setting("RULES"), **options)
    remedy = "put WSGIMiddleware or ASGIMiddleware of forebay.web around the application in wsgi.py or asgi.py"
    return AppGates(without_body_limits(gate, remedy, remedy), _endpoint, setting("STORE"), **options)


_gates = cache(make_gates)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "FOREBAY":
        _gates.cache_clear()


# In tests, override_settings changes them.
setting_changed.connect(_forget)


class LimitsMiddleware:
    """Charges ``FOREBAY["RULES"]`` for every request, and supports the views' own limits.

    Place it below ``AuthenticationMiddleware`` if keys are of users. Sync and async. In an event loop it awaits only
    the user, where a function may read it, and Redis, where the rules are over an ``AsyncRedisStore``.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        gate = at_start(_gates().gate)
        check_event_loop(gate.given, iscoroutinefunction(get_response), gate.client)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if iscoroutinefunction(self):
            return self._answer_async(request)
        visit = Visit()
        setattr(request, VISIT, visit)
        response = _decide_exempt(request, visit) if _is_exempt(request) else _decide(DjangoRequest(request), visit)
        if response is None:
            try:
                response = self.get_response(request)
            except BaseException:
                visit.cleanup.end(500)
                raise
        _finish(request, response, visit)
        return response

    async def _answer_async(self, request: HttpRequest) -> HttpResponseBase:
        visit = AsyncVisit()
        setattr(request, VISIT, visit)
        response = _decide_exempt(request, visit) if _is_exempt(request) else await _decide_async(request, visit)
        if response is None:
            try:
                response = await self.get_response(request)
            except Exception:
                visit.end(500)
                raise
            except BaseException:
                visit.end(DISCONNECTED)
                raise
        # From here on the end may go unnoticed, so the timer stops. Each part of a stream renews the leases, and so
        # does a meter that slows the stream down.
        visit.renewal.stop()
        renewals: Renewals | None = getattr(request, "scope", {}).get(RENEWALS)
        if renewals is not None:
            renewals.add(visit.cleanup)
        _finish(request, response, visit)
        try:
            await visit.cleanup.wait()
        except BaseException:
            # A cancelled task returns no response, so the server closes none.
            visit.end(outcome(response.status_code, True))
            raise
        return response


def limited(*limits: Limit, name: str | None = None, **options: Unpack[RuleOptions]) -> Callable[[View], View]:
    """A decorator for views, sync and async; the options are those of ``Rule``.

    A limit is a limiter, a ``Rule``, a ``Deny``, or text such as ``"5/minute; 100/hour"``: token buckets of this view,
    or of `name`, in ``FOREBAY["STORE"]``. Several limits, and decorators directly above each other, are charged as one,
    all or none. Needs the middleware.
    For a class: ``limited(...)(TheView.as_view())``, or ``method_decorator(limited(...), "dispatch")``.
    """
    rules = rules_of(limits, options, name)

    def decorate(view: View) -> View:
        _check_view(view, "limited(...)")
        inner, all_rules = unstacked(view, rules)
        check_loop_of(rules, iscoroutinefunction(inner))
        decide_first: Callable[..., Any]
        if iscoroutinefunction(inner):

            @wraps(inner)
            async def decide_first(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
                response = await _decide_async(request, _visit_of(request), all_rules, inner)
                return await inner(request, *arguments, **named) if response is None else response

        else:

            @wraps(inner)
            def decide_first(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
                response = _decide(DjangoRequest(request), _visit_of(request), all_rules, inner)
                return inner(request, *arguments, **named) if response is None else response

        remember_rules(decide_first, inner, all_rules)
        return decide_first  # type: ignore[return-value]

    return decorate


def exempt(view: View) -> View:
    """A decorator: ``FOREBAY["RULES"]`` don't apply to this view, sync or async; its own limits do, and each ``Deny``.

    For a class: ``exempt(TheView.as_view())``, or ``method_decorator(exempt, "dispatch")``.
    """
    global _has_exempted
    _check_view(view, "exempt")
    setattr(view, EXEMPT, True)
    _has_exempted = True
    return view


_has_exempted = False


def _check_view(view: Any, decorator: str) -> None:
    if isinstance(view, type) or not callable(view):
        raise InvalidLimiter(
            f"{decorator} is for views, and {short_repr(view)} isn't one: for a class write "
            f"{decorator}(TheView.as_view()), "
            f'or put @method_decorator({decorator}, name="dispatch") above it'
        )


def _is_exempt(request: HttpRequest) -> bool:
    """Whether the request's view is exempt. The view is resolved only if there is an exempt one."""
    if not _gates().gate.given:
        return False
    resolver = get_resolver(getattr(request, "urlconf", None))
    # This imports the views, the first time.
    _ = resolver.url_patterns
    if not _has_exempted:
        return False
    try:
        return bool(getattr(resolver.resolve(request.path_info).func, EXEMPT, False))
    except Resolver404:
        return False


def _visit_of(request: HttpRequest) -> Visit:
    visit: Visit | None = getattr(request, VISIT, None)
    if visit is None:
        raise NotInstalled('a view is limited, but "forebay.contrib.django.LimitsMiddleware" isn\'t in MIDDLEWARE')
    return visit


def _decide(
    request: DjangoRequest, visit: Visit, rules: Rules | None = None, view: Any = None
) -> HttpResponseBase | None:
    return _response(_gates().decide(request, visit, rules, (request.django, view)))


def _decide_exempt(request: HttpRequest, visit: Visit) -> HttpResponseBase | None:
    return _response(_gates().decide_exempt(DjangoRequest(request), visit))


def _endpoint(source: tuple[HttpRequest, Any]) -> Endpoint:
    """The view of a request, or its method that is limited, which Django decorates anew for each request."""
    request, view = source
    match = request.resolver_match
    if match is None:
        raise InvalidLimiter("a limit as text is of a view that Django has found by a request's path: write name=...")
    endpoint = endpoint_of(match.func)
    is_method = isinstance(endpoint.identity, type) and not hasattr(view, "view_class") and not hasattr(view, "cls")
    return Endpoint(f"{endpoint.name}.{view.__name__}", endpoint.identity) if is_method else endpoint


def _response(answer: Answer | None) -> HttpResponseBase | None:
    if answer is None:
        return None
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.fields))


async def _decide_async(
    request: HttpRequest, visit: Visit, rules: Rules | None = None, view: Any = None
) -> HttpResponseBase | None:
    asked = _AsyncRequest(request)
    arguments = asked, visit, rules, (request, view), asked.fetch_user
    try:
        return _response(await _gates().decide_async(*arguments))
    except _UserUnknown:
        # Nothing has been taken, or all of it was released.
        await asked.fetch_user()
        return _response(await _gates().decide_async(*arguments))


def _finish(request: HttpRequest, response: HttpResponseBase, visit: Visit) -> None:
    """Set the header fields, and end the visit: that of a stream when the server closes it."""
    for name, value in visit.fields.items():
        response.headers[name] = value
    cleanup = visit.cleanup
    if not cleanup:
        return
    try:
        cleanup.begin(response.status_code)
    except BaseException:
        # A function for charge_on has failed, so the response is replaced.
        cleanup.end(500)
        raise
    if not isinstance(response, StreamingHttpResponse):
        # Before the client has the response and can ask again.
        cleanup.end(response.status_code)
        return
    is_incomplete = False

    def end() -> None:
        cleanup.end(outcome(response.status_code, is_incomplete))

    # Some servers don't close a response whose parts fail: Django's own for ASGI is one.
    def sync_parts(parts: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal is_incomplete
        is_incomplete = True
        try:
            for part in parts:
                yield part
                cleanup.renew_if_due()
        except Exception:
            end()
            raise
        is_incomplete = False

    async def async_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        nonlocal is_incomplete
        is_incomplete = True
        try:
            async for part in parts:
                yield part
                cleanup.renew_if_due()
        except BaseException:
            end()
            raise
        is_incomplete = False

    parts: Any = response.streaming_content
    response.streaming_content = async_parts(parts) if response.is_async else sync_parts(parts)

    def ending(close: Callable[[], None]) -> Callable[[], None]:
        def close_and_end() -> None:
            try:
                close()
            finally:
                end()

        return close_and_end

    response.close = ending(response.close)  # type: ignore[method-assign]
    # An outer middleware may replace the response, which is then never closed. The request is.
    request.close = ending(request.close)  # type: ignore[method-assign]
