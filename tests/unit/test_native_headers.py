"""The C headers of the hot path, compiled without the extension: hash, atomics, arithmetic."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MASK = 2**64 - 1
LONGEST = 80

RunNative = Callable[..., str]


@pytest.fixture(scope="module", params=["-O0", "-O3"])
def run_native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunNative:
    """Runs native_headers.c with the given arguments and standard input; returns its output."""
    program = tmp_path_factory.mktemp("native") / "native_headers"
    subprocess.run(
        [
            os.environ.get("CC", "cc"), "-std=gnu11", request.param, "-Wall", "-Wextra", "-Werror", "-pthread",
            f"-I{ROOT / 'native' / 'include'}", "-o", str(program), str(Path(__file__).with_name("native_headers.c")),
        ],
        check=True,
    )  # fmt: skip

    def run(*arguments: str, text: str = "") -> str:
        done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def siphash(key: tuple[int, int], data: bytes, compressions: int, finalizations: int) -> int:
    """SipHash-c-d, written as in its paper."""
    v = [
        key[0] ^ 0x736F6D6570736575,
        key[1] ^ 0x646F72616E646F6D,
        key[0] ^ 0x6C7967656E657261,
        key[1] ^ 0x7465646279746573,
    ]

    def half_round(a: int, b: int, c: int, d: int, s: int, t: int) -> None:
        v[a] = (v[a] + v[b]) & MASK
        v[c] = (v[c] + v[d]) & MASK
        v[b] = (v[b] << s | v[b] >> 64 - s) & MASK ^ v[a]
        v[d] = (v[d] << t | v[d] >> 64 - t) & MASK ^ v[c]
        v[a] = (v[a] << 32 | v[a] >> 32) & MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            half_round(0, 1, 2, 3, 13, 16)
            half_round(2, 1, 0, 3, 17, 21)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) % 256])
    for start in range(0, len(padded), 8):
        word = int.from_bytes(padded[start : start + 8], "little")
        v[3] ^= word
        rounds(compressions)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(finalizations)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_reference_agrees_with_the_paper_and_with_cpython() -> None:
    key = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    assert siphash(key, bytes(range(15)), 2, 4) == 0xA129CA6149BE45E5
    assert siphash(key, b"", 2, 4) == 0x726FDB47DD0E0E31
    # CPython hashes bytes with SipHash-1-3 under a key of zeros when hash randomisation is off.
    code = (
        "import sys; assert sys.hash_info.algorithm == 'siphash13'; "
        f"print(*(hash(bytes(range(size))) for size in range(1, {LONGEST})))"
    )
    cpython = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    ).stdout
    assert [int(value) & MASK for value in cpython.split()] == [
        siphash((0, 0), bytes(range(size)), 1, 3) for size in range(1, LONGEST)
    ]


@pytest.mark.parametrize(
    "key",
    [
        (0, 0),
        (0x0706050403020100, 0x0F0E0D0C0B0A0908),
        (MASK, MASK),
        (1, 2**63),
        (0xD1342543DE82EF95, 0x9E3779B97F4A7C15),
    ],
    ids=["zero", "paper", "ones", "ends", "mixed"],
)
def test_siphash13_agrees_with_the_reference_at_every_length(run_native: RunNative, key: tuple[int, int]) -> None:
    hashes = [int(line, 16) for line in run_native("hash", f"{key[0]:x}", f"{key[1]:x}", str(LONGEST)).split()]
    assert hashes == [siphash(key, bytes(range(size)), 1, 3) for size in range(LONGEST + 1)]


def test_siphash13_agrees_with_the_reference_around_256_bytes(run_native: RunNative) -> None:
    """The hash takes the length modulo 256."""
    hashes = run_native("hash", "1", "2", "520").split()
    for size in (255, 256, 257, 511, 512, 513, 520):
        assert int(hashes[size], 16) == siphash((1, 2), bytes(i % 256 for i in range(size)), 1, 3)


def test_128_bit_products_and_quotients_are_exact(run_native: RunNative) -> None:
    chance = random.Random(1)
    edges = [0, 1, 2, 3, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, MASK - 1, MASK]
    triples = [(a, b, divisor) for a in edges for b in edges for divisor in edges[1:]]
    triples += [tuple(chance.getrandbits(chance.randint(1, 64)) or 1 for _ in range(3)) for _ in range(5000)]  # type: ignore[misc]
    answers = run_native("arithmetic", text="".join(f"{a} {b} {divisor}\n" for a, b, divisor in triples)).splitlines()
    assert len(answers) == len(triples)
    for (a, b, divisor), answer in zip(triples, answers, strict=True):
        high, up, down = map(int, answer.split())
        assert high == a * b >> 64
        # The caller guarantees that the quotient fits, and the sum before it.
        if -(-a * b // divisor) <= MASK and a * b + divisor - 1 < 2**128:
            assert (up, down) == (-(-a * b // divisor), a * b // divisor)


@pytest.mark.parametrize("loads", [[], ["narrow"]], ids=["wide loads", "without wide loads"])
def test_atomic_operations_match_their_names(run_native: RunNative, loads: list[str]) -> None:
    run_native("semantics", *loads)


@pytest.mark.parametrize("loads", [[], ["narrow"]], ids=["wide loads", "without wide loads"])
def test_cell_is_never_torn_and_no_write_is_lost(run_native: RunNative, loads: list[str]) -> None:
    failures = int(run_native("race", *loads))
    assert failures > 0, "no CAS failed: the writers never raced"
