"""``forebay tune`` reads JSON lines, by msgspec, which has no wheel for every interpreter."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from access_logs import NS, SECOND, read_bytes

from forebay.tuning.problems import UnusableLog


@pytest.mark.parametrize("fields", [("remote_addr", "time"), ("ClientHost", "StartUTC"), ("ip", "@timestamp")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines_are_read(fields: tuple[str, str], end: str, tmp_path: Path) -> None:
    key, time = fields
    records = [{"other": {"b": [1, None]}, time: SECOND + number, key: f"192.0.2.{number}"} for number in range(3)]
    requests, reading = read_bytes(tmp_path, "".join(json.dumps(record) + end for record in records).encode())
    assert requests == [((SECOND + number) * NS, f"192.0.2.{number}") for number in range(3)]
    assert (reading.format, reading.lines, reading.unreadable.count) == ("json", 3, 0)


def test_fields_in_fields_and_named_fields_of_json_are_read(tmp_path: Path) -> None:
    record = {"ts": f"{SECOND}.5", "request": {"remote_ip": "192.0.2.1", "user": {"weird name": 42}}}
    content = json.dumps(record).encode()
    assert read_bytes(tmp_path, content)[0] == [(SECOND * NS + NS // 2, "192.0.2.1")]
    assert read_bytes(tmp_path, content, key="request.user.weird name")[0] == [(SECOND * NS + NS // 2, "42")]


def test_unreadable_json_lines_are_counted_with_their_numbers(tmp_path: Path) -> None:
    good = json.dumps({"time": SECOND, "ip": "192.0.2.1"})
    bad = ["{", "[]", '"x"', '{"time": 5}', '{"time": "?", "ip": "a"}', f"{good} {good}", '{"time": [], "ip": 1}', "\0"]
    content = "\n".join([*[good] * 50, *bad, "", *[good] * 50]).encode() + b'\n{"time": 1, "ip": "\xff"}\n'
    requests, reading = read_bytes(tmp_path, content)
    assert (len(requests), reading.lines, reading.unreadable.count) == (100, 110, 9)
    assert sorted(number for number, _ in reading.unreadable.examples)[0] == 51


def test_gzipped_json_is_read(tmp_path: Path) -> None:
    requests, _ = read_bytes(tmp_path, gzip.compress(b'{"time": 1700000000, "ip": "a"}\n' * 100_000))
    assert requests == [(SECOND * NS, "a")] * 100_000


@pytest.mark.parametrize("size", [1, 100, 3_000_000])
def test_binary_garbage_is_no_json(size: int, tmp_path: Path) -> None:
    garbage = random.Random(7).randbytes(size)
    with pytest.raises(UnusableLog, match="line 1 is no JSON object"):
        read_bytes(tmp_path, garbage, format="json")
    with pytest.raises(UnusableLog, match="lines are unreadable as json"):
        read_bytes(tmp_path, b'{"time": 1, "ip": 2}\n' + garbage * 3 + b"\n[\n{\n", format="json")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"a": 1, "b": {"c": 2}}', {}, r"line 1 has no field known to be a key: name one by --key, of 'a, b\.c'"),
        ('{"ip": 1, "b": 2}', {}, "no field known to be a time: name one by --time"),
        ('{"ip": 1, "time": 2}', {"key": "user"}, "line 1 has no field 'user'"),
        ("{ nothing", {}, "line 1 is no JSON object"),
        ("[]", {"format": "json"}, r"line 1 is no JSON object: '\[\]'"),
    ],
)
def test_a_field_that_json_lacks_is_named(content: str, options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match=message):
        read_bytes(tmp_path, content.encode(), **options)


def test_without_msgspec_the_error_names_the_extra(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text('{"time": 1, "ip": 2}\n')
    program = "import sys; sys.modules['msgspec'] = None; from forebay.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "tune", path, "--limit", "5/minute"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == 'this command needs the package msgspec: pip install "forebay[tune]"\n'
