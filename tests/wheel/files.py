"""Compares the files of a wheel with those of the two packages in this folder: `files.py WHEEL`."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hf_attn_swap", "hf_attn_swap_cli")


def here() -> set[str]:
    """The files of the packages in this folder, without what Python compiles."""
    files = (
        path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def inside(wheel: Path) -> set[str]:
    """The files that the wheel installs, without its own records."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    if different := here() ^ inside(wheel):
        sys.exit(f"in {wheel.name} or in the packages, and not in both: {', '.join(sorted(different))}")
    print(f"{wheel.name} holds the {len(here())} files of {' and '.join(PACKAGES)}")
