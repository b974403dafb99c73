"""Which requests a limit is for, what they are charged, and what is answered when they are denied."""

from __future__ import annotations

import re
import string
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.all_of import AllOf
from forebay.core.limiter import Limiter
from forebay.errors import InvalidLimiter, shown
from forebay.web.functions import (
    check_function,
    check_statuses,
    checked_cost,
    has_to_be_awaited,
    said,
    yes_or_no,
)
from forebay.web.keys import everyone
from forebay.web.native_requests import readings
from forebay.web.request import KeyFunction, Request

if TYPE_CHECKING:
    from forebay.redis.aio_limiters import AsyncRedisLimiter
    from forebay.redis.store import RedisLimiter
    from forebay.web.answers import Denial

__all__ = ["DISCONNECTED", "Answer", "BodyLimit", "Rule"]

DISCONNECTED: Final = 499
"""What `charge_on` is asked about a request whose client went away before it had the whole answer that it wanted."""


def outcome(status: int, is_gone: bool) -> int:
    """What a request came to. A refusal is one however little of it the client has read, or it would be free."""
    return DISCONNECTED if is_gone and status < 400 else status


_PLACEHOLDER: Final = re.compile(r"\{[^{}/]*\}|\*")
# As in {id}, {id:int} or Falcon's {id:int(min=1)}.
_NAMED: Final = re.compile(r"\*|\{[^{}/:]*(:\w+(\([^{}/]*\))?)?\}")
# What stands for them in a pattern that is read as paths are.
_ANYTHING: Final = "\ue000"
_SEGMENT: Final = "\ue001"
_MARKS: Final = string.punctuation.replace("/", "")
_ANY_MARK: Final = f"[{re.escape(_MARKS)}]"
# Of RFC 9110: a method or a field's name, and a field's value.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The headers with the length of the body."""
        own = [(name, value) for name, value in self.headers if name.lower() != "content-length"]
        return [*own, ("Content-Length", str(len(self.body)))]


@dataclass(frozen=True, slots=True)
class Where:
    """Paths and methods. Nothing said is everything."""

    pattern: re.Pattern[str] | None
    methods: frozenset[str]

    @classmethod
    def of(cls, path: str | Iterable[str] | None, methods: str | Iterable[str], ignore_case: bool) -> Where:
        paths = [] if path is None else _listed(path, "path")
        if path is not None and not paths:
            raise InvalidLimiter("path is a pattern or several, or None for every path: an empty list is neither")
        names = _listed(methods, "methods")
        for name in names:
            if not isinstance(name, str) or not _TOKEN.fullmatch(name):
                raise InvalidLimiter(f'methods are names such as "GET", not {shown(name)}')
            if name.upper() in ("*", "ANY", "ALL"):
                raise InvalidLimiter(f"no request has the method {shown(name)}: leave methods out for every method")
        capitals = {name.upper() for name in names}
        if not isinstance(ignore_case, bool):
            raise InvalidLimiter(f"ignore_case is True or False, not {shown(ignore_case)}")
        flags = re.DOTALL | re.IGNORECASE if ignore_case else re.DOTALL
        pattern = re.compile("|".join(map(_pattern, paths)), flags) if paths else None
        # Frameworks answer HEAD with the handler of GET.
        return cls(pattern, frozenset(capitals | {"HEAD"} if "GET" in capitals else capitals))

    @property
    def is_everywhere(self) -> bool:
        return self.pattern is None and not self.methods

    def matches(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> bool:
        """Whether an application may come by one of these to what the rule is for."""
        if self.methods and self.methods.isdisjoint(methods):
            return False
        if self.pattern is None or not paths:
            return True
        # A generator would take as long as the match.
        for path in paths:  # noqa: SIM110
            if self.pattern.fullmatch(path) is not None:
                return True
        return False


def check_answer(answer: Answer) -> None:
    """What can't be sent fails where it is written."""
    status, headers, body = answer
    if type(status) is bool or not isinstance(status, int) or status not in range(200, 600):
        raise InvalidLimiter(f"an Answer has a status such as 429, not {shown(status)}")
    if not isinstance(headers, (list, tuple)) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and _is_field(*pair) for pair in headers
    ):
        raise InvalidLimiter(f'an Answer has headers such as (("Content-Type", "text/plain"),), not {shown(headers)}')
    if not isinstance(body, bytes):
        raise InvalidLimiter(f"an Answer has a body of bytes, not {shown(body)}")


def _is_field(name: Any, value: Any) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and _TOKEN.fullmatch(name) is not None
        and _VALUE.fullmatch(value) is not None
    )


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, (Mapping, bytes)):
        raise InvalidLimiter(f"{what} is text or several texts, not {shown(values)}")
    return list(values)


def _pattern(path: str) -> str:
    """In any case linear in the length of a path, which whoever asks can choose."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidLimiter(f'a path pattern begins with "/", as in "/users/{{id}}" or "/api/*", not {shown(path)}')
    if "?" in path or "#" in path:
        raise InvalidLimiter(
            f"the path pattern {shown(path)} has more than a path: a query is looked at in exempt or cost, and "
            "within a path write %3F and %23"
        )
    for placeholder in _PLACEHOLDER.finditer(path):
        if not _NAMED.fullmatch(placeholder[0]):
            raise InvalidLimiter(
                f"the path pattern {shown(path)} has {placeholder[0]}, and no regular expressions are in one: write "
                "{name} for one segment, {name:path} or * for anything"
            )
    text = _PLACEHOLDER.sub(_stand_in, path)
    for segment, written in zip(text.split("/"), path.split("/"), strict=True):
        if segment.count(_ANYTHING) + segment.count(_SEGMENT) > 1 or any(c in segment for c in "{}<>"):
            raise InvalidLimiter(
                f"the path pattern {shown(path)} has {shown(written)}: a segment has one {{name}} or one * at the most"
            )
    if text.rstrip("/").removesuffix("/" + _ANYTHING).count(_ANYTHING) > 1:
        raise InvalidLimiter(
            f"the path pattern {shown(path)} has more than one *, besides the one at its end: write several patterns"
        )
    texts = readings(text)
    if not texts:
        raise InvalidLimiter(f"the path pattern {shown(path)} has {len(path)} characters: too many")
    has_all_below = path.rstrip("/").endswith("/*")
    return "|".join(dict.fromkeys(_expression(text, has_all_below) for text in texts))


def _stand_in(placeholder: re.Match[str]) -> str:
    return _ANYTHING if placeholder[0] == "*" or placeholder[0].endswith(":path}") else _SEGMENT


def _expression(text: str, has_all_below: bool) -> str:
    # CherryPy adds an index, and others leave out the end of a line.
    text, end = text.rstrip("/"), r"(?:/index)?/*\n?"
    if has_all_below:
        text, end = text.removesuffix("/" + _ANYTHING), r"(?:/.*|\n)?"
    *before, last = text.split("/")
    # Falcon takes an empty segment, too, between others.
    segments = ["[^/]*" if segment == _SEGMENT else _expression_of(segment) for segment in before]
    if has_all_below and last == _SEGMENT:
        return "/".join([*segments, "(?:[^/]+|[^/]*/.*)"])
    return "/".join([*segments, _expression_of(last)]) + end


def _expression_of(segment: str) -> str:
    # CherryPy takes each mark for an underscore.
    parts = {_ANYTHING: ".*", _SEGMENT: "[^/]+", **dict.fromkeys(_MARKS, _ANY_MARK)}
    return "".join(parts.get(character) or re.escape(character) for character in segment)


def is_redis(store: object) -> bool:
    """Whether it is a ``RedisStore``, which nobody has to await."""
    return hasattr(store, "_make_limiter") and not getattr(store, "is_awaited", False)


def kind_of(limiter: Any) -> type:
    """The public class of a limiter, also of one over Redis."""
    kind: type = getattr(limiter, "_kind", type(limiter))
    return kind


@dataclass(frozen=True)
class Rule:
    """A limit and the requests that it is for.

    * `limiter`: any limiter. A ``Concurrency`` is held while the request is handled and its answer is sent; its lease
      must last longer than the longest request, or than the longest pause in a streamed answer, which renews it. Over
      Redis: in a WSGI application over a ``RedisStore``, in an ASGI application over an ``AsyncRedisStore``.
    * `path`: a pattern or several; ``*`` is anything, ``{name}`` one segment, ``{name:path}`` anything, a slash at the
      end is the same as none. ``"/api/*"`` is ``/api`` and all below. None: every path. It is matched with all that a
      router may take a request's path for: with slashes merged, dots resolved, encodings decoded, a root taken off.
    * `methods`: as in ``{"POST", "PUT"}``; empty: all. ``GET`` is ``HEAD``, too; a WebSocket's is ``"WEBSOCKET"``.
      What ``X-HTTP-Method-Override`` asks for counts as well.
    * `ignore_case`: whether ``/Login`` is ``/login``, for routers to which it is.
    * `key`: for whom a request counts, a callable that takes a ``Request``; None: the client's address.
    * `cost`: how many permits, a number or a callable that takes a ``Request``.
    * `exempt`: a callable that takes a ``Request``; if it says yes, the rule is not for that one.
    * `charge_on`: statuses of answers that stay charged, as in ``{401, 403}`` for failed logins or
      ``range(100, 500)`` for all but the server's own errors, or a callable that takes a status. Others get their
      permits back. The permits are taken before the handler runs, so many guesses at once don't get past the limit. A
      client that went away before it had the whole answer is 499, unless that was an error. None: all are charged.
      The function may be ``async def``, as those for `key`, `cost` and `exempt`, where the application is asynchronous.
    * `status`: of a denial; by default 429, and 503 for a ``Concurrency`` that everyone shares.
    * `answer`: what is sent instead of the problem report: an ``Answer`` (with status 200, a shadow ban), or a callable
      that takes the ``Request`` and the ``Denial`` and returns one.

    Raises ``InvalidLimiter``.
    """

    limiter: Limiter | RedisLimiter | AsyncRedisLimiter
    _: KW_ONLY
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    key: KeyFunction | None = None
    cost: int | Callable[[Request], int | Awaitable[int]] = 1
    exempt: Callable[[Request], bool | Awaitable[bool]] | None = None
    charge_on: Container[int] | Callable[[int], bool | Awaitable[bool]] | None = None
    status: int | None = None
    answer: Answer | Callable[[Request, Denial], Answer] | None = None
    where: Where = field(init=False, repr=False)

    def __post_init__(self) -> None:
        limiter: Any = self.limiter
        if isinstance(limiter, AllOf) or hasattr(limiter, "limiters"):
            raise InvalidLimiter(
                f"a rule is for one limiter, not {shown(limiter)}: several rules that match a request are asked as one"
            )
        if hasattr(limiter, "_make_limiter") and not hasattr(limiter, "_kind"):
            raise InvalidLimiter(
                f"a rule takes a limiter over a Store, a SyncedStore or a RedisStore, not {shown(limiter)}: ask one "
                "that is leased where the request is handled, or take a SyncedStore"
            )
        if not isinstance(limiter, Limiter) and not hasattr(limiter, "_kind"):
            raise InvalidLimiter(
                f"a rule is for one limiter, not {shown(limiter)}: say TokenBucket(store, 'orders', '5/minute')"
            )
        for what in ("key", "exempt"):
            if getattr(self, what) is not None:
                check_function(f"{what} is a callable that takes a request", getattr(self, what))
        if callable(self.cost):
            check_function("cost is a whole number or a callable that takes a request", self.cost)
        elif isinstance(self.cost, bool) or not isinstance(self.cost, int) or self.cost < 0:
            raise InvalidLimiter(f"cost is a whole number or a callable that takes a request, not {shown(self.cost)}")
        if self.status is not None and (type(self.status) is not int or self.status not in range(200, 600)):
            raise InvalidLimiter(f"status is an HTTP status such as 429, not {shown(self.status)}")
        if isinstance(self.answer, Answer):
            check_answer(self.answer)
        elif self.answer is not None:
            check_function("answer is an Answer or a callable that makes one of a request and a denial", self.answer, 2)
            if has_to_be_awaited(self.answer):
                raise InvalidLimiter(f"answer is a plain function, and {shown(self.answer)} has to be awaited")
        if callable(self.charge_on):
            check_function("charge_on is a set of statuses or a callable that takes a status", self.charge_on)
        elif self.charge_on is not None:
            check_statuses("charge_on", self.charge_on)
        if self.charge_on is not None and self.is_held:
            raise InvalidLimiter(f"{self.limiter!r} gives every permit back: charge_on says nothing about it")
        object.__setattr__(self, "where", Where.of(self.path, self.methods, self.ignore_case))

    @property
    def denial_status(self) -> int:
        if self.status is not None:
            return self.status
        return 503 if self.is_held and self.key is everyone else 429

    @property
    def is_held(self) -> bool:
        return kind_of(self.limiter) is Concurrency

    @property
    def is_remote(self) -> bool:
        """Whether a decision is waited for."""
        return not isinstance(self.limiter, Limiter)

    @property
    def is_awaited(self) -> bool:
        limiter: Any = self.limiter
        return self.is_remote and bool(limiter.store.is_awaited)

    @cached_property
    def is_settled_later(self) -> bool:
        """Whether somebody has to be awaited who says what stays charged."""
        return has_to_be_awaited(self.charge_on)

    @property
    def is_hidden(self) -> bool:
        """Whether its denial looks like success, so that no field may tell of it."""
        return isinstance(self.answer, Answer) and self.answer.status < 400

    @property
    def functions_to_await(self) -> list[Any]:
        return [
            function for function in (self.key, self.cost, self.exempt, self.charge_on) if has_to_be_awaited(function)
        ]

    def exempts(self, request: Request) -> bool:
        return self.exempt is not None and yes_or_no(self, "exempt", said(self.exempt, request))

    def cost_of(self, request: Request) -> int:
        return checked_cost(self, said(self.cost, request)) if callable(self.cost) else self.cost

    def stays_charged(self, status: int) -> bool:
        if self.charge_on is None:
            return True
        return self.stays(self.charge_on(status)) if callable(self.charge_on) else status in self.charge_on

    def stays(self, said_so: object) -> bool:
        """What `charge_on` has said of a status."""
        return yes_or_no(self, "charge_on", said_so)


@dataclass(frozen=True)
class BodyLimit:
    """How many bytes a request's body may have: more are answered by 413, before or while they are read."""

    max_bytes: int
    _: KW_ONLY
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    where: Where = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 0:
            raise InvalidLimiter(f"max_bytes is a whole number of bytes, not {shown(self.max_bytes)}")
        object.__setattr__(self, "where", Where.of(self.path, self.methods, self.ignore_case))
