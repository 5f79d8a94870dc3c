"""The journal of a conversion: what every step gave, in a file, so that a killed conversion goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

NAME = "journal.json"
VERSION = 4  # of what the steps write
SOME = 64  # numbers of each tensor that a fingerprint reads


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A short text that tells other tensors apart: by their shapes, and by numbers spread over each of them."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            count = min(SOME, len(flat))
            places = [place * (len(flat) - 1) // max(1, count - 1) for place in range(count)]
            some = flat[torch.tensor(places, device=flat.device)]
            digest.update(some.cpu().float().numpy().tobytes())
    return digest.hexdigest()[:16]


class Journal:
    """Keeps the results of steps in their order. A second run with the same settings is given them again.

    Args:
        folder: where the files lie; None keeps nothing.
        settings: plain data that decide about the results.
        writes: False in a process that only reads, such as the others beside the main process.

    Raises:
        ValueError: the folder holds a conversion with other settings or of another version, or the file is damaged.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any], *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.entries: list[dict[str, Any]] = []
        self.place = 0
        self.settings = json.loads(json.dumps(settings, default=str))
        if folder is None:
            return
        path = folder / NAME
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, kept, self.entries = content.get("version"), dict(content["settings"]), list(content["entries"])
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{path} is damaged ({problem}); remove the folder to start again.") from None
        if version != VERSION:
            raise ValueError(
                f"{folder} holds a conversion that another version of the package began, and that this version would "
                "not end in the same way; name another folder, or remove it."
            )
        if kept != self.settings:
            names = sorted(name for name in {*kept, *self.settings} if kept.get(name) != self.settings.get(name))
            raise ValueError(
                f"{folder} holds another conversion ({', '.join(names)} differ); name another folder, or remove it."
            )

    def recall(self, key: str) -> dict[str, Any] | None:
        """What the next step gave in an earlier run, or None if no earlier run came so far.

        Raises:
            ValueError: an earlier run did something else here.
        """
        if self.place >= len(self.entries):
            return None
        entry = self.entries[self.place]
        if entry["key"] != key:
            raise ValueError(
                f"{self.folder}: the earlier run did {entry['key']!r} where this run does {key!r}; remove the folder "
                "to start again."
            )
        self.place += 1
        value: dict[str, Any] = entry["value"]
        return value

    def write(self, key: str, value: dict[str, Any]) -> None:
        """Keep what a step gave."""
        self.entries.append({"key": key, "value": value})
        self.place += 1
        if self.folder is None or not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{NAME}.part"
        part.write_text(
            json.dumps({"version": VERSION, "settings": self.settings, "entries": self.entries}), encoding="utf-8"
        )
        part.replace(self.folder / NAME)

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors of a step. Call this before `write`."""
        if self.folder is None or not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "tensors.part"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        part.replace(self._file(key))

    def load(self, key: str) -> dict[str, Tensor]:
        """The tensors that `save` kept.

        Raises:
            ValueError: their file is missing or damaged.
        """
        path = self._file(key)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as problem:
            raise ValueError(f"{path} is missing or damaged ({problem}); remove the folder to start again.") from None

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key.replace(' ', '-')}.safetensors"
