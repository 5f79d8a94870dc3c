"""What a conversion has put into a model so far, as values: to go back to it, and to write it into a journal.

A snapshot has what the swaps hold (strengths, fits, the variants' parameters) and the weights that a step has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.fitted import FITTED
from ..layer.swap import Swap

Swaps = Mapping[int, list[Swap]]


@dataclass(frozen=True)
class Snapshot:
    """The values of one moment.

    Attributes:
        plain: what is no tensor, as JSON keeps it: for each swap its strength and its fits.
        swaps: the tensors of the swaps, by number of the layer and of the copy, and by name.
        weights: the values of weights that a step has changed.
    """

    plain: dict[str, Any]
    swaps: dict[str, Tensor]
    weights: dict[nn.Parameter, Tensor]

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors, for a file. Weights have their names in the model."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {**self.swaps, **{f"weight {names[parameter]}": value for parameter, value in self.weights.items()}}

    @classmethod
    def read(cls, plain: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module) -> Snapshot:
        """The snapshot of `plain` and of what `named` gave, for a model with parameters of the same names."""
        parameters = dict(model.named_parameters())
        weights = {name.removeprefix("weight "): value for name, value in tensors.items() if name.startswith("weight ")}
        return cls(
            plain,
            {name: value for name, value in tensors.items() if name.startswith("swap ")},
            {parameters[name]: value for name, value in weights.items()},
        )


def taken(swaps: Swaps, weights: Iterable[nn.Parameter]) -> Snapshot:
    """A snapshot of swaps and weights. The tensors are copies, on the CPU."""
    held = _by_place(swaps)
    return Snapshot(
        {place: _plain(swap) for place, swap in held.items()},
        {
            f"swap {place} {name}": copied(value)
            for place, swap in held.items()
            for name, value in swap.state_dict().items()
        },
        {parameter: copied(parameter) for parameter in weights},
    )


def given_back(snapshot: Snapshot, swaps: Swaps) -> None:
    """Give swaps and weights the values of a snapshot. `Installation.refresh` has to follow."""
    for place, swap in _by_place(swaps).items():
        start = f"swap {place} "
        tensors = {name.removeprefix(start): v for name, v in snapshot.swaps.items() if name.startswith(start)}
        _fill(swap, snapshot.plain[place], tensors)
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


def _plain(swap: Swap) -> dict[str, Any]:
    """What a swap holds beside its tensors."""
    return {
        "strength": swap.strength,
        "retrained": swap.retrained,
        "fits": {name: fit.spec() for name, fit in swap.fitted.items()},
    }


def _fill(swap: Swap, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a swap what `_plain` and `state_dict` told of it. A fit that stays keeps its module."""
    swap.compute_at(plain["strength"])
    swap.retrained = plain["retrained"]
    like = next((parameter for parameter in swap.parameters()), swap.strength_value)
    for name in swap.fitted.keys() - plain["fits"].keys():
        swap.drop(name)
    for name, spec in plain["fits"].items():
        if name not in swap.fitted or swap.fitted[name].spec() != spec:
            swap.put(FITTED[name].from_spec(spec, swap.geometry).placed_like(like))
    swap.load_state_dict(tensors)
