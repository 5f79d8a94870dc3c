"""What a conversion has put into a model so far: as values, to go back to them, and in a file, to go on from it.

A snapshot has what the swaps hold (strengths, fits, the variants' parameters) and the weights that a step has changed.
The journal has what every step gave, so that a killed conversion goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..layer.fitted import FITTED
from ..layer.swap import Swap

NAME = "journal.json"
VERSION = 8  # of what the steps write
Swaps = Mapping[int, list[Swap]]
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
    """Keeps what each step gave, by its name. A second run with the same settings is given it again.

    Args:
        folder: where the files lie; None keeps nothing.
        settings: plain data that decide about the results.
        writes: False in a process that only reads, such as the others beside the main process.

    Raises:
        ValueError: the folder holds a conversion with other settings or of another version, or the file is damaged.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any], *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.entries: dict[str, dict[str, Any]] = {}
        self.settings = json.loads(json.dumps(settings, default=str))
        if folder is None:
            return
        path = folder / NAME
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, kept, self.entries = content.get("version"), dict(content["settings"]), dict(content["entries"])
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

    def recall(self, name: str) -> dict[str, Any] | None:
        """What a step gave in an earlier run, or None if no earlier run came so far."""
        return self.entries.get(name)

    def write(self, name: str, entry: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        """Keep what a step gave: plain data, and tensors if there are some."""
        self.entries[name] = entry
        if self.folder is None or not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if tensors is not None:
            part = self.folder / "tensors.part"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
            part.replace(self._file(name))
        part = self.folder / f"{NAME}.part"
        part.write_text(
            json.dumps({"version": VERSION, "settings": self.settings, "entries": self.entries}), encoding="utf-8"
        )
        part.replace(self.folder / NAME)

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors that `write` kept.

        Raises:
            ValueError: their file is missing or damaged.
        """
        path = self._file(name)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as problem:
            raise ValueError(f"{path} is missing or damaged ({problem}); remove the folder to start again.") from None

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name.replace(' ', '-')}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The values of one moment.

    Attributes:
        held: what each swap holds beside its tensors, by number of the layer and of the copy.
        swaps: the tensors of the swaps, by the same number, and by name.
        weights: the values of weights that a step has changed.
        changed: a training is in the weights.
    """

    held: dict[str, dict[str, Any]]
    swaps: dict[str, Tensor]
    weights: dict[nn.Parameter, Tensor]
    changed: bool = False

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors, for a file. Weights have their names in the model."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {**self.swaps, **{f"weight {names[parameter]}": value for parameter, value in self.weights.items()}}

    @classmethod
    def read(cls, held: dict[str, Any], tensors: dict[str, Tensor], changed: bool, model: nn.Module) -> Snapshot:
        """The snapshot of what `named` gave, for a model with parameters of the same names."""
        parameters = dict(model.named_parameters())
        weights = {name.removeprefix("weight "): value for name, value in tensors.items() if name.startswith("weight ")}
        return cls(
            held,
            {name: value for name, value in tensors.items() if name.startswith("swap ")},
            {parameters[name]: value for name, value in weights.items()},
            changed,
        )


def taken(swaps: Swaps, weights: Iterable[nn.Parameter], changed: bool = False) -> Snapshot:
    """A snapshot of swaps and weights. The tensors are copies, on the CPU."""
    by_place = _by_place(swaps)
    return Snapshot(
        {place: _held(swap) for place, swap in by_place.items()},
        {
            f"swap {place} {name}": copied(value)
            for place, swap in by_place.items()
            for name, value in swap.state_dict().items()
        },
        {parameter: copied(parameter) for parameter in weights},
        changed,
    )


def given_back(snapshot: Snapshot, swaps: Swaps) -> None:
    """Give swaps and weights the values of a snapshot. `Installation.refresh` has to follow."""
    for place, swap in _by_place(swaps).items():
        start = f"swap {place} "
        tensors = {name.removeprefix(start): v for name, v in snapshot.swaps.items() if name.startswith(start)}
        _fill(swap, snapshot.held[place], tensors)
    put(snapshot.weights)


@torch.no_grad()
def put(values: Mapping[nn.Parameter, Tensor]) -> None:
    """Write values into parameters."""
    for parameter, value in values.items():
        parameter.copy_(value)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _by_place(swaps: Swaps) -> dict[str, Swap]:
    return {f"{index}.{number}": swap for index, group in swaps.items() for number, swap in enumerate(group)}


def _held(swap: Swap) -> dict[str, Any]:
    """What a swap holds beside its tensors."""
    return {
        "strength": swap.strength,
        "retrained": swap.retrained,
        "fits": {name: fit.spec() for name, fit in swap.fitted.items()},
    }


def _fill(swap: Swap, held: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a swap what `_held` and `state_dict` told of it. A fit that stays keeps its module."""
    swap.compute_at(held["strength"])
    swap.retrained = held["retrained"]
    like = next((parameter for parameter in swap.parameters()), swap.strength_value)
    for name in swap.fitted.keys() - held["fits"].keys():
        swap.drop(name)
    for name, spec in held["fits"].items():
        if name not in swap.fitted or swap.fitted[name].spec() != spec:
            swap.put(FITTED[name].from_spec(spec, swap.geometry).placed_like(like))
    swap.load_state_dict(tensors)
