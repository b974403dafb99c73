"""The server's readings of paths beside those of ``forebay.web``."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import forebay_server
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.web.native_requests import WSGIRequest
from forebay.web.native_requests import readings as python_readings

# Characters and beginnings that some router treats in a way of its own.
_PIECES = st.sampled_from(
    [
        *(
            "/",
            "//",
            ".",
            "..",
            ";",
            ";a=1",
            "@@",
            "%",
            "%2F",
            "%2f",
            "%2E",
            "%25",
            "%252F",
            "%C3%B6",
            "%FF",
            "%0A",
            "%3B",
        ),
        *("\n", "\r", "\t", " ", "?", "#", ":", "http://", "http://host/", "//host", "[", "]", "\\", "+", "~"),
        *("a", "login", "users", "7", "\u00f6", "\ufffd", "\u0130", "\U0001f600", "\x00", "\x1f", "\x7f", "\x85"),
    ]
)
PATHS = st.lists(_PIECES, max_size=12).map("".join)
_ODD_HOST = re.compile(r"[^\x00-\x7f\[\]]")


@given(st.lists(PATHS, min_size=1, max_size=3))
@settings(max_examples=500)
@example(["login"])
@example(["a:b/login"])
@example(["http://[::1]/login"])
@example(["/a/..;x"])
@example(["/" * 1025])
@example(["/" + "a" * 2000])
def test_paths_have_the_same_readings(paths: list[str]) -> None:
    ours, theirs = forebay_server.readings(paths), python_readings(*paths)
    assert set(ours) >= set(theirs)
    # Where urlsplit may refuse a host, both of its outcomes are readings.
    is_odd = any(
        not path.startswith("/") and re.search(r"//[^/?#]*[^\x00-\x7f]|[\[\]]", path) for path in decoded(paths)
    )
    assert set(ours) == set(theirs) or is_odd
    assert len(ours) == len(set(ours))


def decoded(paths: list[str]) -> list[str]:
    return [text for path in paths for text in (path, unquote_to_bytes(path).decode("utf-8", "replace"))]


@given(st.lists(st.one_of(_PIECES, st.binary(max_size=2).map(lambda raw: raw.decode("latin-1"))), max_size=12))
@settings(max_examples=500)
def test_a_target_has_every_reading_of_a_wsgi_server(pieces: list[str]) -> None:
    target = "".join(pieces).encode("utf-8", "replace")
    ours = forebay_server.target_readings(target)[0]
    path = target.partition(b"?")[0]
    theirs = WSGIRequest({"PATH_INFO": unquote_to_bytes(path).decode("latin-1"), "SCRIPT_NAME": ""}).paths
    # None of them: it may be any path.
    assert not ours or (theirs and set(theirs) <= set(ours))


def test_the_readings_of_a_plain_target_are_its_path() -> None:
    assert forebay_server.target_readings(b"/users/7?next=/a/../b") == (["/users/7"], ["/users/7"], ["/users/7"])


def test_an_encoded_slash_is_read_as_it_is_and_decoded() -> None:
    everything, sent, decoded = forebay_server.target_readings(b"/files/a%2Fb")
    assert {"/files/a%2Fb", "/files/a/b"} <= set(everything)
    assert "/files/a%2Fb" in sent
    assert "/files/a%2Fb" not in decoded
