"""The compiled modules; everything else about the package is in pyproject.toml."""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or sys.maxsize < 2**32:
    raise SystemExit(f"forebay supports 64-bit Linux on x86-64 and aarch64, not {sys.platform} on {platform.machine()}")
if sys.implementation.name != "cpython":
    raise SystemExit(f"forebay supports CPython, not {sys.implementation.name}")

PACKAGE = Path("src/forebay")
OPTIMIZE = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]
# Modules that no decision runs through are compiled to be small: a wheel has more code than anything else.
SMALL = ["-Os"] if OPTIMIZE else []
SELDOM_RUN = ("audit.pyx", "handles.pyx", "kinds.pyx", "segment_view.pyx")
HEADERS = sorted(map(str, [*PACKAGE.rglob("*.pxd"), *PACKAGE.rglob("*.h"), *Path("native/include").rglob("*.h")]))

extensions = [
    Extension(
        ".".join(source.relative_to("src").with_suffix("").parts),
        sources=[str(source)],
        depends=HEADERS,
        include_dirs=["native/include", "src/forebay/include"],
        extra_compile_args=[
            *(SMALL if source.name in SELDOM_RUN else OPTIMIZE),
            # As CPython itself; where CFLAGS is set, setuptools omits CPython's flags.
            *("-fwrapv", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"),
        ],
    )
    for source in sorted(PACKAGE.rglob("*.pyx"))
]
# What Cython adds to a module stands once, and not in each.
SHARED = "forebay.cython_utility"
extensions.append(
    Extension(SHARED, sources=["src/forebay/cython_utility.c"], extra_compile_args=[*SMALL, "-fvisibility=hidden"])
)
for extension in extensions:
    extension.shared_utility_qualified_name = SHARED
    extension.cython_directives = {
        "language_level": 3,
        "auto_pickle": False,
        "boundscheck": False,
        "wraparound": False,
        "cdivision": True,
        "embedsignature": True,
        "embedsignature.format": "clinic",
        "freethreading_compatible": True,
    }

setup(
    ext_modules=extensions,
    options={"build_ext": {"cython_c_in_temp": True, "parallel": os.cpu_count()}},
)
