"""Griffe's view of the sources and stubs, as readers of the reference need it."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe
from public_names import public_paths
from titles import title_of

NAME: Final = re.compile(r"(?<!`)``([A-Z]\w+)``")
PAGE: Final = re.compile(r"\bdocs/([\w-]+)\.md\b")
PATHS: Final = public_paths()


class Docstrings(griffe.Extension):
    """Public names and pages in docstrings become links. A compiled class shows its first ``__new__`` as constructor.

    The other ``__new__`` are those for stores of Redis, which have the same arguments. A class that only forebay makes
    shows no constructor.
    """

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if "__init__" in cls.members and str(cls.members["__init__"].returns) == "NoReturn":
            cls.del_member("__init__")
        made = cls.overloads.get("__new__")
        if made:
            parameters = griffe.Parameters(griffe.Parameter("self"), *list(made[0].parameters)[1:])
            cls.set_member("__init__", griffe.Function("__init__", parameters=parameters, lineno=made[0].lineno))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            own = obj.name

            def link(found: re.Match[str]) -> str:
                name = found[1]
                return f"[`{name}`][{PATHS[name]}]" if name in PATHS and name != own else found[0]

            text = NAME.sub(link, obj.docstring.value).replace("::\n", ":\n")
            obj.docstring.value = PAGE.sub(lambda found: f"[{title_of(found[1])}](../{found[1]}.md)", text)
