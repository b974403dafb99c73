"""Byte rates under WSGI: the thread that reads or sends a body waits for its turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from forebay.web.byte_rates import Meters
from forebay.web.inputs import READ_AT_ONCE, PiecewiseInput
from forebay.web.metering import Meter
from forebay.web.renewals import Renewals, renew_while_reading, renewals_of
from forebay.web.request import Environ

__all__ = ["MeteredApplication"]

StartResponse = Callable[..., Callable[[bytes], object]]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class MeteredApplication:
    """An application with the meters of one request.

    A file that it returns as a ``wsgi.file_wrapper`` is read in parts, as any other body: the server doesn't send it by
    itself. While a piece waits, the leases that any layer of middleware holds for the request are renewed.
    """

    def __init__(self, app: Application, meters: Meters) -> None:
        self._app, self._meters = app, meters

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        reading, sending = self._meters
        renewals = renewals_of(environ)
        if reading is not None and environ.get("wsgi.input") is not None:
            renew_while_reading(environ, renewals)
            environ["wsgi.input"] = _MeteredInput(environ["wsgi.input"], reading, renewals)
        return _MeteredResponse(self._app, environ, start_response, reading, sending, renewals)


class _MeteredResponse:
    def __init__(
        self,
        app: Application,
        environ: Environ,
        start_response: StartResponse,
        reading: Meter | None,
        sending: Meter | None,
        renewals: Renewals,
    ) -> None:
        self._start_response, self._meter, self._renewals = start_response, sending, renewals
        self._meters = [meter for meter in (reading, sending) if meter is not None]
        self._body: Iterable[bytes] = ()
        try:
            self._body = app(environ, start_response if sending is None else self._start)
            # In the block: the server closes nothing if an application has returned no body.
            self._pieces = iter(self._body) if sending is None else self._metered(sending)
        except BaseException:
            self._end()
            raise

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        meter = self._meter
        assert meter is not None
        meter.begin(int(status[:3]))
        send = self._start_response(status, headers, *([] if exc_info is None else [exc_info]))

        def write(part: bytes) -> None:
            for piece in meter.pieces(part, self._renewals):
                send(piece)

        return write

    def _metered(self, meter: Meter) -> Iterator[bytes]:
        for part in self._body:
            if part:
                yield from meter.pieces(part, self._renewals)
            else:
                yield part

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._end()

    def _end(self) -> None:
        for meter in self._meters:
            meter.end()


class _MeteredInput(PiecewiseInput):
    """A request's body, which is read no faster than its meter allows."""

    def __init__(self, body: Any, meter: Meter, renewals: Renewals) -> None:
        super().__init__(body)
        self._meter, self._renewals = meter, renewals

    def _most_at_once(self) -> int:
        # At most so much is in memory whose turn hasn't come.
        return READ_AT_ONCE

    def _came(self, piece: bytes) -> None:
        for _ in self._meter.pieces(piece, self._renewals):
            pass
