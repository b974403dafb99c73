"""The report of ``forebay tune``, opened in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
from access_logs import SECOND, line

COMMAND = Path(sys.executable).parent / "forebay"
GENERATED = ("--traffic", "poisson", "--requests", "20000", "--users", "50", "--rate", "70/minute")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "tune", *arguments], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser that the report is opened in; ci/test installs it."""
    found = shutil.which("chromium")
    assert found is not None, "chromium is missing: apt-get install chromium"
    return found


def browse(chromium: str, page: Path, *options: str | Path) -> str:
    """Open a page without a network. Returns what the browser prints."""
    result = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--force-color-profile=srgb"),
            *(f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def pixels(image: bytes) -> Counter[bytes]:
    """How often each colour is in a PNG of 8 bits per channel without interlacing."""
    chunks, at = [], 8
    while at < len(image):
        (size,) = struct.unpack_from(">I", image, at)
        chunks.append((image[at + 4 : at + 8], image[at + 8 : at + 8 + size]))
        at += size + 12
    width, _, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    raw = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    stride = width * channels
    before = bytearray(stride)
    found: Counter[bytes] = Counter()
    for start in range(0, len(raw), stride + 1):
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for index in range(stride if kind else 0):
            left = row[index - channels] if index >= channels else 0
            corner = before[index - channels] if index >= channels else 0
            up = before[index]
            nearest = min((left, up, corner), key=lambda value, sum_=left + up - corner: abs(sum_ - value))
            row[index] = (row[index] + (0, left, up, (left + up) // 2, nearest)[kind]) % 256
        found.update(bytes(row[index : index + 3]) for index in range(0, stride, channels))
        before = row
    return found


def test_the_report_opens_in_a_browser_without_a_network(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    limits = ("--limit", "60/minute", "--limit", "80/minute", "--deny-at-most", "5%")
    result = run(*GENERATED, *limits, "--html", page, "--json")
    source = page.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", source)
    document = json.loads(result.stdout)
    dom = browse(chromium, page, "--dump-dom")
    shown = html.unescape(re.sub(r"<[^>]+>", "\n", dom))
    for candidate in document["candidates"]:
        assert f"{candidate['denied_share']:.3%}" in shown
        assert f"{candidate['differing']:,} ({candidate['differing_share']:.4%})" in shown
    assert f"20,000 requests of {document['source']['users']} users" in shown
    assert f"{document['suggestions'][0]['limit']} per minute is the least limit" in " ".join(shown.split())
    assert dom.count("</svg>") == source.count("</svg>") == 9
    # Not only parsed, but painted: each algorithm's colour in bars and lines.
    picture = tmp_path / "report.png"
    browse(chromium, page, "--window-size=1000,3600", f"--screenshot={picture}")
    found = pixels(picture.read_bytes())
    for colour in ("0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "999999"):
        assert found[bytes.fromhex(colour)] > 200, f"the browser painted nothing in {colour}"


def test_text_in_the_report_is_escaped(chromium: str, tmp_path: Path) -> None:
    log = tmp_path / "<img src=x>.log"
    attack = "<script>document.title='attacked'</script>"
    log.write_text(line(SECOND, attack) * 50 + f"{attack}\n")
    page = tmp_path / "report.html"
    run(log, "--limit", "5/minute", "--html", page)
    dom = browse(chromium, page, "--dump-dom")
    assert "<title>forebay tune</title>" in dom
    assert "<img" not in dom
    assert "document.title='attacked'" in html.unescape(re.sub(r"<[^>]+>", "", dom))
