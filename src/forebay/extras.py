"""The error for a missing package that only some modules need."""

from __future__ import annotations

from types import TracebackType

__all__ = ["Needs"]


class Needs:
    """``with Needs("flask", __name__):`` around imports. Its ``ModuleNotFoundError`` names the extra to install."""

    def __init__(self, extra: str, module: str) -> None:
        self.extra, self.module = extra, module

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise ModuleNotFoundError(
                f"{self.module} needs the package {error.name}: pip install 'forebay[{self.extra}]'", name=error.name
            ) from None
