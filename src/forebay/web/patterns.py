"""Which requests a rule is for: path patterns, compiled to regular expressions, and methods.

A pattern has as many readings as a path (see paths.py), so it matches whichever reading the application's router takes.
"""

from __future__ import annotations

import logging
import re
import string
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPMethod
from typing import Any, Final

from forebay.errors import InvalidLimiter, UnseenPathsWarning, short_repr
from forebay.seldom import Seldom
from forebay.web.native_requests import readings
from forebay.web.paths import LONGEST_READ

__all__ = ["TOKEN", "PatternSet", "RequestPattern", "UnseenPaths"]

TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110: a method, or the name of a field."""

UNSEEN_REQUESTS: Final = 1000
"""After so many requests that match no path pattern, `UnseenPaths` warns."""
SEARCHED_REQUESTS: Final = 10_000
"""After so many requests, `UnseenPaths` warns of single patterns, and ends its search."""

_log: Final = logging.getLogger("forebay.web")

_METHODS: Final = ("WEBSOCKET", *(method.value for method in HTTPMethod))
_MISSPELT: Final = 0.75  # how alike two names are; no two registered methods are

# RFC 9110 allows them in a method, but no registered method has one.
_SEVERAL_METHODS: Final = frozenset("|+&")
_PLACEHOLDER: Final = re.compile(r"\{[^{}/]*\}|\*")
# As in {id}, {id:int} or Falcon's {id:int(min=1)}.
_NAMED: Final = re.compile(r"\*|\{[^{}/:]*(:\w+(\([^{}/]*\))?)?\}")
# Parts of another syntax, which would match no request of those that are meant, and what to write instead.
_OTHER_SYNTAX: Final = [
    (re.compile(part), remedy)
    for part, remedy in (
        (r"\(\?|\?\}|[})\]*+]\?(?=[/)]|\Z)", "write {name} for one segment, and several patterns for optional parts"),
        (r"\\", "write {name} for one segment, and %5C for a backslash"),
        (r"\|(?![^{}/]*\})|,\s*/", "write several patterns in a list, and %7C and %2C for those characters"),
        (r"\$\Z", "a pattern is for a whole path; write %24 for a dollar sign"),
        (r"(?<=[/(])\.[*+](?=[/)]|\Z)", "write * for anything, and .{name} for names that begin with a dot"),
        (r"\[\^?/?[^\]/]*\][*+]|(?<=/)\[[^/]*\](?=/|\Z)", "write {name} for one segment, and %5B for a bracket"),
        (r"(?<=/):[^\W\d][^/]*", "write {name} for one segment, and %3A for a colon"),
    )
]
# They replace the placeholders while the readings of a pattern are made: private-use characters, so in no real path.
_ANYTHING: Final = "\ue000"
_SEGMENT: Final = "\ue001"
_PUNCTUATION: Final = string.punctuation.replace("/", "")
_ANY_PUNCTUATION: Final = f"[{re.escape(_PUNCTUATION)}]"


@dataclass(frozen=True, slots=True)
class RequestPattern:
    """Paths and methods. No pattern means every path, no methods every method.

    `pattern` matches what any router reads as one of the paths, `exact` the paths as they are written, with or without
    slashes at the end.
    """

    pattern: re.Pattern[str] | None
    methods: frozenset[str]
    exact: re.Pattern[str] | None

    @classmethod
    def of(cls, path: str | Iterable[str] | None, methods: str | Iterable[str], ignore_case: bool) -> RequestPattern:
        """Raises ``InvalidLimiter``."""
        paths = [] if path is None else _listed(path, "path")
        if path is not None and not paths:
            raise InvalidLimiter("path is a pattern or several, or None for every path: an empty list is neither")
        names = _listed(methods, "methods")
        for name in names:
            if not isinstance(name, str) or not TOKEN.fullmatch(name):
                raise InvalidLimiter(f'methods are names such as "GET", not {short_repr(name)}')
            if not _SEVERAL_METHODS.isdisjoint(name):
                raise InvalidLimiter(f'several methods are a list such as ["GET", "POST"], not {short_repr(name)}')
            if name.upper() in ("*", "ANY", "ALL"):
                raise InvalidLimiter(
                    f"no request has the method {short_repr(name)}: leave methods out for every method"
                )
            if name.upper() not in _METHODS and (meant := get_close_matches(name.upper(), _METHODS, 1, _MISSPELT)):
                raise InvalidLimiter(f"no request has the method {short_repr(name)}: did you mean {meant[0]!r}?")
        capitals = {name.upper() for name in names}
        if not isinstance(ignore_case, bool):
            raise InvalidLimiter(f"ignore_case is True or False, not {short_repr(ignore_case)}")
        flags = re.DOTALL | re.IGNORECASE if ignore_case else re.DOTALL
        pattern = exact = None
        if paths:
            pattern, exact = (re.compile("|".join(each), flags) for each in zip(*map(_pattern, paths), strict=True))
        # Frameworks answer HEAD with the handler of GET.
        return cls(pattern, frozenset(capitals | {"HEAD"} if "GET" in capitals else capitals), exact)

    @property
    def is_everywhere(self) -> bool:
        return self.pattern is None and not self.methods

    def matches(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> bool:
        """Whether one of these methods and one of these paths match. No paths: the request may be for any path."""
        if self.methods and self.methods.isdisjoint(methods):
            return False
        if self.pattern is None or not paths:
            return True
        # A generator would take as long as the match.
        for path in paths:  # noqa: SIM110
            if self.pattern.fullmatch(path) is not None:
                return True
        return False

    def is_certain(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> bool:
        """Whether each of these methods and each of these paths match: so a router can't read the request otherwise.

        A path matches as the pattern is written, except for slashes at its end, and not as a single router reads it:
        another one may have a view for ``/log_in`` or ``/log-in/index`` beside ``/log-in``, or one for any path.
        """
        if self.methods and not self.methods.issuperset(methods):
            return False
        return self.exact is None or (bool(paths) and all(self.exact.fullmatch(path) for path in paths))


class PatternSet:
    """Several patterns as one regular expression, which takes a third of the time that they take one by one."""

    def __init__(self, patterns: Iterable[RequestPattern]) -> None:
        listed = list(patterns)
        self._methods = [one.methods for one in listed]
        # One empty group for each, which takes part in a match if its pattern matches.
        self._together = re.compile("".join(map(_as_group, listed)), re.DOTALL)

    def matching(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> list[int]:
        """The numbers of the patterns that match, ascending; see ``RequestPattern.matches``."""
        if not paths:
            numbers: Iterable[int] = range(len(self._methods))
        elif len(paths) == 1:
            numbers = self._numbers(paths[0])
        else:
            numbers = sorted({number for path in paths for number in self._numbers(path)})
        return [n for n in numbers if not (wanted := self._methods[n]) or not wanted.isdisjoint(methods)]

    def _numbers(self, path: str) -> list[int]:
        found = self._together.match(path)
        assert found is not None  # each part matches the empty text
        return [number for number, group in enumerate(found.groups()) if group is not None]


def _as_group(where: RequestPattern) -> str:
    if where.pattern is None:
        return "()"
    flags = "i" if where.pattern.flags & re.IGNORECASE else ""
    return f"(?=(?{flags}:{where.pattern.pattern})\\Z()|)"


class UnseenPaths:
    """Warns once if the path patterns of a gate's rules, or some of them, match none of many requests.

    Thread-safe; threads that count at once may lose a few requests.
    """

    def __init__(self, what: str, limits: Iterable[Any]) -> None:
        """`limits`: rules or body limits, as `what` names each."""
        self._what = what
        self.unseen = [_UnseenPath(limit.where, limit.path) for limit in limits if limit.where.pattern is not None]
        """Empty when there is nothing to warn of, or no longer."""
        self._has_matched = False
        self._request_count = 0
        self._warning = Seldom()

    def observe(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> None:
        """Count a request. A path matches whatever the method is. None of `paths`: the request may be for any path."""
        if not paths:
            # A client could end the search by one such request.
            return
        unseen = [one for one in self.unseen if not one.matches(methods, paths)]
        self._has_matched |= len(unseen) < len(self.unseen)
        self.unseen = unseen
        self._request_count += 1
        if self._request_count > UNSEEN_REQUESTS and not self._has_matched:
            self.unseen = []
            names = _names_of(unseen)
            self._warn(f"no {self._what}'s path, {names}, has matched any of {UNSEEN_REQUESTS} requests", "", paths[0])
        elif self._request_count > SEARCHED_REQUESTS:
            self.unseen = []
            names = _names_of([one for one in unseen if one.request_count >= UNSEEN_REQUESTS])
            if names:
                found = (
                    f"no request has matched {names} in {SEARCHED_REQUESTS} requests, though some have matched others"
                )
                self._warn(found, "if such requests are rare, ignore this; otherwise ", paths[0])

    def _warn(self, found: str, condition: str, path: str) -> None:
        if not self._warning.is_due():
            return
        message = (
            f"{found}; the last was for {short_repr(path)}: {condition}write paths as from the root of the server, or "
            "of the application that the rules stand around"
        )
        try:
            warnings.warn(message, UnseenPathsWarning, stacklevel=3)
        except Exception:
            # A filter turns warnings into errors, or the warning can't be shown. No request fails for it.
            _log.error(message)


@dataclass(slots=True, eq=False)
class _UnseenPath:
    where: RequestPattern
    written: object
    """As the user wrote it: text or texts."""
    request_count: int = 0
    """Requests of its methods that didn't match."""

    def matches(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> bool:
        assert self.where.pattern is not None
        if any(self.where.pattern.fullmatch(path) for path in paths):
            return True
        if not self.where.methods or not self.where.methods.isdisjoint(methods):
            self.request_count += 1
        return False


def _names_of(unseen: Iterable[_UnseenPath]) -> str:
    return ", ".join(dict.fromkeys(short_repr(one.written) for one in unseen))


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, (Mapping, bytes)):
        raise InvalidLimiter(f"{what} is text or several texts, not {short_repr(values)}")
    return list(values)


def _pattern(path: str) -> tuple[str, str]:
    """Two regular expressions: for the path as any router reads it, and as it is written.

    They match in time linear in the length of a path, which the client chooses.
    """
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidLimiter(
            f'a path pattern begins with "/", as in "/users/{{id}}" or "/api/*", not {short_repr(path)}'
        )
    for placeholder in _PLACEHOLDER.finditer(path):
        if not _NAMED.fullmatch(placeholder[0]):
            raise InvalidLimiter(
                f"the path pattern {short_repr(path)} has {placeholder[0]}, and no regular expressions "
                f"are in one: write "
                "{name} for one segment, {name:path} or * for anything"
            )
    for part, remedy in _OTHER_SYNTAX:
        if found := part.search(path):
            raise InvalidLimiter(f"the path pattern {short_repr(path)} has {found[0]}: {remedy}")
    if "?" in path or "#" in path:
        raise InvalidLimiter(
            f"the path pattern {short_repr(path)} has more than a path: look at a query in exempt or cost, and "
            "write %3F and %23 within a path"
        )
    text = _PLACEHOLDER.sub(_character_of, path)
    for segment, written in zip(text.split("/"), path.split("/"), strict=True):
        if segment.count(_ANYTHING) + segment.count(_SEGMENT) > 1 or any(c in segment for c in "{}<>"):
            raise InvalidLimiter(
                f"the path pattern {short_repr(path)} has {short_repr(written)}: a segment has one "
                f"{{name}} or one * at the most"
            )
    if text.rstrip("/").removesuffix("/" + _ANYTHING).count(_ANYTHING) > 1:
        raise InvalidLimiter(
            f"the path pattern {short_repr(path)} has more than one *, besides the one at its end: "
            f"write several patterns"
        )
    texts = readings(text)
    if not texts and len(text) > LONGEST_READ:
        raise InvalidLimiter(f"the path pattern {short_repr(path)} has {len(path)} characters: too many")
    if not texts:
        raise InvalidLimiter(
            f"the path pattern {short_repr(path)} has a segment of dots or one that ends with a line "
            f"feed: write the path to which it leads"
        )
    has_all_below = path.rstrip("/").endswith("/*")
    wide, exact = (
        "|".join(dict.fromkeys(expression(text, has_all_below) for text in texts))
        for expression in (_expression, _exact_expression)
    )
    return wide, exact


def _character_of(placeholder: re.Match[str]) -> str:
    return _ANYTHING if placeholder[0] == "*" or placeholder[0].endswith(":path}") else _SEGMENT


def _expression(text: str, has_all_below: bool) -> str:
    # CherryPy adds an index.
    text, end = text.rstrip("/"), "(?:/index)?/*"
    if has_all_below:
        text, end = text.removesuffix("/" + _ANYTHING), "(?:/.*)?"
    *before, last = text.split("/")
    # Falcon matches an empty segment, too, between others.
    segments = ["[^/]*" if segment == _SEGMENT else _expression_of(segment) for segment in before]
    if has_all_below and last == _SEGMENT:
        return "/".join([*segments, "(?:[^/]+|[^/]*/.*)"])
    return "/".join([*segments, _expression_of(last)]) + end


def _exact_expression(text: str, has_all_below: bool) -> str:
    text, end = text.rstrip("/"), "/*"
    if has_all_below:
        text, end = text.removesuffix("/" + _ANYTHING), "(?:/.*)?"
    parts = {_ANYTHING: ".*", _SEGMENT: "[^/]+"}
    return "".join(parts.get(character) or re.escape(character) for character in text) + end


def _expression_of(segment: str) -> str:
    # CherryPy treats each punctuation character as an underscore.
    parts = {_ANYTHING: ".*", _SEGMENT: "[^/]+", **dict.fromkeys(_PUNCTUATION, _ANY_PUNCTUATION)}
    return "".join(parts.get(character) or re.escape(character) for character in segment)
