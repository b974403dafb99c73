"""Builds forebay once more, for the interleaving explorer: ``python native/interleave/build.py DIRECTORY``.

A copy of the sources, with the planted bugs in it and FOREBAY_EXPLORE defined, compiled in place. Put DIRECTORY on the
path to import it instead of the real one. Does nothing if nothing has changed since.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from planted_bugs import plant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def sources() -> list[Path]:
    kept = {".py", ".pyx", ".pxd", ".h", ".c", ".toml"}
    found = [p for folder in ("src", "native") for p in (ROOT / folder).rglob("*") if p.suffix in kept]
    return [*sorted(found), ROOT / "setup.py", ROOT / "pyproject.toml"]


def build(directory: Path) -> None:
    stamp = hashlib.sha256()
    for path in sources():
        stamp.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    stamped = directory / "stamp"
    if stamped.exists() and stamped.read_text() == stamp.hexdigest():
        return
    shutil.rmtree(directory, ignore_errors=True)
    for name in ("src/forebay", "native"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    core = directory / "src" / "forebay" / "core"
    for path in [*HERE.glob("*.pyx"), *HERE.glob("*.pxd")]:
        shutil.copy(path, core)
    plant(directory)
    explorer = directory / "native" / "interleave"
    library = ["-shared", "-fPIC", "-o", str(core / "libforebay_explore.so"), str(explorer / "explore.c")]
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Werror", *library], check=True)
    rpath = "$ORIGIN:$ORIGIN/.."  # modules of core and of its folders
    flags = f"-O2 -DFOREBAY_EXPLORE -I{explorer} -I{explorer / 'include'}"
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=directory,
        env=os.environ
        | {"CFLAGS": flags, "LDFLAGS": f"-L{core} -Wl,--no-as-needed -lforebay_explore -Wl,-rpath,{rpath}"},
        check=True,
    )
    stamped.write_text(stamp.hexdigest())


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
