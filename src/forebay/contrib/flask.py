"""Limits in a Flask application: of all requests, of blueprints and of views. See docs/frameworks.md.

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

from forebay.contrib.views import Asker, NotInstalled, RuleOptions, Rules, Visit, mark, rules_of, stacked
from forebay.core.limiter import Limiter
from forebay.errors import InvalidLimiter, shown
from forebay.web import Answer, BodyLimit, Denial, Gate, Rule, WSGIMiddleware
from forebay.web.answers import retry_after
from forebay.web.native_requests import WSGIRequest
from forebay.web.request import Environ, KeyFunction
from forebay.web.rules import check_event_loop
from forebay.web.wsgi import Application, StartResponse, TrackedResponse

__all__ = ["Limits", "ServiceUnavailable", "TooManyRequests"]

EXTENSION: Final = "forebay"
EXEMPT: Final = "_forebay_exempt"
View = TypeVar("View", bound="Callable[..., Any] | Blueprint")


class _Denied(exceptions.HTTPException):
    """Raised for a request that is denied; `denial` says why. An ``app.errorhandler`` may make its own response."""

    denial: Denial

    @classmethod
    def because_of(cls, denial: Denial, response: Response) -> _Denied:
        error = cls(response=response)
        error.denial = denial
        return error


class TooManyRequests(_Denied, exceptions.TooManyRequests): ...


class ServiceUnavailable(_Denied, exceptions.ServiceUnavailable): ...


# Flask finds a handler by the class. A denial of another status isn't an error, and sent as it is.
_ERRORS: Final[dict[int, type[_Denied]]] = {429: TooManyRequests, 503: ServiceUnavailable}


class Limits:
    """The extension: ``Limits(app, rules)``, or ``limits = Limits(rules=rules)`` and later ``limits.init_app(app)``.

    `rules` are asked about every request before its view, as are those of the views and blueprints that ``limit``
    decorates when it comes to them. See ``Gate`` for the arguments. Denials are raised, and go through the error
    handlers and ``after_request`` of the application.
    """

    def __init__(
        self,
        app: Flask | None = None,
        rules: Iterable[Rule | BodyLimit] = (),
        *,
        client: KeyFunction | None = None,
        headers: str | Iterable[str] = "draft-10",
        partition_keys: bool = False,
    ) -> None:
        if app is not None and not isinstance(app, Flask):
            raise InvalidLimiter(f"Limits(app, rules), or Limits(rules=[...]): {shown(app)} is no Flask application")
        self._gate = Gate(rules, client=client, headers=headers, partition_keys=partition_keys, in_loop=False)
        self._asker = Asker(self._gate, headers=headers, partition_keys=partition_keys, in_loop=False)
        # In the environment, of visits to an application of these limits.
        self._visit = f"forebay.visit.{id(self)}"
        self._has_exempted = False
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        if EXTENSION in app.extensions:
            raise InvalidLimiter("this application has its Limits already: give them all rules")
        app.extensions[EXTENSION] = self
        visited, body_limits = self._visited(app.wsgi_app), self._gate.body_limits
        around: Any = WSGIMiddleware(visited, body_limits) if body_limits else visited
        app.wsgi_app = around  # type: ignore[method-assign]
        app.before_request(self._ask_for_all)

    def limit(self, *limits: Limiter | Rule, **options: Unpack[RuleOptions]) -> Callable[[View], View]:
        """A decorator for views, beneath ``route``, and for blueprints; the options are those of ``Rule``.

        Several limiters, and several of these decorators one upon the other, are asked as one, all or none.
        """
        rules = rules_of(limits, options)
        check_event_loop(rules, in_loop=False)

        def decorate(view: View) -> View:
            if isinstance(view, Blueprint):
                view.before_request(lambda: self._ask(rules))
                return view
            _check_view(view, "limit(...)")
            inner, all_rules = stacked(view, rules)

            @wraps(inner)
            def limited(*arguments: Any, **named: Any) -> Any:
                self._ask(all_rules)
                return current_app.ensure_sync(inner)(*arguments, **named)

            mark(limited, inner, all_rules)
            return limited  # type: ignore[return-value]

        return decorate

    def exempt(self, view: View) -> View:
        """A decorator: the rules for all requests are not for this view or blueprint."""
        if not isinstance(view, Blueprint):
            _check_view(view, "exempt")
        setattr(view, EXEMPT, True)
        self._has_exempted = True
        return view

    def _ask_for_all(self) -> None:
        if self._gate.rules and not (self._has_exempted and _is_exempt()):
            self._ask(None)

    def _ask(self, rules: Rules | None) -> None:
        environ = request.environ
        visit = environ.get(self._visit)
        if visit is None:
            raise NotInstalled("these limits don't know the application: Limits(app), or limits.init_app(app)")
        # Flask has found its route by now, whatever the path looks like.
        route = None if request.url_rule is None else request.url_rule.rule
        answer = self._asker.ask(WSGIRequest(environ, route), visit, rules)
        if answer is None:
            return
        response = _response(answer)
        error = _ERRORS.get(answer.status)
        raise exceptions.HTTPException(response=response) if error is None else error.because_of(visit.denial, response)

    def _visited(self, app: Application) -> Application:
        """Opens the visits, and ends them when the answer has been sent."""
        key = self._visit

        def visited(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            visit = environ[key] = Visit()
            ended = _TrackedResponse(app, environ, start_response, visit)
            if visit.cleanup or not ended.is_started:
                return ended
            # Usually there is nothing to end, and the server may have its own way of sending a file. Whatever is yet
            # taken, while the body is sent, is given back at once: nobody will see to its end.
            visit.cleanup.ended_status = ended.status
            return ended.body

        return visited


class _TrackedResponse(TrackedResponse):
    """An answer to which what the visit has gathered is added when it begins."""

    def __init__(self, app: Application, environ: Environ, start_response: StartResponse, visit: Visit) -> None:
        self.visit = visit
        super().__init__(app, environ, start_response, (), visit.cleanup)

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        fields, denial = self.visit.fields, self.visit.denial
        if fields:
            # Instead of the view's own: of most of them there may be one only.
            names = {name.lower() for name in fields}
            headers = [header for header in headers if header[0].lower() not in names]
            headers += fields.items()
        # A rule's own answer says what it wants to. That of an error handler has yet to tell when to come back.
        if denial is not None and denial.rule.answer is None:
            names = {name.lower() for name, _ in headers}
            told = [*denial.fields, *retry_after(denial)]
            headers = [*headers, *(field for field in told if field[0].lower() not in names)]
        return super().start(status, headers, exc_info)


def _check_view(view: Any, decorator: str) -> None:
    if isinstance(view, type) or not callable(view):
        raise InvalidLimiter(
            f"{decorator} is for views and blueprints, and {shown(view)} is neither: for a class say "
            f'{decorator}(TheView.as_view("name"))'
        )


def _is_exempt() -> bool:
    if getattr(current_app.view_functions.get(request.endpoint or ""), EXEMPT, False):
        return True
    return any(getattr(current_app.blueprints[name], EXEMPT, False) for name in request.blueprints)


def _response(answer: Answer) -> Response:
    return current_app.response_class(answer.body, answer.status, answer.headers)
