"""``forebay tune`` reads logs: times, keys, formats, and input that is damaged or hostile."""

from __future__ import annotations

import datetime as dt
import gzip
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from access_logs import NS, SECOND, Requests, line, read_bytes, requests_of
from hypothesis import given
from hypothesis import strategies as st

from forebay.tuning.problems import UnusableLog
from forebay.tuning.requests import REQUEST_BYTES, Columns, Keys
from forebay.web import ClientAddress


def extended(times: Sequence[object], keys: Sequence[object]) -> tuple[Requests, list[int]]:
    file = io.BytesIO()
    columns = Columns(file)
    bad = columns.extend(times, keys)
    columns.finish()
    return requests_of(file, columns), bad


# Times


@given(
    st.datetimes(dt.datetime(1970, 1, 2), dt.datetime(2042, 12, 30)),
    st.integers(-15 * 60, 15 * 60),
    st.sampled_from(["T", " "]),
    st.sampled_from([":", ""]),
)
def test_iso_times_are_those_of_datetime(time: dt.datetime, zone: int, between: str, colon: str) -> None:
    aware = time.replace(tzinfo=dt.timezone(dt.timedelta(minutes=zone)))
    text = f"{time:%Y-%m-%d}{between}{time:%H:%M:%S}.{time.microsecond:06}"
    text += f"{'-' if zone < 0 else '+'}{abs(zone) // 60:02}{colon}{abs(zone) % 60:02}"
    expected = (aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1) * 1000
    assert extended([text], ["a"]) == ([(expected, "a")], [])


@given(st.datetimes(dt.datetime(1970, 1, 2), dt.datetime(2042, 12, 30)), st.integers(-15 * 60, 15 * 60))
def test_combined_times_are_those_of_datetime(time: dt.datetime, zone: int) -> None:
    aware = time.replace(microsecond=0, tzinfo=dt.timezone(dt.timedelta(minutes=zone)))
    expected = (aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(seconds=1) * NS
    assert extended([aware.strftime("%d/%b/%Y:%H:%M:%S %z")], ["a"]) == ([(expected, "a")], [])


@pytest.mark.parametrize(
    ("time", "time_ns"),
    [
        (SECOND, SECOND * NS),
        (SECOND * 1000 + 5, SECOND * NS + 5_000_000),
        (SECOND * 10**6 + 5, SECOND * NS + 5000),
        (SECOND * NS + 5, SECOND * NS + 5),
        (float(SECOND) + 0.25, SECOND * NS + NS // 4),
        (f"{SECOND}.250", SECOND * NS + NS // 4),
        (f" {SECOND} ", SECOND * NS),
        ("2023-11-14T22:13:20Z", SECOND * NS),
        ("2023-11-14 22:13:20", SECOND * NS),
        ("2023-11-14T22:13:20,123456789123Z", SECOND * NS + 123_456_789),
        ("2024-02-29T00:00:00Z", 1_709_164_800 * NS),
    ],
)
def test_a_time_in_any_unit_is_read(time: object, time_ns: int) -> None:
    assert extended([time], ["a"]) == ([(time_ns, "a")], [])


@pytest.mark.parametrize(
    "time",
    [
        *("", "yesterday", "-5", "1e9", "2023-02-29T00:00:00Z", "2023-13-01T00:00:00Z", "2023-01-01T24:00:00Z"),
        *("2023-01-01T00:00:00+25:00", "2023-01-01T00:00:00 UTC", "2023-01-01", "2099-01-01T00:00:00Z", "9" * 30),
        *("31/Apr/2023:00:00:00 +0000", "01/Xxx/2023:00:00:00 +0000", "2023-01-01T00:00:00.5x", "\ud800"),
        *(None, True, -1, 2**80, float("nan"), float("inf"), -0.5, 1e30, [], b"1700000000"),
    ],
)
def test_what_is_no_time_is_unreadable(time: object) -> None:
    assert extended([time, SECOND], ["a", "b"]) == ([(SECOND * NS, "b")], [0])


@pytest.mark.parametrize("key", ["", None, True, 1.5, ["a"], "\udcff"])
def test_what_is_no_key_is_unreadable(key: object) -> None:
    assert extended([SECOND, SECOND], [key, "b"]) == ([(SECOND * NS, "b")], [0])


# Keys


@given(st.lists(st.text(), max_size=50))
def test_distinct_keys_get_distinct_numbers(texts: list[str]) -> None:
    keys = Keys()
    encoded = [text.encode() for text in texts if ":" not in text]
    numbers = [keys.number(text) for text in encoded]
    assert numbers == [list(dict.fromkeys(encoded)).index(text) for text in encoded]
    assert [keys.text(number) for number in numbers] == [text.decode() for text in encoded]


def test_many_keys_keep_their_numbers() -> None:
    keys = Keys()
    texts = [b"key %d" % number * (number % 7 + 1) for number in range(20_000)]
    assert [keys.number(text) for text in texts] == list(range(20_000))
    assert [keys.number(text) for text in texts] == list(range(20_000))
    assert [keys.text(number).encode() for number in range(20_000)] == texts
    assert keys.count == 20_000


@given(
    st.one_of(
        st.ip_addresses().map(str),
        st.ip_addresses(v=6).map(lambda address: address.exploded),
        st.ip_addresses(v=4).map(lambda address: f"::ffff:{address}"),
        st.ip_addresses(v=4).map(lambda address: f"{address}:443"),
        st.ip_addresses(v=6).map(lambda address: f"[{address}]:443"),
        st.ip_addresses(v=6).map(lambda address: f"{address}%eth0"),
        st.sampled_from(["::", "::1", "fe80::1%eth0", "[::1]"]),
    )
)
def test_an_address_is_the_key_that_the_web_limits_use(address: str) -> None:
    keys = Keys()
    keys.number(address.encode())
    assert keys.text(0) == ClientAddress().key_of(address, None)


@pytest.mark.parametrize("text", [":", "::::", "a:b", "[::1", "[:", "1.2.3.4.5:6", "1" * 100 + ":2", ":" * 1000, "%:"])
def test_a_key_with_colons_that_is_no_address_stays_as_it_is(text: str) -> None:
    keys = Keys()
    keys.number(text.encode())
    assert keys.text(0) == text


# Order


@given(st.lists(st.integers(0, 400), max_size=300), st.integers(1, 80))
def test_requests_are_sorted_as_far_as_the_window_reaches(moves: list[int], window: int) -> None:
    times = [SECOND * NS + 50 * index + move for index, move in enumerate(moves)]
    file = io.BytesIO()
    columns = Columns(file, window)
    columns.extend(times, [str(index) for index in range(len(times))])
    columns.finish()
    found = requests_of(file, columns)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    assert sorted(int(key) for _, key in found) == list(range(len(times)))
    assert columns.reordered == sum(times[index] < times[index - 1] for index in range(1, len(times)))
    if columns.late == 0:
        # A stable sort: requests of one time keep their order.
        assert found == sorted(zip(times, map(str, range(len(times))), strict=True), key=lambda request: request[0])
    assert columns.late == sum(time != times[int(key)] for time, key in found)
    if window >= 8:
        assert columns.late == 0


def test_a_large_window_is_sorted_stably() -> None:
    moving = random.Random(1)
    times = [SECOND * NS + index // 100 + moving.randrange(50) for index in range(20_000)]
    file = io.BytesIO()
    columns = Columns(file, 7001)
    columns.extend(times, list(range(len(times))))
    columns.finish()
    expected = sorted(zip(times, map(str, range(len(times))), strict=True), key=lambda request: request[0])
    assert (columns.late, requests_of(file, columns)) == (0, expected)


def test_a_request_behind_the_window_gets_the_time_before_it() -> None:
    file = io.BytesIO()
    columns = Columns(file, 2)
    columns.extend([SECOND, SECOND + 1, SECOND + 2, SECOND + 3, SECOND - 9], list("abcde"))
    columns.finish()
    assert columns.late == columns.reordered == 1
    assert requests_of(file, columns)[2] == ((SECOND + 1) * NS, "e")


class Full(io.RawIOBase):
    """A file that takes a few bytes at a time, and then no more."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, bytearray()

    def write(self, data: Any) -> int:
        if len(self.taken) >= self.room:
            raise OSError(28, "No space left on device")
        self.taken += bytes(data[:5])
        return len(data[:5])


def test_a_full_disk_is_refused_with_the_remedy() -> None:
    for room in (0, 20):
        columns = Columns(Full(room))
        columns.extend([SECOND] * 9, ["a"] * 9)
        with pytest.raises(UnusableLog, match=r"temporary file, 12 bytes each: .*No space left on device: set TMPDIR"):
            columns.finish()
    slow = Full(1000)
    columns = Columns(slow)
    columns.extend([SECOND] * 9, ["a"] * 9)
    columns.finish()
    assert len(slow.taken) == 9 * REQUEST_BYTES


# Formats


def test_combined_lines_are_read(tmp_path: Path) -> None:
    zone = dt.timezone(dt.timedelta(hours=-7))
    content = line(SECOND) + line(SECOND + 1, "2001:db8::1", zone) + "\n" + line(SECOND + 1, "host.example")
    requests, reading = read_bytes(tmp_path, content.encode())
    assert requests == [
        (SECOND * NS, "192.0.2.1"),
        ((SECOND + 1) * NS, "2001:db8::/64"),
        ((SECOND + 1) * NS, "host.example"),
    ]
    assert (reading.format, reading.lines, reading.unreadable.count) == ("combined", 4, 0)


def test_brackets_in_a_name_and_crlf_are_read(tmp_path: Path) -> None:
    content = line(SECOND).replace("- -", "- [a] b [") + "\n" + line(SECOND)
    requests, reading = read_bytes(tmp_path, content.replace("\n", "\r\n").encode())
    assert requests == [(SECOND * NS, "192.0.2.1")] * 2
    assert reading.unreadable.count == 0


def test_a_last_line_without_an_end_is_read(tmp_path: Path) -> None:
    requests, reading = read_bytes(tmp_path, (line(SECOND) * 2).rstrip("\n").encode())
    assert (len(requests), reading.lines) == (2, 2)


def test_csv_is_read(tmp_path: Path) -> None:
    content = f'time,"some, text",ip\n{SECOND},"a\nb ""c""",192.0.2.1\n\n{SECOND + 1},"x",192.0.2.2\n{SECOND},y\n'
    content += "".join(f"{SECOND + 2},,192.0.2.3\n" for _ in range(20_000))
    for encoded in (content.encode(), content.replace("\n", "\r\n").encode(), content.encode("utf-8-sig")):
        requests, reading = read_bytes(tmp_path, encoded)
        assert requests[:3] == [
            (SECOND * NS, "192.0.2.1"),
            ((SECOND + 1) * NS, "192.0.2.2"),
            ((SECOND + 2) * NS, "192.0.2.3"),
        ]
        assert (reading.format, len(requests), reading.unreadable.count) == ("csv", 20_002, 1)
        assert reading.unreadable.examples == [(6, "a row of 2 values, too few for time and key")]


@pytest.mark.parametrize("content", [line(SECOND), "time,ip\n1700000000,a\n"])
def test_gzip_is_read_in_any_format_and_in_several_members(content: str, tmp_path: Path) -> None:
    rows = content.splitlines(keepends=True)
    packed = gzip.compress(content.encode()) + gzip.compress(rows[-1].encode() * 100_000)
    requests, reading = read_bytes(tmp_path, packed)
    assert (len(requests), reading.unreadable.count) == (100_001, 0)


# Damage


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(("".join(line(SECOND + number) for number in range(5000))).encode())
    for size in (3, 12, len(packed) // 2, len(packed) - 1):
        with pytest.raises(UnusableLog, match=r"gzip data is damaged or cut off .*copy it again"):
            read_bytes(tmp_path, packed[:size])
    with pytest.raises(UnusableLog, match="gzip data is damaged"):
        read_bytes(tmp_path, packed[:500] + b"\0\0\0\0" + packed[504:])


@pytest.mark.parametrize("format_", ["combined", "csv", None])
def test_binary_garbage_is_refused(format_: str | None, tmp_path: Path) -> None:
    garbage = random.Random(7)
    options = {} if format_ is None else {"format": format_}
    for size in (1, 100, 3_000_000):
        with pytest.raises(UnusableLog, match=r"line 1|unreadable|no requests"):
            read_bytes(tmp_path, garbage.randbytes(size), **options)


def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match="unreadable as combined"):
        read_bytes(tmp_path, b"a [" + b"]" * 5_000_000, format="combined")


@pytest.mark.parametrize("content", [b"", b"\n\n\n", gzip.compress(b"")])
def test_an_empty_log_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match=r"access\.log: it has no requests"):
        read_bytes(tmp_path, content)


def test_some_unreadable_lines_are_counted_and_many_refused(tmp_path: Path) -> None:
    bad = b"\xff\x00 no line\n"
    requests, reading = read_bytes(tmp_path, line(SECOND).encode() * 9 + bad)
    assert (len(requests), reading.lines, reading.unreadable.count) == (9, 10, 1)
    assert reading.unreadable.examples[0][0] == 10
    assert "no line" in reading.unreadable.examples[0][1]
    with pytest.raises(UnusableLog, match=r"2 of 10 lines are unreadable as combined \(line 9: .*--format"):
        read_bytes(tmp_path, line(SECOND).encode() * 8 + bad * 2)


def test_times_that_jump_back_within_the_window_are_sorted(tmp_path: Path) -> None:
    content = "".join(line(SECOND + second) for second in (5, 3, 9, 9, 0, 7))
    requests, _ = read_bytes(tmp_path, content.encode())
    assert [time_ns // NS - SECOND for time_ns, _ in requests] == [0, 3, 5, 7, 9, 9]


def test_an_unsorted_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match=r"sort the log by time first"):
        read_bytes(tmp_path, (line(SECOND + 9) * 300_000 + line(SECOND) * 10_000).encode())


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("time,b\n1,2\n", {}, "no field known to be a key"),
        ("ip,time\n1,2\n", {"time": "when"}, "no field 'when'"),
        (line(SECOND), {"key": "user"}, "--key and --time name fields of JSON and CSV"),
        ("nothing", {}, "line 1 is none of a known format: 'nothing'; name it by --format"),
    ],
)
def test_a_field_that_is_missing_is_named(content: str, options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match=message):
        read_bytes(tmp_path, content.encode(), **options)
