"""The checks of ``manage.py check``. They import the objects that the settings name, and so open the store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.urls import get_resolver
from django.utils.module_loading import import_string

from forebay.contrib.django import SETTINGS, make_gates, options, setting
from forebay.contrib.endpoints import TextLimit
from forebay.contrib.views import LIMITED
from forebay.errors import short_repr
from forebay.store import Store
from forebay.web import Gate, Rule

__all__ = ["check_deployment", "check_settings"]

LIMITS: Final = "forebay.contrib.django.LimitsMiddleware"
THROTTLES: Final = "forebay.contrib.rest_framework"
USERS: Final = "django.contrib.auth.middleware.AuthenticationMiddleware"


def check_settings(app_configs: object = None, **_: Any) -> list[CheckMessage]:
    """Errors: settings that can't work."""
    try:
        given = options()
    except ImproperlyConfigured as error:
        return [Error(str(error), hint=_meant(getattr(settings, "FOREBAY", {})), id="forebay.E001")]
    # A value that is wrong causes the other errors.
    return (
        [message for name in given for message in _check_value(name)]
        or list(_check_rules())
        or [*_check_middleware(), *_check_throttles(), *_check_texts()]
    )


def check_deployment(app_configs: object = None, **_: Any) -> list[CheckMessage]:
    """Warnings for ``--deploy``: settings that work, but hardly as intended."""
    if any(message.is_serious() for message in check_settings()):
        return []
    stores: dict[Any, str] = {rule.limiter.store: "RULES" for rule in _rules() if not rule.is_remote}
    if isinstance(store := setting("STORE"), Store):
        stores.setdefault(store, "STORE")
    return [
        CheckWarning(
            f'FOREBAY["{name}"] counts in a private store: each worker counts by itself if it makes the store.',
            hint=f'Name it, Store("shop", keys={store.keys}), or make it before the workers are forked, as by gunicorn '
            "--preload.",
            id="forebay.W002",
        )
        for store, name in stores.items()
        if store.path is None
    ]


def _meant(given: object) -> str | None:
    unknown = [name for name in given if name not in SETTINGS] if isinstance(given, dict) else []
    # The one that the error names.
    named = min(unknown, key=short_repr, default=None)
    near = get_close_matches(named.upper(), SETTINGS, 1) if isinstance(named, str) else []
    return f'Is "{near[0]}" meant?' if near else None


def _check_value(name: str) -> Iterator[CheckMessage]:
    """Whether it can be read, and has the right type. Its import may raise any exception."""
    try:
        value = setting(name)
    except ImproperlyConfigured as error:
        hint = 'A dotted path is like "shop.limits.rules": a module that can be imported, and a name in it.'
        yield Error(str(error), hint=hint, id="forebay.E001")
        return
    except Exception as error:
        yield Error(
            f'FOREBAY["{name}"] can\'t be imported: {type(error).__name__}: {error}',
            hint="Run the import in manage.py shell to see where.",
            id="forebay.E001",
        )
        return
    if name == "STORE" and value is not None and not _is_store(value):
        yield Error(
            f'FOREBAY["STORE"] is a Store, a RedisStore or the dotted path of one, not {short_repr(value)}',
            hint='Write store = Store("shop", keys=100_000) into a module, and "STORE": "that.module.store".',
            id="forebay.E001",
        )
    if name == "CLIENT" and isinstance(value, type):
        yield Error(
            f'FOREBAY["CLIENT"] is a key function, and {short_repr(value)} is a class',
            hint='Write client = ClientAddress(...) into a module, and "CLIENT": "that.module.client".',
            id="forebay.E001",
        )


def _is_store(value: object) -> bool:
    return isinstance(value, Store) or (hasattr(value, "make_limiter") and not isinstance(value, type))


def _check_rules() -> Iterator[CheckMessage]:
    try:
        make_gates()
    except Exception as error:
        name = _unusable()
        yield Error(f'FOREBAY["{name}"] can\'t be used: {error}', hint=_HINTS[name], id="forebay.E002")


_HINTS: Final = {
    "RULES": '"RULES" is a list such as [Rule(TokenBucket(store, "all", "100/minute"))], or its dotted path.',
    "CLIENT": '"CLIENT" is a ClientAddress, another key function, or the dotted path of one.',
    "HEADERS": '"HEADERS" is "draft-10", "draft-06", "x-ratelimit", several of them, or ().',
    "PARTITION_KEYS": '"PARTITION_KEYS" is True or False.',
    "ENABLED": '"ENABLED" is True or False, and the environment variable FOREBAY_ENABLED is true or false.',
    "ON_DENIED": '"ON_DENIED" is a function of a request and a denial, or its dotted path.',
    "WHEN_UNAVAILABLE": '"WHEN_UNAVAILABLE" is "503", "429" or "allow".',
}


def _unusable() -> str:
    """The setting that a gate refuses."""
    for name in ("ENABLED", "ON_DENIED", "WHEN_UNAVAILABLE", "CLIENT", "HEADERS", "PARTITION_KEYS"):
        try:
            Gate((), **{name.lower(): setting(name)})
        except Exception:
            return name
    return "RULES"


def _rules() -> Iterable[Rule]:
    return make_gates().gate.rules


def _check_middleware() -> Iterator[CheckMessage]:
    if not setting("RULES"):
        return
    ours = _place_of(LIMITS)
    if ours is None:
        yield Error(
            f'FOREBAY has RULES, but "{LIMITS}" isn\'t in MIDDLEWARE, so they limit no request',
            hint="Add it, below AuthenticationMiddleware if keys are of users.",
            id="forebay.E003",
        )
        return
    if not any(_is_of_users(rule.key) for rule in _rules()):
        return
    users = _place_of(USERS)
    if users is None or users > ours:
        yield CheckWarning(
            f'a rule goes by user(), but no AuthenticationMiddleware is above "{LIMITS}": everybody counts as '
            "a stranger",
            hint="Move it below AuthenticationMiddleware in MIDDLEWARE.",
            id="forebay.W001",
        )


def _is_of_users(key: object) -> bool:
    """Whether ``forebay.web.user`` made it. Whether another function reads the user is unknown."""
    return getattr(key, "__module__", "") == "forebay.web.keys" and getattr(key, "__qualname__", "").startswith("user")


def _place_of(wanted: str) -> int | None:
    """Its index in MIDDLEWARE, or that of a class derived from it."""
    for place, path in enumerate(settings.MIDDLEWARE):
        # Django reports what can't be imported.
        with contextlib.suppress(Exception):
            bases = getattr(import_string(path), "__mro__", ())
            if any(f"{base.__module__}.{base.__qualname__}" == wanted for base in bases):
                return place
    return None


def _check_throttles() -> Iterator[CheckMessage]:
    patterns = _url_patterns()
    if not getattr(settings, "REST_FRAMEWORK", {}).get("DEFAULT_THROTTLE_CLASSES") and THROTTLES not in sys.modules:
        return
    try:
        from rest_framework.settings import api_settings

        from forebay.contrib.rest_framework import SimpleRateThrottle, make_limiter

        views = (getattr(view, "cls", None) for view in _views_of(patterns))
        throttles = [throttle for view in views for throttle in getattr(view, "throttle_classes", ())]
        classes: Any = [*api_settings.DEFAULT_THROTTLE_CLASSES, *throttles]
    except (ImportError, ImproperlyConfigured) as error:
        yield Error(f"REST framework's throttles can't be imported: {error}", id="forebay.E004")
        return
    ours = [throttle for throttle in dict.fromkeys(classes) if issubclass(throttle, SimpleRateThrottle)]
    if not ours:
        return
    if setting("STORE") is None:
        yield Error(
            f"{ours[0].__name__} of forebay counts in a store, and FOREBAY has none",
            hint='Add "STORE": "shop.limits.store", the dotted path of a Store.',
            id="forebay.E004",
        )
    # A scope or rate that a property computes is unknown here.
    fixed = [
        kind for kind in ours if not any(hasattr(getattr(kind, name, None), "__get__") for name in ("scope", "rate"))
    ]
    rates = [(kind, kind.scope or kind.__name__, kind.rate) for kind in fixed if getattr(kind, "rate", None)]
    for scope, rate in api_settings.DEFAULT_THROTTLE_RATES.items():
        # The class with this scope may parse rates in its own way, and have its own limiter.
        rates.append((next((kind for kind in ours if kind.scope == scope), ours[0]), scope, rate))
    for kind, scope, rate in rates:
        throttle = kind.__new__(kind)
        throttle.scope = scope
        try:
            limit, duration_s = throttle.parse_rate(rate)
            if limit and setting("STORE") is not None:
                make_limiter(kind.limiter_class, scope, limit, duration_s)
        except Exception as error:
            yield Error(
                f"the throttles can't use the rate {short_repr(rate)} of {short_repr(scope)}: {error}",
                hint="Change it in DEFAULT_THROTTLE_RATES, or in the class.",
                id="forebay.E005",
            )


def _url_patterns() -> list[Any]:
    """The project's. Django reports what can't be imported."""
    with contextlib.suppress(Exception):
        return list(get_resolver().url_patterns)
    return []


def _views_of(patterns: Iterable[Any]) -> Iterator[Any]:
    for pattern in patterns:
        yield from _views_of(getattr(pattern, "url_patterns", ()))
        if getattr(pattern, "callback", None) is not None:
            yield pattern.callback


def _check_texts() -> Iterator[CheckMessage]:
    """Limits of views as text, whose limiters the first request makes. Those of methods of a class are unknown here."""
    for view in [] if setting("STORE") is not None else _views_of(_url_patterns()):
        if any(isinstance(limit, TextLimit) for limit in getattr(view, LIMITED, (None, None, ()))[2]):
            yield Error(
                f"{short_repr(view)} has a limit as text, which is kept in a store, and FOREBAY has none",
                hint='Add "STORE": "shop.limits.store", the dotted path of a Store.',
                id="forebay.E006",
            )
