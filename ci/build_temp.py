"""Print the folder of a build's temporary files, where Cython's output is kept, by interpreter and platform."""

from setuptools import Distribution

build = Distribution().get_command_obj("build")
build.ensure_finalized()
print(build.build_temp)
