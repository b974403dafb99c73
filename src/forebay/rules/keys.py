"""Keys from the text of a rule file: parts, each with alternatives of which the first that a request has counts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, TypeAlias

from forebay.errors import InvalidLimiter, short_repr
from forebay.rules.problems import did_you_mean
from forebay.web import ClientAddress, Request, everyone
from forebay.web.functions import described, has_to_be_awaited
from forebay.web.native_requests import readings
from forebay.web.patterns import TOKEN
from forebay.web.request import KeyFunction

__all__ = ["Functions", "RuleKey", "Sources", "in_words", "key_function", "rule_key", "tier_name"]

Value: TypeAlias = tuple[str, ...]
"""The beginning of a key: a kind of part, and what it says. The kind determines how many texts follow."""

AMBIGUOUS: Final = ""
"""The value of a path parameter that a router may read in several ways. No segment is empty."""

WORDS: Final = ("address", "constant:TEXT", "everyone", "header:NAME", "path:NAME", "tier", "user")


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that the application gave to `load_rules`, or None."""

    tier: Callable[[Request], str] | None = None
    user: Callable[[Request], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of the parts of a rule's key."""

    client: ClientAddress
    functions: Functions
    paths: Sequence[str]
    """The rule's path patterns; none for every path."""
    ignore_case: bool


class Alternative(ABC):
    """One way to get a part of a key."""

    word: str
    """As the file writes it, header fields in small letters."""
    is_always_there = False
    patterns: Sequence[re.Pattern[str]] = ()
    """A path parameter has some: each has one group, the value."""

    @abstractmethod
    def of(self, request: Request) -> Value | None:
        """None if the request has no such value."""

    @abstractmethod
    def named(self, text: str) -> Value:
        """The value that an override names. Raises ``ValueError``."""


class _Address(Alternative):
    word, is_always_there = "address", True

    def __init__(self, client: ClientAddress) -> None:
        self._client = client

    def of(self, request: Request) -> Value:
        return "address", self._client(request)

    def named(self, text: str) -> Value:
        try:
            address = ip_address(text)
        except ValueError:
            raise ValueError(f"{short_repr(text)} is no address such as 192.0.2.1") from None
        return "address", self._client.key_of(str(address), None)


class _User(Alternative):
    word = "user"

    def __init__(self, user: Callable[[Request], str | None] | None) -> None:
        self._user = user

    def of(self, request: Request) -> Value | None:
        name: Any = request.user if self._user is None else self._user(request)
        if name is not None and not isinstance(name, str):
            raise InvalidLimiter(f"user returned {described(name)}, which is no user: text, or None")
        return ("user", name) if name else None

    def named(self, text: str) -> Value:
        return "user", text


class _Tier(Alternative):
    word, is_always_there = "tier", True

    def __init__(self, tier: Callable[[Request], str]) -> None:
        self._tier = tier

    def of(self, request: Request) -> Value:
        return "tier", tier_name(self._tier, request)

    def named(self, text: str) -> Value:
        return "tier", text


def tier_name(tier: Callable[[Request], str], request: Request) -> str:
    """The tier of a request. Raises ``InvalidLimiter`` for anything but text."""
    name: Any = tier(request)
    if not isinstance(name, str):
        raise InvalidLimiter(f"tier returned {described(name)}, which is no tier: those are text")
    return name


class _Header(Alternative):
    def __init__(self, name: str) -> None:
        self._name = name.lower()
        self.word = f"header:{self._name}"

    def of(self, request: Request) -> Value | None:
        value = request.header(self._name)
        return ("header", self._name, value) if value else None

    def named(self, text: str) -> Value:
        return "header", self._name, text


class _Constant(Alternative):
    is_always_there = True

    def __init__(self, word: str, text: str) -> None:
        self.word, self.value = word, ("constant", text)

    def of(self, request: Request) -> Value:
        return self.value

    def named(self, text: str) -> Value:
        raise ValueError(f"{self.word} is the same for every key: leave it out")


class _PathParameter(Alternative):
    """The value of ``{name}`` in a path.

    A router may read an unusual path in several ways (see ``forebay.web.paths``). Unless all readings that match have
    one value, it is `AMBIGUOUS`: else a client could get a key of its own for each spelling of one path.
    """

    is_always_there = True

    def __init__(self, name: str, paths: Sequence[str], ignore_case: bool) -> None:
        self._name, self._ignore_case = name, ignore_case
        self.word = f"path:{name}"
        flags = re.DOTALL | re.IGNORECASE if ignore_case else re.DOTALL
        self.patterns = [re.compile(text, flags) for path in paths for text in _with_group(path, name)]

    def of(self, request: Request) -> Value:
        found = (pattern.fullmatch(path) for path in request.paths for pattern in self.patterns)
        values = {self._cased(match[1]) for match in found if match}
        return "path", self._name, values.pop() if len(values) == 1 else AMBIGUOUS

    def named(self, text: str) -> Value:
        if not text:
            raise ValueError(f"{self.word} is never empty")
        return "path", self._name, self._cased(text)

    def _cased(self, value: str) -> str:
        return value.casefold() if self._ignore_case else value


_PLACEHOLDER: Final = re.compile(r"\{([^{}/:]*)(:[^{}/]*)?\}|\*")
# They replace the placeholders while the readings of a pattern are made: private-use characters, so in no real path.
_EXPRESSIONS: Final = {"\ue000": "[^/]+", "\ue001": ".*", "\ue002": "([^/]+)", "\ue003": "(.*)"}


def _with_group(path: str, name: str) -> list[str]:
    """Regular expressions of a path pattern that the web layer has accepted, with a group for one parameter."""

    def character(found: re.Match[str]) -> str:
        is_anything = found[0] == "*" or found[2] == ":path"
        return list(_EXPRESSIONS)[is_anything + 2 * (found[1] == name)]

    return [_expression(text) for text in readings(_PLACEHOLDER.sub(character, path))]


def _expression(text: str) -> str:
    text, end = text.rstrip("/"), "/*"
    if text.endswith("/\ue001"):
        # Such a pattern matches the path without the slash, too.
        text, end = text[:-2], "(?:/.*)?"
    return "".join(_EXPRESSIONS.get(character) or re.escape(character) for character in text) + end


def _alternative(text: str, sources: Sources) -> Alternative:
    """Raises ``ValueError``."""
    word, colon, argument = text.partition(":")
    functions = sources.functions
    if text == "address":
        return _Address(sources.client)
    if text == "user":
        return _User(functions.user)
    if text == "everyone":
        return _Constant(text, "")
    if text == "tier":
        if functions.tier is None:
            raise ValueError("tier is a part of a key, and there is no function for it: write tier=")
        if has_to_be_awaited(functions.tier):
            raise ValueError("tier is a part of a key, so the function of load_rules for it can't be async")
        return _Tier(functions.tier)
    if word == "constant" and argument:
        return _Constant(text, argument)
    if word == "header" and TOKEN.fullmatch(argument):
        return _Header(argument)
    if word == "path" and argument:
        if not sources.paths or not all(f"{{{argument}}}" in _names_only(path) for path in sources.paths):
            raise ValueError(f"{text} needs the segment {{{argument}}} in each path of the rule")
        return _PathParameter(argument, sources.paths, sources.ignore_case)
    if word == "header" and colon:
        raise ValueError(f"{short_repr(argument)} is no name of a header field such as X-API-Key")
    raise ValueError(f"{short_repr(text)} is no part of a key: {did_you_mean(text, WORDS)}")


def _names_only(path: str) -> str:
    return re.sub(r"\{([^{}/:]*):[^{}/]*\}", r"{\1}", path)


class RuleKey:
    """The key of a rule, and its parts."""

    def __init__(self, parts: Sequence[Sequence[Alternative]]) -> None:
        self.parts = parts

    def __call__(self, request: Request) -> Any:
        """A key: that of one part as ``forebay.web``'s key functions have it, else the values of all parts."""
        if len(self.parts) == 1:
            return _alone(_first(self.parts[0], request))
        return tuple(text for part in self.parts for text in _first(part, request))

    def named(self, texts: Mapping[str, str]) -> Any:
        """The key with these values, by the words of its parts. Raises ``ValueError``."""
        given = {_small(word): text for word, text in texts.items()}
        known = [one.word for part in self.parts for one in part]
        for word in given:
            if word not in known:
                raise ValueError(f"the rule's key has no part {short_repr(word)}: {did_you_mean(word, known)}")
        values: list[Value] = []
        for part in self.parts:
            named = [one for one in part if one.word in given]
            if isinstance(part[0], _Constant) and not named:
                values.append(part[0].value)
            elif len(named) == 1:
                values.append(named[0].named(given[named[0].word]))
            else:
                raise ValueError(f"it names one of {', '.join(one.word for one in part)}, as the rule's key does")
        return _alone(values[0]) if len(values) == 1 else tuple(text for value in values for text in value)


def _small(word: str) -> str:
    return word.lower() if word.startswith("header:") else word


def _first(part: Sequence[Alternative], request: Request) -> Value:
    found = (one.of(request) for one in part)
    # The last alternative is always there.
    return next(value for value in found if value is not None)


def _alone(value: Value) -> Any:
    return value[1] if value[0] == "address" else value


def rule_key(texts: Sequence[str], sources: Sources) -> RuleKey:
    """Raises ``ValueError``."""
    parts: list[list[Alternative]] = []
    for text in texts:
        part = [_alternative(one.strip(), sources) for one in text.split("|")]
        for one in part[:-1]:
            if one.is_always_there:
                raise ValueError(f"every request has {one.word}, so nothing after it counts: leave the rest out")
        if not part[-1].is_always_there:
            raise ValueError(
                f"a request without {part[-1].word} would have no key: write what counts then, "
                f'"{part[-1].word} | address"'
            )
        parts.append(part)
    words = [one.word for part in parts for one in part]
    for word in words:
        if words.count(word) > 1:
            raise ValueError(f"the key has {word} twice: leave one out")
    return RuleKey(parts)


def in_words(key: Any) -> str:
    """A key of a rule file, for a person."""
    texts = ["address", key] if isinstance(key, str) else list(key)
    words = []
    while texts:
        kind = texts.pop(0)
        name = f" {texts.pop(0)}" if kind in ("header", "path") else ""
        value = texts.pop(0)
        if value or kind == "user":
            words.append(f"{kind}{name} {value!r}")
        else:
            words.append("everyone" if kind == "constant" else f"{kind}{name}, whose value a router may read otherwise")
    return " and ".join(words)


def key_function(key: RuleKey, texts: Sequence[str], client: ClientAddress) -> KeyFunction:
    """The function for a ``Rule``: for an address or for everyone the one of ``forebay.web``, which is faster."""
    if list(texts) == ["address"]:
        return client
    return everyone if list(texts) == ["everyone"] else key
