"""The stubs' overloads of __new__ match the parameters of the classes: stubtest doesn't compare overloads."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import forebay

KINDS = [
    forebay.TokenBucket,
    forebay.LeakyBucket,
    forebay.MinInterval,
    forebay.FixedWindow,
    forebay.SlidingWindow,
    forebay.BucketedWindow,
    forebay.SlidingLog,
    forebay.Concurrency,
    forebay.AllOf,
]


def stub_of(kind: type) -> ast.ClassDef:
    compiled = Path(str(sys.modules[kind.__module__].__file__))
    stub = compiled.with_name(compiled.name.split(".")[0]).with_suffix(".pyi")
    (found,) = [
        node
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    return found


def shape_of(arguments: ast.arguments) -> list[tuple[Any, ...]]:
    """The name, kind and default of each parameter."""
    shape: list[tuple[Any, ...]] = []
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    shape += [(one.arg, "positional", default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        shape.append((arguments.vararg.arg, "all", None))
    shape += [
        (one.arg, "keyword", default and ast.unparse(default))
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return shape[1:]


def shape_of_init(kind: Any) -> list[tuple[Any, ...]]:
    names = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.VAR_POSITIONAL: "all",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
    }
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    return [(p.name, names[p.kind], None if p.default is p.empty else repr(p.default)) for p in parameters]


@pytest.mark.parametrize("kind", KINDS)
def test_the_stub_has_the_parameters_of_the_class(kind: type) -> None:
    news = [node.args for node in stub_of(kind).body if isinstance(node, ast.FunctionDef) and node.name == "__new__"]
    over_memory, *over_others = [shape_of(arguments) for arguments in news]
    assert over_memory == shape_of_init(kind)
    if kind is forebay.SlidingLog:
        # Over Redis there may be as many keys as there are.
        over_memory = [(*parameter[:2], "None") if parameter[0] == "keys" else parameter for parameter in over_memory]
    # Over Redis; and an AllOf of leased limiters may have some of both.
    assert over_others == [over_memory] * (2 if kind is forebay.AllOf else 1)
