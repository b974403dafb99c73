"""Where a wheel's bytes are: ``python ci/wheel_sizes.py WHEEL``, compressed, by kind, and its largest files."""

import sys
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

LARGEST = 10


def main() -> None:
    wheel = Path(sys.argv[1])
    with ZipFile(wheel) as archive:
        files = archive.infolist()
    kinds = Counter[str]()
    for file in files:
        kinds[Path(file.filename).suffix or "others"] += file.compress_size
    kinds["the archive's own"] = wheel.stat().st_size - kinds.total()
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    print("  " + ", ".join(f"{kind} {size:,}" for kind, size in kinds.most_common()))
    for file in sorted(files, key=lambda file: -file.compress_size)[:LARGEST]:
        print(f"  {file.compress_size:9,}  {file.filename}")


main()
