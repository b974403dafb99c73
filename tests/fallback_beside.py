"""The pure-Python fallback beside the compiled core, whose wheel has none: from its sources."""

from importlib import import_module
from pathlib import Path

import forebay

forebay.__path__.append(str(Path(__file__).resolve().parents[1] / "src" / "forebay"))
try:
    fallback = import_module("forebay.fallback.kinds")
    FallbackStore = import_module("forebay.fallback.store").Store
finally:
    forebay.__path__.pop()
