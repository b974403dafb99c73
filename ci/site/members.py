"""Check that the members of public classes are described: ``python ci/site/members.py``.

A method, property or attribute has a docstring, or a docstring of its class or of a base names it in backquotes. The
classes of integrations are left out, as most of their members are those of another library or of ``forebay``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

import griffe
from public_names import SOURCE, public_names

MODULES: Final = ("forebay", "forebay.testing", "forebay.verification")
# Attributes for other modules of forebay.
INTERNAL: Final = frozenset(f"forebay.Store.{name}" for name in ("attachment", "manual_clock", "names", "segment"))


def undescribed_members() -> Iterator[str]:
    loader = griffe.GriffeLoader(search_paths=[SOURCE], allow_inspection=False)
    loader.load("forebay")
    loader.resolve_aliases()
    for path in public_names():
        kind = loader.modules_collection[path]
        if not kind.is_class or path.rpartition(".")[0] not in MODULES:
            continue
        texts = " ".join(base.docstring.value for base in (kind.final_target, *kind.mro()) if base.docstring)
        described = set(re.findall(r"`(\w+)", texts))
        for name, member in kind.all_members.items():
            internal = name.startswith("_") or f"{path}.{name}" in INTERNAL
            if not internal and not member.docstring and name not in described:
                yield f"{path}.{name} is not described"


def main() -> int:
    undescribed = list(undescribed_members())
    for line in undescribed:
        print(line)
    return bool(undescribed)


if __name__ == "__main__":
    sys.exit(main())
