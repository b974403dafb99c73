"""Run one target with atheris: ``python fuzz.py TARGET [libFuzzer's options and corpora]``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["forebay"]):
    import targets

if __name__ == "__main__":
    target = sys.argv.pop(1)
    atheris.Setup(sys.argv, getattr(targets, target))
    atheris.Fuzz()
