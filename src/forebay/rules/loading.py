"""Loading: a rule file becomes the rules of a middleware."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import InvalidLimiter, InvalidURL, redacted_repr
from forebay.rules.building import Built, build
from forebay.rules.keys import Functions
from forebay.rules.model import RuleFile
from forebay.rules.places import Document
from forebay.rules.problems import Problems
from forebay.rules.reading import read_document, read_rule_file
from forebay.store import Store
from forebay.urls import connect, connect_async
from forebay.web import ByteRate, Deny, Request, Rule, Shed
from forebay.web.functions import check_function, has_to_be_awaited

__all__ = ["Loaded", "check", "check_functions", "check_store", "load_built", "load_rules"]


def load_rules(
    path: str | os.PathLike[str],
    *,
    store: Any = None,
    tier: Callable[[Request], str] | None = None,
    user: Callable[[Request], str | None] | None = None,
    in_loop: bool = False,
) -> list[Deny | Shed | Rule | ByteRate]:
    """The rules of a TOML or YAML file, for a middleware: ``ASGIMiddleware(app, load_rules("limits.toml"))``.

    * `store`: where the limits are kept, if the file doesn't name it.
    * `tier`: returns the tier of a request, text; for a file that has tiers. It may be ``async def`` under ASGI, unless
      a key of the file has the tier.
    * `user`: returns the user of a request, or None; by default the ``user`` of the ``Request``.
    * `in_loop`: whether the application runs in an event loop: a store that the file names is then made by
      ``connect_async``.

    The clients' addresses are those of the file's proxies; the `client` of the middleware doesn't count for these
    rules. docs/rules.md describes the format.

    Raises ``InvalidRuleFile`` with every problem of the file and its place, ``OSError`` if it can't be read,
    ``InvalidLimiter`` for other arguments that can't be used, and what the store raises. Nothing is made in the store
    unless the file is valid. *Threads*: safe, and so are the rules. *Fork*: as the store. O(size of the file).
    """
    check_functions(tier, user)
    if store is not None:
        check_store(store)
    loaded = load_built(path, store, Functions(tier, user), in_loop=in_loop)
    return [rule for one in loaded.built for rules in one.rules.values() for rule in rules]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rule file, and its limiters and rules in their store."""

    spec: RuleFile
    document: Document
    store: Any
    built: list[Built]


def load_built(path: str | os.PathLike[str], store: Any, functions: Functions, *, in_loop: bool) -> Loaded:
    """As ``load_rules``, which has checked the arguments."""
    file = os.fspath(path)
    problems = Problems(file)
    spec, document, _ = check(file, Path(file).read_bytes(), functions)
    if bool(spec.store) == (store is not None):
        problems.add(
            document.word(("store",)),
            "a store is given beside the file, too: leave one of the two out"
            if spec.store
            else 'the file names no store: write store = "shm:///shop?keys=1000000", or load_rules(..., store=)',
        )
    problems.raise_if_any()
    is_own = store is None
    if is_own:
        try:
            store = (connect_async if in_loop else connect)(spec.store or None)
        except InvalidURL as error:
            problems.add(document.value(("store",)), f"store: {error}")
            problems.raise_if_any()
    try:
        built = build(spec, document, store, functions, problems)
    except BaseException:
        closing = store.close() if is_own else None
        if inspect.iscoroutine(closing):
            # There is no connection yet.
            closing.close()
        raise
    return Loaded(spec, document, store, built)


def check_functions(tier: Any, user: Any) -> None:
    """Raises ``InvalidLimiter``."""
    for what, function in (("tier", tier), ("user", user)):
        if function is not None:
            check_function(f"{what} is a callable that takes a request", function)
    if user is not None and has_to_be_awaited(user):
        raise InvalidLimiter("user is a plain function: authenticate in an outer layer, which sets the request's user")


def check_store(store: Any) -> None:
    """Raises ``InvalidLimiter``."""
    if not isinstance(store, Store) and not hasattr(store, "make_limiter"):
        raise InvalidLimiter(f"store is a store, as forebay.connect(url) returns one, not {redacted_repr(store)}")


def check(file: str, data: bytes, functions: Functions) -> tuple[RuleFile, Document, list[Built]]:
    """The contents of a file, and its rules over a store of their own, which is closed. Opens no other store.

    Raises ``InvalidRuleFile`` with all problems.
    """
    problems = Problems(file)
    document = read_document(file, data, problems)
    spec = read_rule_file(document, problems)
    return spec, document, build(spec, document, None, functions, problems)
