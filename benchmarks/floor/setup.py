"""Builds the floors and the loops over the C API with the package's compiler flags. ci/bench runs it in this folder."""

from pathlib import Path

from setuptools import Extension, setup

import forebay

HEADERS = Path(__file__).resolve().parents[2] / "native" / "include"

extensions = [
    Extension(
        name,
        sources=[f"{name}.pyx"],
        depends=sorted(map(str, HEADERS.rglob("*.h"))),
        include_dirs=[str(HEADERS), forebay.get_include()],
        extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"],
    )
    for name in ("forebay_floor", "forebay_native")
]
for extension in extensions:
    extension.cython_directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True}

setup(name="forebay-floor", ext_modules=extensions, options={"build_ext": {"cython_c_in_temp": True}})
