"""Where a benchmark ran."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["huge_pages", "machine"]

HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
MAPPING: Final = re.compile(r"/memfd:forebay .*\nSize: +(\d+) kB\n(?:(?!ShmemPmdMapped).*\n)*ShmemPmdMapped: +(\d+) kB")


def machine() -> dict[str, str]:
    """The machine and the interpreter. A fact that this system doesn't show is empty."""
    cpu_info = _text(Path("/proc/cpuinfo"))
    model = next((line.split(":", 1)[1].strip() for line in cpu_info.splitlines() if line.startswith("model name")), "")
    return {
        "processor": f"{model or platform.processor()}, {len(os.sched_getaffinity(0))} cores",
        "virtual": "yes" if " hypervisor" in cpu_info else "no sign of it",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "clock source": _text(CLOCK_SOURCE).strip(),
        "Python": f"{platform.python_implementation()} {platform.python_version()}, {platform.python_compiler()}",
    }


def huge_pages() -> dict[str, str]:
    """The kernel's setting for shared memory, and how much of this process's private stores is in huge pages."""
    setting = re.search(r"\[(\w+)\]", _text(HUGE_PAGES / "shmem_enabled"))
    sizes = [(int(size), int(huge)) for size, huge in MAPPING.findall(_text(Path("/proc/self/smaps")))]
    total = sum(size for size, _ in sizes)
    return {
        "huge pages in shared memory, setting": setting[1] if setting else "",
        "stores in huge pages": f"{sum(huge for _, huge in sizes) / total:.0%}" if total else "",
    }


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
