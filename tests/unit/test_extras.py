"""A module whose package is missing names the extra that installs it."""

from __future__ import annotations

import json
import subprocess
import sys

from forebay import native

NEEDS = {
    "forebay.contrib.aiohttp": ("aiohttp", "aiohttp"),
    "forebay.contrib.aiohttp_client": ("aiohttp", "aiohttp"),
    "forebay.contrib.arq": ("arq", "arq"),
    "forebay.contrib.celery": ("celery", "celery"),
    "forebay.contrib.django": ("django", "django"),
    "forebay.contrib.dramatiq": ("dramatiq", "dramatiq"),
    "forebay.contrib.fastapi": ("starlette", "fastapi"),
    "forebay.contrib.flask": ("flask", "flask"),
    "forebay.contrib.httpx": ("httpx", "httpx"),
    "forebay.contrib.opentelemetry": ("opentelemetry", "opentelemetry"),
    "forebay.contrib.prometheus": ("prometheus_client", "prometheus"),
    "forebay.contrib.requests": ("requests", "requests"),
    "forebay.contrib.rest_framework": ("rest_framework", "rest-framework"),
    "forebay.contrib.rq": ("rq", "rq"),
    "forebay.redis": ("redis", "redis"),
    "forebay.rules.model": ("msgspec", "rules"),
    "forebay.cli.verify": ("click", "cli"),
    "forebay.cli.tune": ("click", "cli"),
}
if native:
    # With the pure-Python fallback its import has another error.
    NEEDS["forebay.limits"] = ("limits", "limits")

PROGRAM = """
import importlib, json, sys

sys.modules.update(dict.fromkeys(json.loads(sys.argv[2])))
raised = {}
for module in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raised[module] = [error.name, str(error)]
print(json.dumps(raised))
"""


def test_import_without_a_package_names_the_extra() -> None:
    # Django needs asgiref, so where Django is missing it is missing, too.
    packages = sorted({package for package, _ in NEEDS.values()} | {"asgiref"})
    program = [sys.executable, "-c", PROGRAM, json.dumps(list(NEEDS)), json.dumps(packages)]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    raised = json.loads(result.stdout)
    # REST framework needs Django first.
    expected = NEEDS | {"forebay.contrib.rest_framework": ("django", "rest-framework")}
    for module, (package, extra) in expected.items():
        name, message = raised[module]
        assert name.partition(".")[0] == package
        assert message.startswith(f"{module} needs the package {package}")
        assert message.endswith(f': pip install "forebay[{extra}]"')
