"""Reading logs for the tests of ``forebay tune``."""

from __future__ import annotations

import datetime as dt
import io
import struct
from pathlib import Path

from forebay.tuning.readers import Reading, read
from forebay.tuning.requests import REQUEST_BYTES, Columns

NS = 10**9
SECOND = 1_700_000_000
Requests = list[tuple[int, str]]


def requests_of(file: io.BytesIO, columns: Columns) -> Requests:
    """What columns have written: times in ns and keys."""
    assert len(file.getvalue()) == columns.count * REQUEST_BYTES
    return [(time_ns, columns.keys.text(key)) for time_ns, key in struct.iter_unpack("<QI", file.getvalue())]


def read_bytes(folder: Path, content: bytes, **options: str) -> tuple[Requests, Reading]:
    """The requests in a log with this content."""
    path = folder / "access.log"
    path.write_bytes(content)
    file = io.BytesIO()
    columns = Columns(file)
    reading = read(str(path), columns, **options)  # type: ignore[arg-type]
    return requests_of(file, columns), reading


def line(second: int, key: str = "192.0.2.1", zone: dt.tzinfo = dt.UTC) -> str:
    """A line of the combined format."""
    time = dt.datetime.fromtimestamp(second, zone).strftime("%d/%b/%Y:%H:%M:%S %z")
    return f'{key} - - [{time}] "GET /a HTTP/1.1" 200 12 "-" "agent [x] 1.0"\n'
