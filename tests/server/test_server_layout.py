"""The structs and constants of forebay.h as the server declares them."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import forebay_server

import forebay


def test_both_distributions_have_one_version() -> None:
    assert version("forebay-server") == forebay.__version__


def test_a_c_compiler_reads_the_same_sizes_and_offsets_in_the_header(tmp_path: Path) -> None:
    structs, constants = forebay_server.layouts()
    lines = []
    for name, _, fields in structs:
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field, _ in fields]
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name, _ in constants]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <forebay.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", "-I", forebay.get_include(), "-o", str(program), str(source)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split("\n")
    compiled = []
    for name, size, fields in structs:
        compiled.append(f"{name} {size}")
        compiled += [f"{name}.{field} {offset}" for field, offset in fields]
    compiled += [f"{name} {value}" for name, value in constants]
    assert printed == [*compiled, ""]
    assert {name for name, _, _ in structs} == {"forebay_request", "forebay_result", "forebay_lease", "forebay_api"}
