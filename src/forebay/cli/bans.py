"""``forebay ban`` and ``forebay unban``: the bans of web rules, from outside."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.keys import key_of, key_options
from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, print_json, printable, refusals
from forebay.cli.states import seconds_text
from forebay.cli.survey import path_of_store
from forebay.core.kinds import MinInterval
from forebay.errors import ForebayError, InvalidLimiter, InvalidRate, short_repr
from forebay.rate import as_period_ns
from forebay.segment.limiter_list import encode_limiter_name
from forebay.store import Store
from forebay.web.bans import names_of_limiters

__all__ = ["ban_command", "unban_command"]

ENDING: Final = names_of_limiters("")[0]
ATTEMPTS: Final = 100

ban_option = click.option("--ban", "ban", metavar="NAME", help="The Ban's name; needed if the store has several.")


def _duration(text: str) -> str:
    try:
        as_period_ns(text)
    except InvalidRate:
        # Not the message of Python's arguments: in a shell there is neither a number of seconds nor a timedelta.
        accepted = 'a length of time with its unit, such as "10 minutes" or "30s", up to 10 years'
        raise click.BadParameter(f"it is {accepted}, not {short_repr(text)}") from None
    return text


@click.command("ban", short_help="Ban a key for a while.")
@store_argument()
@key_options
@click.option("--for", "lasts", type=_duration, metavar="TIME", required=True, help='Such as "10 minutes".')
@ban_option
@directory_option
@as_json_option
def ban_command(
    name: str,
    key: str | None,
    kind: str | None,
    parts: tuple[tuple[str, str], ...],
    lasts: str,
    ban: str | None,
    directory: str | None,
    as_json: bool,
) -> None:
    """Ban KEY for some TIME from now on, in a Ban of web rules that is kept in the store NAME.

    A ban that the key has already is replaced by this one. The store must have the Ban: the application makes it. A
    NAME with a slash is a file's path. Exits with 0, or with 2 if the key can't be banned.
    """
    with refusals():
        wanted = key_of(key, kind, parts)
        with Store.attach(path=path_of_store(name, directory)) as store:
            named, bans = _bans(store, ban, lasts)
            for _ in range(ATTEMPTS):
                bans.reset(wanted)
                decision = bans.hit(wanted)
                if decision.allowed:
                    break
                if decision.full:
                    raise ForebayError(f"{store.path} has no room for the key: make the store larger")
            else:
                raise ForebayError(f"other processes ban the key {wanted!r} again and again: try once more")
            seconds = bans.peek(wanted).retry_after
        _report(name, named, wanted, as_json, seconds)


@click.command("unban", short_help="End a key's ban.")
@store_argument()
@key_options
@ban_option
@directory_option
@as_json_option
def unban_command(
    name: str,
    key: str | None,
    kind: str | None,
    parts: tuple[tuple[str, str], ...],
    ban: str | None,
    directory: str | None,
    as_json: bool,
) -> None:
    """End the ban of KEY, in a Ban of web rules that is kept in the store NAME.

    Denials that count towards a next ban are not forgotten; a ban begins without any. A NAME with a slash is a file's
    path. Exits with 0, with 1 if the key was not banned, with 2 if the store can't be changed.
    """
    with refusals():
        wanted = key_of(key, kind, parts)
        with Store.attach(path=path_of_store(name, directory)) as store:
            named, bans = _bans(store, ban, "1 second")
            was_banned = not bans.peek(wanted).allowed
            bans.reset(wanted)
        _report(name, named, wanted, as_json, 0.0, was_banned)
        sys.exit(0 if was_banned else 1)


def _bans(store: Store, ban: str | None, lasts: str) -> tuple[str, Any]:
    """The name of a Ban of the store, and its limiter for bans that last so long. Raises ``InvalidLimiter``."""
    # See forebay.web.bans: a ban is a minimum interval, whose state is the time at which the ban ends.
    listed = list(store.attachment.limiters().values())
    # A long name is listed by its beginning, so its ban has to be named.
    names = [name.removesuffix(ENDING) for name, _ in listed if name.endswith(ENDING) and name != ENDING]
    known = [name for name in names if _has_ban(listed, name)]
    if ban is None and len(known) == 1:
        ban = known[0]
    if ban is None or not _has_ban(listed, ban):
        if not known:
            raise InvalidLimiter(f"{store.path}: the store has no Ban: see `forebay stat` for its limiters")
        shown = ", ".join(map(repr, known))
        what = "name one of its bans by --ban" if ban is None else f"there is no Ban {ban!r}"
        raise InvalidLimiter(f"{store.path}: {what}; its bans: {shown}")
    return ban, MinInterval(store, names_of_limiters(ban)[0], lasts)


def _has_ban(listed: Sequence[tuple[str, str]], name: str) -> bool:
    bans, denials = (encode_limiter_name(limiter).decode() for limiter in names_of_limiters(name))
    return (bans, "MinInterval") in listed and (denials, "FixedWindow") in listed


def _report(name: str, ban: str, key: object, as_json: bool, seconds: float, was_banned: bool = True) -> None:
    if as_json:
        print_json(store=name, ban=ban, key=repr(key), banned_for=seconds, was_banned=was_banned)
        return
    what = f"is banned for {seconds_text(seconds)}" if seconds else "is unbanned" if was_banned else "was not banned"
    consoles()[0].print(printable(f"{ban}: {key!r} {what}"), soft_wrap=True)
