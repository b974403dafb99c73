"""Check the crates of the decision server, as native/server/deny.toml allows them: licenses, versions and sources.

For each line of its output, exits with 1. Reads what `cargo metadata` has locked, without a network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SERVER: Final = Path(__file__).resolve().parents[1] / "native" / "server"
REGISTRY: Final = "registry+https://github.com/rust-lang/crates.io-index"


def crates(targets: list[str]) -> dict[str, Any]:
    """All crates that are compiled for any of these targets, by their ids."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    command += [f"--filter-platform={target}" for target in targets]
    done = subprocess.run(command, cwd=SERVER, check=True, stdout=subprocess.PIPE)
    document = json.loads(done.stdout)
    nodes = {node["id"] for node in document["resolve"]["nodes"]}
    return {one["id"]: one for one in document["packages"] if one["id"] in nodes}


def is_allowed(expression: str, allowed: set[str]) -> bool:
    """Whether an SPDX expression, such as ``(MIT OR Apache-2.0) AND ISC``, can be met by these licenses."""
    # A slash is the older spelling of OR.
    parts = re.findall(r"[()]|[^\s()]+(?: WITH [^\s()]+)?", expression.replace("/", " OR "))
    return _is_met([{"(": "(", ")": ")", "AND": "AND", "OR": "OR"}.get(part, part in allowed) for part in parts])


def _is_met(parts: list[str | bool]) -> bool:
    """Removes what it reads. AND binds closer than OR."""
    any_met, all_met = False, True
    while parts:
        match parts.pop(0):
            case "(":
                all_met &= _is_met(parts)
            case ")":
                break
            case "OR":
                any_met, all_met = any_met or all_met, True
            case bool() as is_met:
                all_met &= is_met
    return any_met or all_met


def problems() -> Iterator[str]:
    """A line for each crate that isn't allowed."""
    terms = tomllib.loads((SERVER / "deny.toml").read_text())
    skipped = {tuple(one["crate"].split("@")) for one in terms["bans"]["skip"]}
    versions: dict[str, list[str]] = {}
    for one in crates(terms["graph"]["targets"]).values():
        name, version, licensed = one["name"], one["version"], one["license"] or "none"
        if not is_allowed(licensed, set(terms["licenses"]["allow"])):
            yield f"{name} {version} has the license {licensed}"
        if one["source"] not in (REGISTRY, None):
            yield f"{name} {version} comes from {one['source']}"
        if (name, version.partition(".")[0]) not in skipped:
            versions.setdefault(name, []).append(version)
    for name, several in versions.items():
        if len(several) > 1:
            yield f"{name} is there in several versions: {', '.join(several)}"


if __name__ == "__main__":
    found = list(problems())
    for line in found:
        print(f"native/server: {line}: see native/server/deny.toml", file=sys.stderr)
    sys.exit(bool(found))
