"""Builds floor.pyx with the package's compiler flags. ci/bench runs it."""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
HEADERS = HERE.parent.parent / "native" / "include"

extension = Extension(
    "forebay_floor",
    sources=[str(HERE / "forebay_floor.pyx")],
    depends=sorted(map(str, HEADERS.rglob("*.h"))),
    include_dirs=[str(HEADERS)],
    extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"],
)
extension.cython_directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True}

setup(name="forebay-floor", ext_modules=[extension], options={"build_ext": {"cython_c_in_temp": True}})
