"""``forebay rules``: check a rule file, explain what it does with a request, and print its schema."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from rich.console import Console

from forebay.cli.live_rules import promote_command, publish_command, status_command
from forebay.cli.options import as_json_option
from forebay.cli.printing import consoles, print_error, print_json, printable, refusals
from forebay.errors import InvalidRuleFile

__all__ = ["command"]


@click.group("rules")
def command() -> None:
    """Check and explain files of limits and rules; see and change live rules."""


@command.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
def check_command(file: Path, as_json: bool) -> None:
    """Find every problem of the rule file FILE, with its line and column.

    Opens no store: only load_rules() can find what the store itself would refuse. Exits with 0 if the file is valid,
    with 1 if it has problems, with 2 if it can't be read.
    """
    say = functools.partial(consoles()[0].print, soft_wrap=True)
    with refusals():
        try:
            spec, _, _ = _checked(file, None, None)
        except InvalidRuleFile as error:
            if as_json:
                problems = [{"line": one.line, "column": one.column, "message": one.message} for one in error.problems]
                print_json(problems=problems)
            else:
                for line in str(error).split("\n"):
                    say(printable(line))
            sys.exit(1)
        now = datetime.now(UTC)
        ended = [
            {"rule": rule.name, "override": number, "until": override.until.isoformat()}
            for rule in spec.rules
            for number, override in enumerate(rule.overrides)
            if override.until <= now
        ]
        denies = spec.deny or []
        ended_lists = [
            {"deny": one.name, "until": one.until.isoformat()} for one in denies if one.until and one.until <= now
        ]
        if as_json:
            counts: dict[str, Any] = {"limits": len(spec.limits), "rules": len(spec.rules), "deny": len(denies)}
            counts["shedders"] = len(spec.shedders or {})
            counts |= {"ended_overrides": ended, "ended_deny": ended_lists}
            print_json(problems=[], **counts)
            return
        lists = f", deny lists: {len(denies)}" if denies else ""
        lists += f", shedders: {len(spec.shedders)}" if spec.shedders else ""
        say(f"{printable(str(file))} is valid: limits: {len(spec.limits)}, rules: {len(spec.rules)}{lists}")
        for one in ended_lists:
            say(printable(f"deny list {one['deny']!r} has ended, at {one['until']}"))
        for one in ended:
            say(printable(f"rule {one['rule']!r}: overrides[{one['override']}] has ended, at {one['until']}"))


@command.command("explain")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("request")
@click.option("--client", metavar="ADDRESS", help="The address at the other end of the connection.")
@click.option("--header", "headers", metavar="'NAME: VALUE'", multiple=True, help="Repeatable.")
@click.option("--tier", help="The tier that the application names.")
@click.option("--user", help="The user that the application names.")
@as_json_option
def explain_command(
    file: Path,
    request: str,
    client: str | None,
    headers: tuple[str, ...],
    tier: str | None,
    user: str | None,
    as_json: bool,
) -> None:
    """Show which rules, shedders and deny lists of FILE are for a REQUEST such as "POST /login", why the others
    aren't, and keys, limits and costs.

    Charges nothing, and opens no store. Exits with 0, with 1 if the file has problems, with 2 if the request can't be
    explained.
    """
    with refusals():
        from forebay.rules.explanation import explain
        from forebay.web.client import UnknownPeer

        try:
            spec, _, built = _checked(file, tier, user)
            if spec.tiers and tier is None:
                raise click.UsageError(f"the file has tiers: give --tier, one of {', '.join(spec.tiers)}")
            if spec.tiers and tier not in spec.tiers:
                consoles()[1].print(printable(f"note: the file has no tier {tier!r}, so the rules of all tiers hold"))
            asked = _request(request, client, headers)
            explained = explain(built, asked)
        except InvalidRuleFile as error:
            print_error(error)
            sys.exit(1)
        except UnknownPeer:
            raise ValueError("the rules need the client's address: give --client, such as --client 192.0.2.1") from None
        if as_json:
            rules = [{**dataclasses.asdict(one), "until": one.until and one.until.isoformat()} for one in explained]
            shown = {"method": asked.method, "path": asked.path, "client": client}
            print_json(request=shown, rules=rules)
        else:
            _print(explained, consoles()[0])


@command.command("schema")
def schema_command() -> None:
    """Print the JSON schema of rule files, for editors."""
    with refusals():
        from forebay.rules.model import json_schema

        print(json.dumps(json_schema(), indent=1))


for _live in (status_command, publish_command, promote_command):
    command.add_command(_live)


def _checked(file: Path, tier: str | None, user: str | None) -> Any:
    from forebay.rules.keys import Functions
    from forebay.rules.loading import check

    # Every file may name tiers, whether or not the command has one.
    functions = Functions(lambda request: tier or "", None if user is None else lambda request: user)
    return check(str(file), file.read_bytes(), functions)


def _request(text: str, client: str | None, headers: tuple[str, ...]) -> Any:
    from forebay.web.native_requests import ASGIRequest

    method, space, path = text.strip().partition(" ")
    if not space:
        method, path = "GET", method
    path = path.strip().partition("?")[0]
    if not path.startswith("/"):
        raise click.UsageError(f'a REQUEST is such as "POST /login", not {text!r}')
    pairs = []
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f"a header is such as 'X-API-Key: secret', not {header!r}")
        pairs.append((name.strip().lower().encode("latin-1", "replace"), value.strip().encode("latin-1", "replace")))
    try:
        ip_address(client or "192.0.2.1")
    except ValueError:
        raise click.UsageError(f"--client is an address such as 192.0.2.1, not {client!r}") from None
    scope = {"type": "http", "method": method, "path": unquote(path), "headers": pairs, "root_path": ""}
    return ASGIRequest({**scope, "client": None if client is None else (client, 0)})


def _print(explained: Any, console: Console) -> None:
    def say(text: str) -> None:
        console.print(printable(text), soft_wrap=True)

    for one in explained:
        shadow = ", in the shadow" if one.shadow else ""
        if not one.applies:
            say(f"{one.rule}: not for this request: {'; '.join(one.reasons)}")
            continue
        if one.is_list:
            until = f" until {one.until.isoformat()}" if one.until else ""
            say(f"{one.rule}: refused{until}, by the deny list")
            continue
        priority = "" if one.priority is None else f", priority {one.priority!r}"
        if one.is_shedder:
            [shedder] = one.limits
            say(f"{one.rule}: denies by the load{priority}: {shedder.algorithm}, {shedder.allowance}")
            continue
        if not one.key:
            say(f"{one.rule}: applies{priority}")
            continue
        key = one.key_words
        until = f" until {one.until.isoformat()}, by an override" if one.until else ""
        if one.override in ("exempt", "deny"):
            say(f"{one.rule}{shadow}: {'exempt' if one.override == 'exempt' else 'denied'}{until}: key {key}{priority}")
            continue
        charge = f"bytes of {one.bytes}" if one.bytes else f"cost {one.cost}"
        other = ", other limits, by its canary" if one.override == "canary" else until and f", other limits{until}"
        say(f"{one.rule}{shadow}: applies: key {key}, {charge}{other}{priority}")
        for limit in one.limits:
            say(f"  {limit.name}: {limit.algorithm}, {limit.allowance}")
        if one.retries:
            say(f"  {one.retries}")
        if one.ban is not None:
            say(f"  banned after too many denials: {one.ban}")
