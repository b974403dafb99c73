"""The error for a missing package that only some modules need."""

from __future__ import annotations

from types import TracebackType

__all__ = ["MissingExtra", "Needs"]


class MissingExtra(ModuleNotFoundError):
    """A package is missing that an extra of forebay installs.

    Attributes: ``name`` (the package), ``remedy`` (how to install it).
    """

    def __init__(self, module: str, name: str | None, extra: str) -> None:
        self.remedy = f'pip install "forebay[{extra}]"'
        super().__init__(f"{module} needs the package {name}: {self.remedy}", name=name)


class Needs:
    """``with Needs("flask", __name__):`` around imports. Its ``MissingExtra`` names the extra to install."""

    def __init__(self, extra: str, module: str) -> None:
        self.extra, self.module = extra, module

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise MissingExtra(self.module, error.name, self.extra) from None
