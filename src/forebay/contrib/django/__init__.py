"""Limits in a Django project: of all requests and of views, sync and async. See docs/frameworks.md.

``"forebay.contrib.django.LimitsMiddleware"`` in ``MIDDLEWARE``, the rules in ``FOREBAY``, ``@limited(limiter)`` and
``@exempt``. With ``"forebay.contrib.django"`` in ``INSTALLED_APPS``, ``manage.py check`` looks at the settings. Needs
``forebay[django]``. For Django REST framework see ``forebay.contrib.rest_framework``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, Final, TypeVar, Unpack

from forebay.extras import Needs

with Needs("django", __name__):
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured
    from django.core.signals import setting_changed
    from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
    from django.urls import Resolver404, get_resolver
    from django.utils.module_loading import import_string

from forebay.contrib.views import (
    Asker,
    AsyncVisit,
    NotInstalled,
    RuleOptions,
    Rules,
    Visit,
    mark,
    rules_of,
    stacked,
    without_body_limits,
)
from forebay.core.limiter import Limiter
from forebay.errors import InvalidLimiter, shown
from forebay.web import DISCONNECTED, Answer, Gate, Rule
from forebay.web.native_requests import methods, readings
from forebay.web.rules import check_event_loop, outcome

__all__ = ["DjangoRequest", "LimitsMiddleware", "exempt", "limited", "setting"]

SETTINGS: Final = {"RULES": (), "CLIENT": None, "HEADERS": "draft-10", "PARTITION_KEYS": False, "STORE": None}
VISIT: Final = "_forebay_visit"
EXEMPT: Final = "_forebay_exempt"
View = TypeVar("View", bound=Callable[..., Any])


class DjangoRequest:
    """The request as key functions see it: `django` is Django's own, `native` its ``META``."""

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
        """Of these Django goes by the second, which has no ``SCRIPT_NAME`` in front."""
        return readings(self.django.path, self.django.path_info)

    @property
    def peer(self) -> str | None:
        return self.native.get("REMOTE_ADDR") or None

    @property
    def user(self) -> str | None:
        """The primary key of the user who has logged in, by Django's ``AuthenticationMiddleware``."""
        user = getattr(self.django, "user", None)
        return str(user.pk) if user is not None and user.is_authenticated else None

    def header(self, name: str) -> str | None:
        return self.django.headers.get(name)


class _UserUnknown(BaseException):
    """Somebody wants to know the user, who can only be fetched with await."""


class _AsyncRequest(DjangoRequest):
    """Tells the user once that is known, since the database must not be waited for here."""

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
        fetch: Callable[[], Awaitable[Any]] | None = getattr(self.django, "auser", None)
        user = None if fetch is None else await fetch()
        self.fetched = str(user.pk) if user is not None and user.is_authenticated else None


def options() -> dict[str, Any]:
    """``settings.FOREBAY``."""
    given = getattr(settings, "FOREBAY", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f'FOREBAY is a dict such as {{"RULES": "shop.limits.rules"}}, not {shown(given)}')
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise ImproperlyConfigured(f"FOREBAY has no {min(map(shown, unknown))}: there are {', '.join(SETTINGS)}")
    return given


def setting(name: str) -> Any:
    """Of ``settings.FOREBAY``: a value, or what stands at the dotted path in its place."""
    value = options().get(name, SETTINGS[name])
    if not isinstance(value, str) or name == "HEADERS":
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(f'FOREBAY["{name}"] is the dotted path of nothing: {error}') from error


def make_asker() -> Asker:
    """As the settings say."""
    told = {"headers": setting("HEADERS"), "partition_keys": setting("PARTITION_KEYS")}
    gate = Gate(setting("RULES"), client=setting("CLIENT"), **told)
    instead = "put WSGIMiddleware or ASGIMiddleware of forebay.web around the application in wsgi.py or asgi.py"
    return Asker(without_body_limits(gate, instead), **told)


_asker = cache(make_asker)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "FOREBAY":
        _asker.cache_clear()


# By override_settings, in tests.
setting_changed.connect(_forget)


class LimitsMiddleware:
    """Asks ``FOREBAY["RULES"]`` about every request, and sees to the views' own limits.

    Below ``AuthenticationMiddleware`` if keys are of users. Sync and async; the latter never waits, but for the user
    where a rule is for users, and where it is over an ``AsyncRedisStore`` for Redis.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        gate = _asker().gate
        check_event_loop(gate.rules, iscoroutinefunction(get_response), gate.client)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if iscoroutinefunction(self):
            return self._answer_async(request)
        visit = Visit()
        setattr(request, VISIT, visit)
        response = None if _is_exempt(request) else _ask(DjangoRequest(request), visit)
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
        response = None if _is_exempt(request) else await _ask_async(request, visit)
        if response is None:
            try:
                response = await self.get_response(request)
            except Exception:
                visit.end(500)
                raise
            except BaseException:
                visit.end(DISCONNECTED)
                raise
        # From here on nobody promises to tell the end: what is sent in parts renews by each.
        visit.renewal.stop()
        _finish(request, response, visit)
        try:
            await visit.cleanup.wait()
        except BaseException:
            # Whoever cancels never sees the response, and so closes none.
            visit.end(outcome(response.status_code, True))
            raise
        return response


def limited(*limits: Limiter | Rule, **options: Unpack[RuleOptions]) -> Callable[[View], View]:
    """A decorator for views, sync and async; the options are those of ``Rule``.

    Several limiters, and several of these decorators one upon the other, are asked as one, all or none. Needs the
    middleware. For a class: ``limited(...)(TheView.as_view())``, or ``method_decorator(limited(...), "dispatch")``.
    """
    rules = rules_of(limits, options)

    def decorate(view: View) -> View:
        _check_view(view, "limited(...)")
        inner, all_rules = stacked(view, rules)
        check_event_loop(rules, iscoroutinefunction(inner))
        ask_first: Callable[..., Any]
        if iscoroutinefunction(inner):

            @wraps(inner)
            async def ask_first(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
                response = await _ask_async(request, _visit_of(request), all_rules)
                return await inner(request, *arguments, **named) if response is None else response

        else:

            @wraps(inner)
            def ask_first(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponseBase:
                response = _ask(DjangoRequest(request), _visit_of(request), all_rules)
                return inner(request, *arguments, **named) if response is None else response

        mark(ask_first, inner, all_rules)
        return ask_first  # type: ignore[return-value]

    return decorate


def exempt(view: View) -> View:
    """A decorator: ``FOREBAY["RULES"]`` are not for this view, sync or async; its own limits are.

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
            f"{decorator} is for views, and {shown(view)} isn't one: of a class say {decorator}(TheView.as_view()), or "
            f'put @method_decorator({decorator}, name="dispatch") upon it'
        )


def _is_exempt(request: HttpRequest) -> bool:
    """Whether the request will come to a view that is exempt. Only where there is such a view, it is looked for."""
    if not _asker().gate.rules:
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
        raise NotInstalled(
            'a view is limited, but "forebay.contrib.django.LimitsMiddleware" doesn\'t stand in MIDDLEWARE'
        )
    return visit


def _ask(request: DjangoRequest, visit: Visit, rules: Rules | None = None) -> HttpResponseBase | None:
    return _response(_asker().ask(request, visit, rules))


def _response(answer: Answer | None) -> HttpResponseBase | None:
    if answer is None:
        return None
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.fields))


async def _ask_async(request: HttpRequest, visit: Visit, rules: Rules | None = None) -> HttpResponseBase | None:
    asked = _AsyncRequest(request)
    try:
        return _response(await _asker().ask_async(asked, visit, rules))
    except _UserUnknown:
        # Nothing has been taken, or all of it given back.
        await asked.fetch_user()
        return _response(await _asker().ask_async(asked, visit, rules))


def _finish(request: HttpRequest, response: HttpResponseBase, visit: Visit) -> None:
    """Tell of the limits, and see to the end: of a stream, when the server closes it."""
    for name, value in visit.fields.items():
        response.headers[name] = value
    cleanup = visit.cleanup
    if not cleanup:
        return
    cleanup.begin(response.status_code)
    if not isinstance(response, StreamingHttpResponse):
        # Before the client has it and can ask again.
        cleanup.end(response.status_code)
        return
    is_broken_off = False

    def end() -> None:
        cleanup.end(outcome(response.status_code, is_broken_off))

    # A server may not close a response whose parts fail: Django's own for ASGI doesn't.
    def sync_parts(parts: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal is_broken_off
        is_broken_off = True
        try:
            for part in parts:
                yield part
                cleanup.renew_with_part()
        except Exception:
            end()
            raise
        is_broken_off = False

    async def async_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        nonlocal is_broken_off
        is_broken_off = True
        try:
            async for part in parts:
                yield part
                cleanup.renew_with_part()
        except BaseException:
            end()
            raise
        is_broken_off = False

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
    # An outer middleware may send another response in its place, and nobody closes this one. The request is closed.
    request.close = ending(request.close)  # type: ignore[method-assign]
