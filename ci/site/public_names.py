"""The public names of forebay: those in ``__all__`` of its public modules, read from the sources without an import."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"

PUBLIC: Final = (
    *("forebay", "forebay.limits", "forebay.redis", "forebay.rules", "forebay.shedding", "forebay.testing"),
    *(
        "forebay.verification",
        "forebay.web",
        "forebay.contrib.aiohttp",
        "forebay.contrib.aiohttp_client",
        "forebay.contrib.django",
    ),
    *("forebay.contrib.fastapi", "forebay.contrib.flask", "forebay.contrib.httpx", "forebay.contrib.requests"),
    *("forebay.contrib.rest_framework", "forebay.contrib.arq", "forebay.contrib.celery", "forebay.contrib.dramatiq"),
    *("forebay.contrib.opentelemetry", "forebay.contrib.prometheus", "forebay.contrib.rq"),
)


def public_paths() -> dict[str, str]:
    """The path of each public name that only one public module has, and of ``Limiter``, which docstrings refer to."""
    paths = list(public_names())
    names = Counter(path.rpartition(".")[2] for path in paths)
    found = {name: path for path in paths if names[name := path.rpartition(".")[2]] == 1}
    return found | {"Limiter": "forebay.core.limiter.Limiter"}


def public_names() -> Iterator[str]:
    for module in PUBLIC:
        file = SOURCE / module.replace(".", "/")
        tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))
