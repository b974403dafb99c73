"""Builds the hammer against the headers and declarations of this tree: ``python setup.py build_ext``."""

from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parents[2]

hammer = Extension(
    "hammer",
    sources=[str(Path(__file__).with_name("hammer.pyx"))],
    include_dirs=[str(ROOT / "native" / "include")],
    extra_compile_args=["-O3", "-Wno-unused-function"],
)
hammer.cython_include_dirs = [str(ROOT / "src")]
hammer.cython_directives = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "freethreading_compatible": True,
}

setup(name="hammer", ext_modules=[hammer], options={"build_ext": {"cython_c_in_temp": True}})
