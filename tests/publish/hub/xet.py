"""The xet store that the client keeps in a folder when the Hub names a `local://` one instead of a server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

RECORD = 48  # bytes, of the header and of every record
END = b"\xff" * 32
VERIFIED, WITH_SHA256 = 0x80000000, 0x40000000  # flags of a file: a second record per block; one with its sha256


def known_files(folder: Path) -> dict[str, str]:
    """sha256 to xet hash of every file that the client has stored, from the shards (*.mdb) it wrote."""
    return {sha256: xet for shard in folder.rglob("*.mdb") for sha256, xet in _files(shard.read_bytes())}


def _files(shard: bytes) -> Iterator[tuple[str, str]]:
    """The file section: a record with hash, flags and number of blocks, the blocks, and the sha256 where flagged."""
    at = RECORD
    while shard[at : at + 32] != END:
        flags, blocks = struct.unpack("<II", shard[at + 32 : at + 40])
        end = at + RECORD * (1 + blocks * (2 if flags & VERIFIED else 1))
        if flags & WITH_SHA256:
            yield _text(shard[end : end + 32]), _text(shard[at : at + 32])
            end += RECORD
        at = end


def _text(digest: bytes) -> str:
    """xet prints a hash as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))
