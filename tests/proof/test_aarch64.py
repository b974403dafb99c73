"""The headers as they are compiled for aarch64, run on processors without and with its newer atomic instructions.

Under an emulator, where this is another processor: that shows what the instructions do, not in which order a real
processor lets others see it. The orders are read off the instructions, and their meaning is argued in atomics.h.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = platform.machine() == "aarch64"
PREFIX = "" if HERE else "aarch64-linux-gnu-"
PROCESSORS = {"as it is": []} if HERE else {"exclusive pairs": ["-cpu", "cortex-a53"], "LSE": ["-cpu", "max"]}

ORDERS = """
#include "forebay/atomics.h"
uint64_t load_seq_cst(uint64_t *p) { return forebay_load_seq_cst(p); }
bool cas128_seq_cst(ForebayCell *c, ForebayCell e, ForebayCell d) { return forebay_cas128_seq_cst(c, e, d); }
ForebayCell load128(ForebayCell *c) { return forebay_load128_acquire(c); }
"""


def compiled(directory: Path, source: Path, *options: str) -> Path:
    program = directory / "program"
    command = [f"{PREFIX}gcc", "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread", f"-I{ROOT / 'native' / 'include'}"]
    subprocess.run([*command, *options, "-o", str(program), str(source)], check=True)
    return program


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("question", ["semantics", "race"])
@pytest.mark.parametrize("loads", ["wide", "narrow"])
def test_atomic_operations(tmp_path: Path, processor: str, question: str, loads: str) -> None:
    program = compiled(tmp_path, ROOT / "tests" / "unit" / "native_headers.c", "-static")
    emulator = [] if HERE else ["qemu-aarch64", *PROCESSORS[processor]]
    narrow = ["narrow"] if loads == "narrow" else []
    done = subprocess.run([*emulator, program, question, *narrow], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if question == "race":
        assert int(done.stdout) > 0, "the writers never met"


@pytest.mark.parametrize("architecture", ["armv8-a", "armv8.3-a", "armv9-a"])
def test_orders_are_those_that_the_arguments_name(tmp_path: Path, architecture: str) -> None:
    """Whatever newer loads a compiler may use for acquire: LDAPR would let the scan be before the claim."""
    source = tmp_path / "orders.c"
    source.write_text(ORDERS)
    program = compiled(tmp_path, source, "-c", f"-march={architecture}")
    listing = subprocess.run(
        [f"{PREFIX}objdump", "-d", "--no-show-raw-insn", program], capture_output=True, text=True, check=True
    ).stdout
    functions = dict(re.findall(r"<(\w+)>:\n(.*?)(?:\n\n|\Z)", listing, re.DOTALL))
    assert "ldar\t" in functions["load_seq_cst"]
    assert "caspal\t" in functions["cas128_seq_cst"]
    assert "ldaxp\t" in functions["cas128_seq_cst"]
    assert "stlxp\t" in functions["cas128_seq_cst"]
    # The load of both halves, then what keeps later loads behind it.
    assert re.search(r"ldp\t.*\n.*dmb\tishld", functions["load128"])
    # No calls, which might enter a library that locks, except the one made once when an extension is loaded.
    assert set(re.findall(r"\bbl\t\S+ <(\w+)", listing)) == {"getauxval"}
