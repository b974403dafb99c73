"""``forebay rules status``, ``publish`` and ``promote``: live rules, of a store and of a source."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, print_error, print_json, printable, refusals
from forebay.errors import InvalidLimiter, InvalidRuleFile

__all__ = ["promote_command", "publish_command", "status_command"]


@click.command("status")
@store_argument()
@directory_option
@as_json_option
def status_command(name: str, directory: str | None, as_json: bool) -> None:
    """Show which live rules the store NAME has, who loads them, what is wrong, and what each limit has decided.

    Counts of a rule in the shadow are what it would have decided. A NAME with a slash is a file's path. Exits with 0,
    with 1 if the source isn't in force, with 2 if there are no live rules.
    """
    with refusals():
        status = _status(name, directory)
        if as_json:
            print_json(**status)
        else:
            _print(status)
    sys.exit(1 if status["error"] else 0)


def _print(status: dict[str, Any]) -> None:
    say = functools.partial(consoles()[0].print, soft_wrap=True)
    say(printable(f"version {status['rules_version']}, from {status['source']}, since {status['since']}"))
    checked = status["checked_ago"]
    by = "no process loads them" if status["loader"] is None else f"loaded by process {status['loader']}"
    say(f"{by}{'' if checked is None else f', which read the source {checked:.1f} s ago'}")
    for limit, counts in status["limits"].items():
        say(printable(f"  {limit}: allowed: {counts['allowed']}, denied: {counts['denied']}"))
    if status["error"]:
        for line in f"the last good rules are in force: {status['error']}".split("\n"):
            say(printable(line))


@click.command("publish")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("source")
def publish_command(file: Path, source: str) -> None:
    """Check FILE, and write it to SOURCE, from where applications load it.

    SOURCE is a file, redis://HOST/0#KEY, or an SQLAlchemy URL with #ROW or #TABLE:ROW. Exits with 0, with 1 if the file
    has problems, with 2 if it can't be read or written.
    """

    def publish() -> str:
        from forebay.rules.keys import Functions
        from forebay.rules.live.sources import source_at
        from forebay.rules.live.version import checked_limits

        document = file.read_bytes()
        # As the applications check it: a document that they would refuse reaches no source. Their function of tiers is
        # not here.
        checked_limits(str(file), document, Functions(lambda request: ""))
        target = source_at(source)
        if (own := _syntax_of(str(file))) != _syntax_of(target.name):
            raise InvalidLimiter(
                f"{file} is {own.upper()}, and applications don't read {target.label} so: "
                f"give a source whose name ends with .{own}"
            )
        target.write(document)
        return f"{target.label} has {file}"

    _run(publish)


@click.command("promote")
@click.argument("rule")
@click.argument("source")
def promote_command(rule: str, source: str) -> None:
    """Enforce the RULE of SOURCE that is in the shadow, or give its canary's limits to all keys.

    SOURCE is a file, redis://HOST/0#KEY, or an SQLAlchemy URL with #ROW or #TABLE:ROW. One value of the document
    changes. Exits with 0, with 1 if the document has problems, with 2 if there is nothing to promote, the source can't
    be read or written, or its document has changed meanwhile.
    """

    def promote() -> str:
        from forebay.rules.live.promotion import promoted
        from forebay.rules.live.sources import source_at

        target = source_at(source)
        found = target.read()
        document, what = promoted(found, target.name, rule)
        target.write(document, instead_of=found)
        return f"{target.label}: the rule {rule!r} {what}"

    _run(promote)


def _syntax_of(name: str) -> str:
    end = Path(name.lower()).suffix.lstrip(".")
    return "yaml" if end == "yml" else end


def _run(work: Callable[[], str]) -> None:
    try:
        consoles()[0].print(printable(work()), soft_wrap=True)
    except Exception as error:
        # A driver raises errors of its own.
        print_error(error)
        sys.exit(1 if isinstance(error, InvalidRuleFile) else 2)


def _status(name: str, directory: str | None) -> dict[str, Any]:
    from forebay.cli.survey import path_of_store
    from forebay.rules.live.loader import read_note
    from forebay.rules.live.publication import Board, UnreadableRules
    from forebay.store import Store

    with Store.attach(path=path_of_store(name, directory)) as store:
        board = Board(store)
        version = board.version
        if not version:
            raise UnreadableRules(
                f"{store.path} has no live rules: an application gives them, by LiveRules over this store"
            )
        published = board.read(version)
        note, checked_ago = read_note(board)
        counted = store.stats().limiters
    return {
        "rules_version": version,
        "source": published.source,
        "since": published.since.astimezone(UTC).isoformat(timespec="seconds"),
        "loader": None if note is None else note.loader,
        "checked_ago": checked_ago,
        "error": None if note is None else note.error,
        "limits": {
            limit: {"allowed": counts.allowed, "denied": counts.denied}
            for limit, counts in counted.items()
            if limit in published.limits and not published.limits[limit].is_removed
        },
    }
