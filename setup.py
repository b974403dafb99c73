"""The compiled modules and the readme; everything else about the package is in pyproject.toml.

Without them the wheel is pure Python, py3-none-any: where they can't be built, and with FOREBAY_FALLBACK=1. That wheel
alone has the fallback.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# On Linux a wheel without the compiled core is never built unasked: a server's workers would each count alone.
IS_PURE = sys.platform != "linux" or os.environ.get("FOREBAY_FALLBACK") == "1"
ASK = "for development in one process, FOREBAY_FALLBACK=1 builds and uses the pure-Python fallback"

if not IS_PURE and (platform.machine() not in ("x86_64", "aarch64") or sys.maxsize < 2**32):
    raise SystemExit(f"forebay supports 64-bit Linux on x86-64 and aarch64, not {platform.machine()}; {ASK}")
if not IS_PURE and sys.implementation.name != "cpython":
    raise SystemExit(f"forebay supports CPython on Linux, not {sys.implementation.name}; {ASK}")

PACKAGE = Path("src/forebay")
# ``ci/wheels`` sets FOREBAY_OPTIMIZE for wheels that would be too large.
OPTIMIZE = [] if "-O" in os.environ.get("CFLAGS", "") else [os.environ.get("FOREBAY_OPTIMIZE", "-O3")]
# Modules that no decision of a host runs through are compiled to be small: a wheel has more code than anything else.
SMALL = ["-Os"] if OPTIMIZE else []
SELDOM_RUN = {
    *(PACKAGE / "core" / name for name in ("audit.pyx", "kinds.pyx", "limiter.pyx", "reservation.pyx")),
    *(PACKAGE / "core/c_api" / name for name in ("functions.pyx", "handles.pyx")),
    *(PACKAGE / "core/table" / name for name in ("segment_view.pyx", "threads.pyx")),
    *(PACKAGE / name for name in ("segment/mapping.pyx", "core/synced/limiter.pyx", "awaited.pyx")),
    *(PACKAGE / "tuning" / name for name in ("replay.pyx", "requests.pyx")),
    *(PACKAGE / "redis/transport" / name for name in ("replies.pyx", "timed_socket.pyx")),
}
# The modules of larger limiters lose 0 to 3 % of their speed with -O2, and are smaller.
MODERATE = ["-O2"] if OPTIMIZE else []
LARGE = {
    *PACKAGE.glob("core/synced/*.pyx"),
    *(PACKAGE / "core/algorithms" / name for name in ("bucketed_window.pyx", "concurrency.pyx", "credits.pyx")),
    PACKAGE / "core/leased.pyx",
}
# Small are methods that run seldom, in every module, and what runs after an error. None is inlined into what isn't
# small; but of the objects that each request makes, the constructors are.
MADE_OFTEN = {"forebay.core.decision", "forebay.web.native_requests"}
SELDOM_CALLED = re.compile(
    r"^(static (?:int|void|PyObject \*) ?(?:__Pyx_AddTraceback|__Pyx_GetBuiltinName|__pyx_f_\w+?_(?:follow_calendar|"
    r"gcra_params_of)|__pyx_p[wf]_\w+?_\d*(?:"
    r"__cinit__|__init__|__repr__|__reduce__|__copy__|__deepcopy__|add|bytes_needed|convert|exceeded|limited|reset|wait"
    r"|wait_async))\([^;{]*(?<!\(cold\))\));",
    re.MULTILINE,
)
# The docstring of a compiled module is for readers of its source.
MODULE_DOCSTRING = re.compile(r"\b__pyx_k_\w+(?=, /\* m_doc \*/)")
HEADERS = sorted(map(str, [*PACKAGE.rglob("*.pxd"), *PACKAGE.rglob("*.h"), *Path("native/include").rglob("*.h")]))

# Strings that Cython has compressed are larger in a wheel than those that only the wheel compresses.
MACROS = [("CYTHON_COMPRESS_STRINGS", "0")]

extensions = [
    Extension(
        ".".join(source.relative_to("src").with_suffix("").parts),
        sources=[str(source)],
        depends=HEADERS,
        include_dirs=["native/include", "src/forebay/include"],
        extra_compile_args=[
            *(SMALL if source in SELDOM_RUN else MODERATE if source in LARGE else OPTIMIZE),
            # As CPython itself; where CFLAGS is set, setuptools omits CPython's flags.
            *("-fwrapv", "-fvisibility=hidden", "-Wall", "-Wno-unused-function", "-Wno-unused-const-variable"),
            # Calls of CPython's functions go through no stub: they are shorter that way, and no slower.
            "-fno-plt",
        ],
        define_macros=MACROS,
    )
    for source in sorted(PACKAGE.rglob("*.pyx"))
]
# What Cython adds to a module stands once, and not in each.
SHARED = "forebay.cython_utility"
extensions.append(
    Extension(
        SHARED,
        sources=["src/forebay/cython_utility.c"],
        extra_compile_args=[*SMALL, "-fvisibility=hidden"],
        define_macros=MACROS,
    )
)
extensions[-1].shared_utility_features_disabled = ["MemoryView"]  # its larger part, which no module uses
for extension in extensions:
    extension.shared_utility_qualified_name = SHARED
    extension.cython_directives = {
        "language_level": 3,
        "auto_pickle": False,
        "binding": False,  # methods as those of CPython's own types: smaller, and faster to call
        "boundscheck": False,
        "wraparound": False,
        "cdivision": True,
        "embedsignature": True,
        "embedsignature.format": "clinic",
        "freethreading_compatible": True,
    }

NO_COMPILER = """\
forebay is being built from its sources, and {problem}. To compile, install:
  Debian, Ubuntu:  apt-get install gcc libc6-dev python3-dev
  Fedora, RHEL:    dnf install gcc python3-devel
  Alpine:          apk add gcc musl-dev linux-headers python3-dev
A wheel needs no compiler. pip takes one if there is one for this Python and system, and if pip is recent:
  python -m pip install --upgrade pip"""


def check_compiler() -> None:
    """End with advice unless C can be compiled, which else shows only after Cython has run for a minute."""
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    words += shlex.split(os.environ.get("CPPFLAGS", "")) + shlex.split(os.environ.get("CFLAGS", ""))
    words += [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    with TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n#include <linux/membarrier.h>\n")
        try:
            result = subprocess.run(
                [*words, "-c", str(source), "-o", f"{folder}/probe.o"], capture_output=True, text=True
            )
        except OSError as error:
            problem = f"the C compiler {words[0]} can't run: {error.strerror}"
            raise SystemExit(NO_COMPILER.format(problem=problem)) from None
    if result.returncode:
        problem = next((line for line in result.stderr.splitlines() if "error" in line), f"exit {result.returncode}")
        raise SystemExit(NO_COMPILER.format(problem=f"the C compiler {words[0]} can't compile: {problem}"))


class BuildExtensions(build_ext):
    def run(self) -> None:
        check_compiler()
        super().run()

    def swig_sources(self, sources: list[str], extension: Extension) -> list[str]:
        """Between Cython and the C compiler: what makes a wheel smaller."""
        attributes = "cold" if extension.name in MADE_OFTEN else "cold, noinline"
        for source in map(Path, super().swig_sources(sources, extension)):
            before = source.read_text()
            code = MODULE_DOCSTRING.sub("0", SELDOM_CALLED.sub(rf"\1 __attribute__(({attributes}));", before))
            if code != before:
                source.write_text(code)
        return sources


class BuildModules(build_py):
    def build_packages(self) -> None:
        if not IS_PURE:
            self.packages = [name for name in self.packages if name.split(".")[:2] != ["forebay", "fallback"]]
        super().build_packages()


def readme() -> str:
    """README.md with whole addresses, as an index shows it without the other files."""
    source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = re.sub(r"(!\[[^]]*\]\()(?!https:)", rf"\g<1>{source}/raw/main/", Path("README.md").read_text())
    return re.sub(r"(\]\()(?!https:)", rf"\g<1>{source}/blob/main/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules},
    ext_modules=[] if IS_PURE else extensions,
    # What native code includes: it needs the compiled core.
    exclude_package_data={"forebay": ["include/*", "c_api.pxd"]} if IS_PURE else {},
    options={"build_ext": {"cython_c_in_temp": True, "parallel": os.cpu_count()}},
)
