"""Gates whose rules change while the application runs: one gate for each version of the rules."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from forebay.errors import InvalidLimiter, short_repr
from forebay.web.fastpath import FastPath, RulesWatch
from forebay.web.functions import has_to_be_awaited
from forebay.web.gate import Gate
from forebay.web.options import GivenRule, GivenRules

__all__ = ["LiveGate", "VersionedRules", "at_start", "gate_of", "limit_path"]


class VersionedRules(ABC):
    """Rules with a version in a segment, for a ``LiveGate``. *Threads*: safe."""

    @property
    @abstractmethod
    def segment(self) -> Any:
        """The segment that has the version."""

    @property
    @abstractmethod
    def may_be_awaited(self) -> bool:
        """Whether the rules of some version may have to be awaited."""

    @abstractmethod
    def in_force(self) -> tuple[int, Sequence[GivenRule]]:
        """The version to follow, and its rules: the last good ones, the same object, if its own can't be used."""

    @abstractmethod
    def refuse(self, version: int, error: Exception) -> None:
        """The rules of that version fit no gate with its options. The gate keeps those before."""

    @abstractmethod
    def add(self, gate: LiveGate) -> None:
        """The rules have one more gate. It is kept alive by its user only."""

    @abstractmethod
    def begin(self) -> None:
        """This process has its first request."""


class LiveGate:
    """Stands in a ``Gate``'s place, and has one for each version of the rules. A request is for one version only.

    Its attributes are those of the gate of the version in force, so a caller reads what belongs to one request from one
    attribute: a bound method. A ``FastPath`` takes each new gate as a whole.

    State: `watch`, and under a lock the gate and the version that it was made for. The thread that finds news makes the
    new gate, others that find it meanwhile wait for that. So the request that finds a version is decided by it.

    `limits_bodies`: whether its user asks each version for its limits of bodies. If not, rules with such limits are
    refused.

    *Threads*: safe. *Fork*: the child finds news at its first request.
    """

    def __init__(self, rules: VersionedRules, options: dict[str, Any], *, limits_bodies: bool) -> None:
        self.watch = RulesWatch(rules.segment)
        self._rules, self._options, self._limits_bodies = rules, options, limits_bodies
        self._path: FastPath | None = None
        self._lock = threading.RLock()
        self._version, self._made_of = rules.in_force()
        self._gate = self.gate_with(self._made_of)
        client = options.get("client")
        self.is_awaited = options.get("in_loop") is not False and (
            rules.may_be_awaited or (client is not None and has_to_be_awaited(client))
        )
        """Of every version: such a gate's ``enter_unguarded`` works for all rules."""
        rules.add(self)

    def begin_in_child(self) -> None:
        """A fork copies a lock in its state."""
        self._lock = threading.RLock()
        self.watch.forget()

    def attach(self, path: FastPath) -> None:
        """Set the gate of `path` now, and in each ``lead``."""
        with self._lock:
            self._path = path
            path.gate = self._gate

    def lead(self) -> None:
        """Take over the version in force."""
        self._rules.begin()
        self.refresh()

    def refresh(self) -> None:
        """As ``lead``, but by a thread that handles no request."""
        with self._lock:
            version, rules = self._rules.in_force()
            if rules is not self._made_of:
                try:
                    self._gate = self.gate_with(rules)
                except Exception as error:
                    self._rules.refuse(version, error)
                # A gate that can't be made isn't made again by the next request.
                self._made_of = rules
            self._version = version
            if self._path is not None:
                self._path.gate = self._gate
            # Last: a thread that finds no news finds the new gate.
            self.watch.follow(version)

    def gate_with(self, rules: GivenRules) -> Gate:
        """A gate with this one's options. Raises what ``Gate`` raises."""
        gate = Gate(rules, **self._options)
        if gate.given_body_limits and not self._limits_bodies:
            raise InvalidLimiter(
                f"{short_repr(gate.given_body_limits[0])} comes too late here, as these rules are live: put "
                "WSGIMiddleware or ASGIMiddleware of forebay.web around the application, with rules of their own"
            )
        return gate

    @property
    def at_start(self) -> Gate:
        """See ``at_start``."""
        return self._gate

    @property
    def current(self) -> Gate:
        """The gate of the version in force."""
        if self.watch.has_news():
            self.lead()
        return self._gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


def gate_of(rules: GivenRules | VersionedRules, **options: Any) -> Gate:
    """A ``Gate``, or a ``LiveGate`` where a framework's extension uses it as one."""
    if isinstance(rules, VersionedRules):
        return cast(Gate, LiveGate(rules, options, limits_bodies=False))
    _refuse_in_list(rules)
    return Gate(rules, **options)


def at_start(gate: Gate) -> Gate:
    """The gate to read from before there is a request: of live rules, one whose reading starts no thread."""
    return gate.at_start if isinstance(gate, LiveGate) else gate


def limit_path(path: FastPath, rules: GivenRules | VersionedRules, **options: Any) -> None:
    """Give a middleware its gate."""
    if isinstance(rules, VersionedRules):
        path.follow_rules(LiveGate(rules, options, limits_bodies=True))
    else:
        _refuse_in_list(rules)
        path.gate = Gate(rules, **options)


def _refuse_in_list(rules: GivenRules) -> None:
    if isinstance(rules, Sequence) and any(isinstance(rule, VersionedRules) for rule in rules):
        raise InvalidLimiter(
            "LiveRules stand in place of a list of rules, not in it: put other rules into a middleware around this one"
        )
