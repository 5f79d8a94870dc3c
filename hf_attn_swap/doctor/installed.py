"""What is installed here, beside what this release was tested with."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ..tested import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS, TESTED, TESTED_PYTHONS, is_newer

OWN = "hf-attn-swap"


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed package.

    Attributes:
        name: the name of the package, or "python".
        installed: its version here.
        tested: the versions that were tested, in words; "-" if none was.
        note: how the two differ: "newer than tested", "older than tested", "as tested", or "older" where only the
            newest tested version is known; "not tested", or "-" for this package itself.
    """

    name: str
    installed: str
    tested: str
    note: str


def installed() -> tuple[Package, ...]:
    """Python, this package, and every package of `TESTED` that is installed."""
    first, last = TESTED_PYTHONS[0], TESTED_PYTHONS[-1]
    here = platform.python_version()
    minor = here.rpartition(".")[0]
    found = [Package(name="python", installed=here, tested=f"{first} to {last}", note=note_on(minor, first, last))]
    own = _version(OWN)
    if own is not None:
        found.append(Package(name=OWN, installed=own, tested="-", note="-"))
    for name, tested in TESTED.items():
        there = _version(name)
        if there is None:
            continue
        if tested is None:
            found.append(Package(name=name, installed=there, tested="-", note="not tested"))
        elif name == "transformers":
            words = f"{OLDEST_TRANSFORMERS} to {NEWEST_TRANSFORMERS}"
            note = note_on(there, OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS)
            found.append(Package(name=name, installed=there, tested=words, note=note))
        else:
            found.append(Package(name=name, installed=there, tested=tested, note=note_on(there, None, tested)))
    return tuple(found)


def _version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def note_on(here: str, oldest: str | None, newest: str) -> str:
    """Whether a version was tested, or is older or newer than those that were, in words."""
    if is_newer(here, newest):
        return "newer than tested"
    if is_newer(oldest or newest, Version(here).public):
        return "older" if oldest is None else "older than tested"
    return "as tested"
