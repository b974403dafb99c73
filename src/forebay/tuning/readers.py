"""Reading access logs: combined format, JSON lines and CSV, plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import ipaddress
import itertools
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from forebay.errors import short_repr
from forebay.extras import Needs
from forebay.tuning.problems import UnusableLog
from forebay.tuning.requests import Columns, CombinedLines

__all__ = ["FORMATS", "Reading", "Unreadable", "read"]

FORMATS: Final = ("combined", "json", "csv")

BLOCK_BYTES: Final = 2**20
LONGEST_LINE: Final = 2**20
ROWS: Final = 8192
"""Rows of CSV that are added at a time."""
EXAMPLES: Final = 5
MOST_UNREADABLE: Final = 0.1
"""The share of unreadable lines that makes a log unusable."""
FIRST_CHECK: Final = 10_000
"""So many lines are read before their share ends the reading early."""
MOST_LATE: Final = 0.01

# Names that servers and proxies give these fields, the usual ones first.
KEY_FIELDS: Final = (
    *("remote_addr", "client_ip", "request.client_ip", "remote_ip", "request.remote_ip", "ClientHost", "clientip"),
    *("client.ip", "ip", "address", "client", "remote", "host", "key", "user"),
)
TIME_FIELDS: Final = (
    *("time", "timestamp", "@timestamp", "ts", "time_iso8601", "msec", "time_local", "StartUTC", "datetime", "date"),
)


@dataclass
class Unreadable:
    """Lines that hold no request, and what they lack."""

    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((line, why))

    def __str__(self) -> str:
        return "; ".join(f"line {line:,}: {why}" for line, why in self.examples)


@dataclass
class Reading:
    """The number of lines that a reader saw, and those that it could not read."""

    name: str
    format: str
    lines: int = 0
    unreadable: Unreadable = field(default_factory=Unreadable)
    warning: str | None = None
    """Why the keys may not be users, and the remedy."""

    def check(self) -> None:
        """Raise ``UnusableLog`` if too many lines are unreadable."""
        count = self.unreadable.count
        if count > MOST_UNREADABLE * self.lines:
            raise UnusableLog(
                f"{self.name}: {count:,} of {self.lines:,} lines are unreadable as {self.format} ({self.unreadable}): "
                "name another --format, or the fields by --time and --key, or filter the log"
            )


def read(
    path: str,
    columns: Columns,
    *,
    format: str | None = None,  # noqa: A002  # as the command's option
    key: str | None = None,
    time: str | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Reading:
    """Read the requests of a log into `columns`; ``-`` is standard input.

    `format` is recognized by the first line if it is left out. `key` and `time` name the fields of JSON lines (with
    dots for fields in fields) and CSV. `progress` gets the bytes read and their total, if that is known. Raises
    ``UnusableLog``, and ``OSError``.
    """
    with _open(path) as raw:
        name = "standard input" if path == "-" else path
        status = os.fstat(raw.fileno())
        total = status.st_size if stat.S_ISREG(status.st_mode) else None
        blocks = _whole_lines(_unpacked(raw, name, columns))
        first = next(blocks, b"")
        found = format or _format_of(first, name)
        if found == "combined" and (key, time) != (None, None):
            raise UnusableLog(f"{name}: --key and --time name fields of JSON and CSV, and this log is {found}")
        reading = Reading(name, found)
        watched = _watched(first, blocks, reading, lambda: progress(raw.tell() if total is not None else 0, total))
        if found == "combined":
            reading.warning = _doubt(first)
            _add_combined(watched, reading, columns)
        elif found == "json":
            _JsonLines(columns, first, key, time, name).add_all(watched, reading)
        else:
            _add_csv(watched, reading, columns, key, time)
        reading.check()
    columns.finish()
    if columns.count == 0:
        raise UnusableLog(f"{name}: it has no requests ({reading.lines:,} lines): give a log with at least one")
    if columns.late > MOST_LATE * columns.count:
        raise UnusableLog(
            f"{name}: {columns.late:,} of {columns.count:,} requests are dated before others that came more than "
            "100,000 lines earlier: sort the log by time first"
        )
    return reading


def _open(path: str) -> BinaryIO:
    return open(sys.stdin.fileno() if path == "-" else path, "rb", closefd=path != "-")


def _unpacked(raw: BinaryIO, name: str, columns: Columns) -> Iterator[bytes]:
    """The log's bytes, of a gzip file those packed in it."""
    start = raw.read(BLOCK_BYTES)
    if not start.startswith(b"\x1f\x8b"):
        while start:
            yield start
            start = raw.read(BLOCK_BYTES)
        return
    packed = gzip.GzipFile(fileobj=io.BufferedReader(_Rejoined(start, raw), BLOCK_BYTES))
    try:
        while block := packed.read(BLOCK_BYTES):
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnusableLog(
            f"{name}: its gzip data is damaged or cut off after {columns.count:,} requests ({error}): copy it again, "
            "or replay what is readable: zcat LOG | forebay tune -"
        ) from None


class _Rejoined(io.RawIOBase):
    """The bytes `start`, and then those of `raw`: standard input can't be read twice."""

    def __init__(self, start: bytes, raw: BinaryIO) -> None:
        self._start, self._raw = io.BytesIO(start), raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._start.read(len(buffer)) or self._raw.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Blocks that end with a line's end. Lines that are longer than LONGEST_LINE are cut, so memory is bounded."""
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
            if len(rest) > LONGEST_LINE:
                yield rest
                rest = b""
    if rest:
        yield rest


def _watched(
    block: bytes, following: Iterator[bytes], reading: Reading, progress: Callable[[], None]
) -> Iterator[bytes]:
    """All blocks. Checks the reading and reports progress after each."""
    while block:
        yield block
        if reading.lines >= FIRST_CHECK:
            reading.check()
        progress()
        block = next(following, b"")


def _format_of(block: bytes, name: str) -> str:
    line = block.lstrip().partition(b"\n")[0].rstrip()
    if line.startswith((b"{", b"\xef\xbb\xbf{")):
        return "json"
    if b" [" in line and b"]" in line:
        return "combined"
    if b"," in line:
        return "csv"
    if not line:
        raise UnusableLog(f"{name}: it has no requests: give a log with at least one line")
    raise UnusableLog(
        f"{name}: line 1 is none of a known format: {short_repr(_shown(line))}; name it by --format, one of "
        f"{', '.join(FORMATS)}"
    )


def _shown(line: bytes) -> str:
    return line[:100].decode(errors="backslashreplace")


def _doubt(block: bytes) -> str | None:
    """Why the first words of these lines may not be users: some servers write their own name there."""
    word = _shown(block.lstrip().partition(b" ")[0])
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return (
            f"the first line begins with {short_repr(word)}, which is no address, and each such word counts as a user: "
            "if it names the server, leave it out: cut -d' ' -f2- LOG | forebay tune -"
        )
    return None


def _add_combined(blocks: Iterator[bytes], reading: Reading, columns: Columns) -> None:
    lines = CombinedLines(columns)
    for block in blocks:
        for number, line in lines.add(block):
            reading.unreadable.add(number, f"no address and [10/Oct/2000:13:55:36 -0700] in {_quoted(line)}")
        reading.lines = lines.lines


def _quoted(line: bytes) -> str:
    return short_repr(_shown(line))


def _lines_in(block: bytes) -> int:
    return block.count(b"\n") + (not block.endswith(b"\n"))


class _JsonLines:
    """JSON lines. A decoder for the two fields skips all others."""

    def __init__(self, columns: Columns, first: bytes, key: str | None, time: str | None, name: str) -> None:
        with Needs("tune", __name__):
            import msgspec
        self._columns = columns
        self._error = msgspec.MsgspecError
        line = first.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnusableLog(f"{name}: line 1 is no JSON object: {_quoted(line)}: {error}") from None
        if not isinstance(record, dict):
            raise UnusableLog(f"{name}: line 1 is no JSON object: {_quoted(line)}")
        names = sorted(_names_in(record))
        self._key = _field(key, KEY_FIELDS, names, "key", name).split(".")
        self._time = _field(time, TIME_FIELDS, names, "time", name).split(".")
        self._decoder = msgspec.json.Decoder(_record_type([self._key, self._time]))

    def add_all(self, blocks: Iterator[bytes], reading: Reading) -> None:
        for block in blocks:
            lines = block.removeprefix(b"\xef\xbb\xbf")
            self._add(lines, reading)
            reading.lines += _lines_in(lines)

    def _add(self, block: bytes, reading: Reading) -> None:
        try:
            records = self._decoder.decode_lines(block)
        except (self._error, UnicodeDecodeError):
            records = []
        numbers: list[int] | range = range(len(records))
        if len(records) != _lines_in(block):
            # Some lines are no objects, or blank, or hold several.
            numbers, records = self._single_lines(block, reading)
        times, keys = _values(records, self._time), _values(records, self._key)
        for index in self._columns.extend(times, keys):
            reading.unreadable.add(
                reading.lines + numbers[index] + 1,
                f"{'.'.join(self._time)} {short_repr(times[index])} and {'.'.join(self._key)} "
                f"{short_repr(keys[index])} are no time and key",
            )

    def _single_lines(self, block: bytes, reading: Reading) -> tuple[list[int], list[Any]]:
        numbers, records = [], []
        for number, line in enumerate(block.split(b"\n")):
            if not line.strip():
                continue
            try:
                records.append(self._decoder.decode(line))
            except (self._error, UnicodeDecodeError):
                reading.unreadable.add(reading.lines + number + 1, f"no JSON object with these fields: {_quoted(line)}")
            else:
                numbers.append(number)
        return numbers, records


def _names_in(record: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _names_in(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _field(given: str | None, known: tuple[str, ...], names: list[str], what: str, log: str) -> str:
    """The field that is given, or the first known one that the log has."""
    found = [name for name in ([given] if given is not None else known) if name in names]
    if not found:
        lacks = f"no field {short_repr(given)}" if given is not None else f"no field known to be a {what}"
        raise UnusableLog(f"{log}: line 1 has {lacks}: name one by --{what}, of {short_repr(', '.join(names))}")
    return found[0]


def _record_type(paths: list[list[str]]) -> Any:
    """A type of msgspec with these fields only; a field's name is its position."""
    import msgspec

    fields = {}
    for name in dict.fromkeys(path[0] for path in paths):
        inner = [path[1:] for path in paths if path[0] == name and len(path) > 1]
        fields[name] = _record_type(inner) if inner else str | int | float | None
    return msgspec.defstruct(
        "Record",
        [(f"field_{name.encode().hex()}", kind | None, None) for name, kind in fields.items()],
        rename={f"field_{name.encode().hex()}": name for name in fields},
        gc=False,
    )


def _values(records: list[Any], path: list[str]) -> list[Any]:
    values = records
    for name in path:
        attribute = f"field_{name.encode().hex()}"
        values = [getattr(value, attribute, None) for value in values]
    return values


def _add_csv(blocks: Iterator[bytes], reading: Reading, columns: Columns, key: str | None, time: str | None) -> None:
    """CSV with a row of names first."""
    # One reader for all blocks: a quoted value may hold line ends.
    rows = csv.reader(itertools.chain.from_iterable(map(_lines_of, blocks)))
    try:
        names = next(rows)
    except (csv.Error, StopIteration):
        raise UnusableLog(f"{reading.name}: line 1 is no row of CSV: name another --format") from None
    at_time = names.index(_field(time, TIME_FIELDS, names, "time", reading.name))
    at_key = names.index(_field(key, KEY_FIELDS, names, "key", reading.name))
    times: list[str] = []
    keys: list[str] = []
    numbers: list[int] = []

    def add() -> None:
        for index in columns.extend(times, keys):
            shown = f"{short_repr(times[index])} and {short_repr(keys[index])}"
            reading.unreadable.add(numbers[index], f"{shown} are no time and key")
        times.clear()
        keys.clear()
        numbers.clear()
        reading.lines = rows.line_num

    while True:
        try:
            for row in rows:
                if len(row) > at_time and len(row) > at_key:
                    times.append(row[at_time])
                    keys.append(row[at_key])
                    numbers.append(rows.line_num)
                    if len(numbers) == ROWS:
                        add()
                elif row:
                    reading.unreadable.add(rows.line_num, f"a row of {len(row)} values, too few for time and key")
        except csv.Error as error:
            reading.unreadable.add(rows.line_num, str(error))
        else:
            break
    add()


def _lines_of(block: bytes) -> Iterator[str]:
    return io.StringIO(block.decode("utf-8-sig", errors="backslashreplace"), newline="")
