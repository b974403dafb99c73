"""The extensions of ASGI by which a server sends a file by itself, so that no middleware sees its bytes."""

from __future__ import annotations

from typing import Final

from forebay.web.request import Scope

__all__ = ["FILES", "hide_files", "refuse_file"]

FILES: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Their names, which their messages have, too."""


def hide_files(scope: Scope) -> None:
    """An application that looks for the extensions finds none, and sends the parts of a file."""
    extensions = scope.get("extensions") or {}
    if not FILES.isdisjoint(extensions):
        # Not in a copy of the scope: outer middleware may read there what the application has added.
        scope["extensions"] = {name: value for name, value in extensions.items() if name not in FILES}


def refuse_file(kind: str) -> None:
    """For each message of an application whose bytes are limited. Raises ``RuntimeError`` for one that sends a file."""
    if kind in FILES:
        raise RuntimeError(
            f"the bytes of this response are limited, and {kind} would send a file without a limit: send it in parts "
            "where scope['extensions'] has no such entry"
        )
