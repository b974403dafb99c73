"""Builds the examples beside it: ``python setup.py build_ext --inplace``."""

from setuptools import Extension, setup

import forebay

setup(
    name="forebay-examples",
    ext_modules=[
        Extension("gate", ["gate.c"], include_dirs=[forebay.get_include()]),
        Extension("service", ["service.c"], include_dirs=[forebay.get_include()]),
        Extension("line_filter", ["line_filter.pyx"], include_dirs=[forebay.get_include()]),
    ],
)
