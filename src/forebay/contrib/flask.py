"""Limits in a Flask application: for all requests, for blueprints and for views. See docs/frameworks.md.

``limits = Limits(app)`` and ``@limits.limit(limiter)``. Needs ``forebay[flask]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, TypeVar, Unpack

from forebay.extras import Needs

with Needs("flask", __name__):
    from flask import Blueprint, Flask, Response, current_app, request
    from werkzeug import exceptions

from forebay.contrib.endpoints import Endpoint, TextLimit
from forebay.contrib.views import (
    AppGates,
    Limit,
    NotInstalled,
    RuleOptions,
    Rules,
    Visit,
    check_loop_of,
    remember_rules,
    rules_of,
    unstacked,
)
from forebay.errors import InvalidLimiter, short_repr
from forebay.web import Answer, Denial, WSGIMiddleware
from forebay.web.answers import retry_after
from forebay.web.live_gate import VersionedRules, at_start, gate_of
from forebay.web.native_requests import WSGIRequest
from forebay.web.options import GateOptions, GivenRules
from forebay.web.renewals import renew_while_reading, renewals_of
from forebay.web.request import Environ
from forebay.web.wsgi import Application, StartResponse, TrackedResponse

__all__ = ["Limits", "ServiceUnavailable", "TooManyRequests"]

EXTENSION: Final = "forebay"
EXEMPT: Final = "_forebay_exempt"
View = TypeVar("View", bound="Callable[..., Any] | Blueprint")


class _Denied(exceptions.HTTPException):
    """Raised for a denied request; `denial` says why."""

    denial: Denial

    @classmethod
    def because_of(cls, denial: Denial, response: Response) -> _Denied:
        error = cls(response=response)
        error.denial = denial
        return error


class TooManyRequests(_Denied, exceptions.TooManyRequests):
    """A request above a limit: 429. ``denial`` says why; an ``app.errorhandler`` may make its own response."""


class ServiceUnavailable(_Denied, exceptions.ServiceUnavailable):
    """An undecided request: 503. Redis is unavailable, or the store has no room. ``denial`` says which."""


# Flask finds a handler by the class. A denial of another status has no class, and is sent as it is.
_ERRORS: Final[dict[int, type[_Denied]]] = {429: TooManyRequests, 503: ServiceUnavailable}


class Limits:
    """The extension: ``Limits(app, rules)``, or ``limits = Limits(rules=rules)`` and later ``limits.init_app(app)``.

    `rules` are charged for every request, and the limits of a view or blueprint before it is called. `store` has the
    limits that views give as text. See ``Gate`` for the other arguments. Denials are raised, and go through the error
    handlers and ``after_request`` of the application.
    """

    def __init__(
        self,
        app: Flask | None = None,
        rules: GivenRules | VersionedRules = (),
        *,
        store: Any = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if app is not None and not isinstance(app, Flask):
            raise InvalidLimiter(
                f"Limits(app, rules), or Limits(rules=[...]): {short_repr(app)} is no Flask application"
            )
        self._gate = gate_of(rules, **options, in_loop=False)
        self._has_store = store is not None
        self._gates = AppGates(self._gate, _endpoint, store, **options, in_loop=False)
        self._options = options
        # A visit's key in the environment: of these limits.
        self._visit_key = f"forebay.visit.{id(self)}"
        self._has_exempted = False
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        if EXTENSION in app.extensions:
            raise InvalidLimiter("this application has Limits already: pass all rules to them")
        app.extensions[EXTENSION] = self
        inner: Any = app.wsgi_app
        if limits := at_start(self._gate).body_limits:
            # Inside: permits are held until the last bytes have had their turn.
            inner = WSGIMiddleware(inner, limits, **self._options)
        visited: Any = self._visited(inner)
        app.wsgi_app = visited  # type: ignore[method-assign]
        app.before_request(self._decide_for_all)

    def limit(self, *limits: Limit, name: str | None = None, **options: Unpack[RuleOptions]) -> Callable[[View], View]:
        """A decorator for views, beneath ``route``, and for blueprints; the options are those of ``Rule``.

        A limit is a limiter, a ``Rule``, a ``Deny``, or text such as ``"5/minute; 100/hour"``: token buckets of this
        endpoint, or of `name`, in the `store` of these limits. Several limits, and decorators directly above each
        other, are charged as one, all or none.
        """
        rules = rules_of(limits, options, name)
        check_loop_of(rules, in_loop=False)
        if not self._has_store and any(isinstance(rule, TextLimit) for rule in rules):
            text = next(limit for limit in limits if isinstance(limit, str))
            raise InvalidLimiter(
                f"the limits of the text {short_repr(text)} are kept in a store: write Limits(app, store=store)"
            )

        def decorate(view: View) -> View:
            if isinstance(view, Blueprint):
                blueprint = view.name
                view.before_request(lambda: self._decide(rules, blueprint))
                return view
            _check_view(view, "limit(...)")
            inner, all_rules = unstacked(view, rules)

            @wraps(inner)
            def limited(*arguments: Any, **named: Any) -> Any:
                self._decide(all_rules)
                return current_app.ensure_sync(inner)(*arguments, **named)

            remember_rules(limited, inner, all_rules)
            return limited  # type: ignore[return-value]

        return decorate

    def exempt(self, view: View) -> View:
        """A decorator: the rules for all requests don't apply to this view or blueprint, except each ``Deny``."""
        if not isinstance(view, Blueprint):
            _check_view(view, "exempt")
        setattr(view, EXEMPT, True)
        self._has_exempted = True
        return view

    def _decide_for_all(self) -> None:
        if self._gate.given:
            self._decide(None, is_exempt=self._has_exempted and _is_exempt())

    def _decide(self, rules: Rules | None, blueprint: str | None = None, is_exempt: bool = False) -> None:
        environ = request.environ
        visit = environ.get(self._visit_key)
        if visit is None:
            raise NotInstalled("these limits don't know the application: write Limits(app), or limits.init_app(app)")
        # Flask has found the route by now, however the path was written.
        route = None if request.url_rule is None else request.url_rule.rule
        asked = WSGIRequest(environ, route)
        if is_exempt:
            answer = self._gates.decide_exempt(asked, visit)
        else:
            answer = self._gates.decide(asked, visit, rules, blueprint)
        if visit.cleanup.has_renewals:
            renew_while_reading(environ, renewals_of(environ))
        if answer is None:
            return
        response = _response(answer)
        error = _ERRORS.get(answer.status)
        raise exceptions.HTTPException(response=response) if error is None else error.because_of(visit.denial, response)

    def _visited(self, app: Application) -> Application:
        """Opens the visits, and ends them when the response has been sent."""
        key = self._visit_key

        def visited(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            visit = environ[key] = Visit()
            response = _TrackedResponse(app, environ, start_response, visit)
            if visit.cleanup or not response.is_started:
                return response
            # Usually there is nothing to end, and the server may send a file in its own way. Permits that are taken
            # while the body is sent are then released at once.
            visit.cleanup.ended_status = response.status
            return response.body

        return visited


class _TrackedResponse(TrackedResponse):
    """A response that gets the visit's fields when it starts."""

    def __init__(self, app: Application, environ: Environ, start_response: StartResponse, visit: Visit) -> None:
        self.visit = visit
        super().__init__(app, environ, start_response, (), visit.cleanup)

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        fields, denial = self.visit.fields, self.visit.denial
        if fields:
            # They replace the view's own: most fields may occur once only.
            names = {name.lower() for name in fields}
            headers = [header for header in headers if header[0].lower() not in names]
            headers += fields.items()
        # An error handler's response gets the denial's fields. A rule's own answer is complete.
        if denial is not None and denial.rule.answer is None:
            names = {name.lower() for name, _ in headers}
            added = [*denial.fields, *retry_after(denial.retry_after_s)]
            headers = [*headers, *(field for field in added if field[0].lower() not in names)]
        return super().start(status, headers, exc_info)


def _endpoint(blueprint: str | None) -> Endpoint:
    """The endpoint of the current request, in Flask's sense; a limit of a `blueprint` is another than the view's."""
    of_blueprint = "" if blueprint is None else f" in {blueprint}"
    return Endpoint(f"{current_app.name}.{request.endpoint}{of_blueprint}")


def _check_view(view: Any, decorator: str) -> None:
    if isinstance(view, type) or not callable(view):
        raise InvalidLimiter(
            f"{decorator} is for views and blueprints, and {short_repr(view)} is neither: for a class say "
            f'{decorator}(TheView.as_view("name"))'
        )


def _is_exempt() -> bool:
    if getattr(current_app.view_functions.get(request.endpoint or ""), EXEMPT, False):
        return True
    return any(getattr(current_app.blueprints[name], EXEMPT, False) for name in request.blueprints)


def _response(answer: Answer) -> Response:
    return current_app.response_class(answer.body, answer.status, answer.headers)
