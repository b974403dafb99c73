"""The key that a command is about, as its options describe it."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final, TypeVar

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.core.table.keys import Key
from forebay.errors import short_repr
from forebay.web import ClientAddress

__all__ = ["key_of", "key_options"]

Function = TypeVar("Function", bound=Callable[..., Any])

KINDS: Final = ("text", "int", "bytes")


def key_options(function: Function) -> Function:
    """The argument and the options that describe a key: their values are the arguments of `key_of`."""
    part = click.Tuple([click.Choice(KINDS), str])
    for add in (
        click.option("--part", "parts", type=part, metavar="TYPE VALUE", multiple=True, help="Of a tuple; repeatable."),
        click.option("--address", "kind", flag_value="address", help="KEY is a client's address."),
        click.option("--bytes", "kind", flag_value="bytes", help="KEY is bytes, in hexadecimal."),
        click.option("--int", "kind", flag_value="int", help="KEY is a whole number; else it is text."),
        click.argument("key", required=False),
    ):
        function = add(function)
    return function


def key_of(key: str | None, kind: str | None, parts: tuple[tuple[str, str], ...], client: Any = None) -> Key:
    """The key. `client` is the ``ClientAddress`` that reduces addresses; by default that of a middleware.

    Raises ``click.UsageError`` for values that don't go together, and ``ValueError`` for one that can't be read.
    """
    if (key is None) == (not parts):
        raise click.UsageError("give a KEY, or each --part of a tuple")
    if key is None:
        if kind is not None:
            raise click.UsageError("a --part has a type of its own: text, int or bytes")
        return tuple(_value(one, text) for one, text in parts)
    if kind == "address":
        try:
            address = ip_address(key)
        except ValueError:
            raise ValueError(f"{short_repr(key)} is no address such as 192.0.2.1") from None
        reduced: str = (client or ClientAddress()).key_of(str(address), None)
        return reduced
    return _value(kind or "text", key)


def _value(kind: str, text: str) -> str | bytes | int:
    try:
        return int(text) if kind == "int" else bytes.fromhex(text) if kind == "bytes" else text
    except ValueError:
        what = "whole number" if kind == "int" else "hexadecimal number of bytes such as 00ff"
        raise ValueError(f"{short_repr(text)} is no {what}") from None
