"""Arguments and options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.store_options import DIRECTORY, is_name

__all__ = ["as_json_option", "directory_option", "more_option", "store_argument"]

Function = TypeVar("Function", bound=Callable[..., Any])

as_json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
directory_option: Final = click.option("--directory", metavar="DIR", help="The directory of the store of that NAME.")
more_option: Final = click.option(
    "--directory", "more", metavar="DIR", multiple=True, help="Look there, too; repeatable."
)


def store_argument(*, required: bool = True) -> Callable[[Function], Function]:
    """The argument NAME: a store's name, or with a slash in it the path of its file. Shells complete it."""
    return click.argument("name", required=required, shell_complete=_completed)


def _completed(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    # Other systems than Linux have no stores to survey, and these options nevertheless.
    from forebay.cli.survey import PREFIX, directories, files_in

    # Every user can make files in /dev/shm, and a shell would run what a name such as "$(...)" says.
    files = (path for place in directories(()) for path in files_in(place))
    found = [path for path in files if is_name(os.path.basename(path).removeprefix(PREFIX))]
    # A name, where that is enough to find the file.
    names = [path.removeprefix(f"{DIRECTORY}{PREFIX}") for path in found]
    return [name for name in names if name.startswith(begun)]
