"""Holds the powers of two by which smoothing scaled weights around one layer, so that unpatching can take them back.

A norm, or a matrix whose output enters a product linearly, gives channel c. Matrices read it. Smoothing multiplies
channel c by 2^-k_c where it is made, and by 2^k_c where it is read. The model stays the same function, and its
activations get channels of like sizes. `hf_attn_swap.conversion.smooth` chooses k; it changes weights that lie outside
of the swap. docs/mathematics.md, section Smoothed channels. Axes: C channel.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import DeviceAndDtype, Geometry
from ..core.checks import check_keys, is_whole
from ..variants.base import Variant
from .fitted import AROUND, Fitted, fitted

LARGEST_POWER = 24  # of two
MOST = 64  # pairs in one layer, and readers of one source
WIDEST = 10_000_000  # channels; a larger number comes from a damaged file
DTYPES = ("float16", "bfloat16", "float32", "float64")
PATH = re.compile(r"(\.\./){0,8}\w+(/\w+){0,16}", re.ASCII)
POWERS = torch.tensor([2.0**power for power in range(-LARGEST_POWER, LARGEST_POWER + 1)], dtype=torch.float64)


@dataclass(frozen=True)
class Pair:
    """A module that gives channels, and the matrices that read them.

    Attributes:
        source: the path of the module, from the attention module of the layer, with slashes: "../input_layernorm".
        readers: the paths of the matrices.
        channels: the number of channels.
    """

    source: str
    readers: tuple[str, ...]
    channels: int


@fitted("smoothing")
class Smoothing(Fitted):
    """The pairs of one layer, and for each a buffer `powers_<number>` (C,) of int8: k. They start at 0.

    Args:
        pairs: the modules.
        dtype: the dtype of the weights in which k was chosen: in it, no weight loses a bit.
    """

    place = AROUND

    def __init__(self, pairs: Sequence[Pair], dtype: str) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        self.dtype = dtype
        for number, pair in enumerate(self.pairs):
            self.register_buffer(f"powers_{number}", torch.zeros(pair.channels, dtype=torch.int8))

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        check_keys(spec, {"dtype", "pairs"}, "the smoothing")
        if spec["dtype"] not in DTYPES:
            raise ValueError(f"the dtype of a smoothing must be one of {', '.join(DTYPES)}, got {spec['dtype']!r}.")
        if not isinstance(spec["pairs"], list) or not 0 < len(spec["pairs"]) <= MOST:
            raise ValueError(f"the pairs of a smoothing must be a list of 1 to {MOST}.")
        for pair in spec["pairs"]:
            check_keys(pair, {"source", "readers", "channels"}, "a pair of a smoothing")
            readers, channels = pair["readers"], pair["channels"]
            paths = [pair["source"], *(readers if isinstance(readers, list) else [])]
            if not 1 < len(paths) <= MOST or not all(isinstance(p, str) and PATH.fullmatch(p) for p in paths):
                raise ValueError(f"source and readers of a smoothing must be paths of modules, got {pair!r}.")
            if not is_whole(channels) or not 0 < channels <= WIDEST:
                raise ValueError(f"the channels of a smoothing must be a positive whole number, got {channels!r}.")

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> Smoothing:
        pairs = (Pair(pair["source"], tuple(pair["readers"]), pair["channels"]) for pair in spec["pairs"])
        return cls(tuple(pairs), spec["dtype"])

    def spec(self) -> dict[str, Any]:
        pairs = [
            {"source": pair.source, "readers": list(pair.readers), "channels": pair.channels} for pair in self.pairs
        ]
        return {"dtype": self.dtype, "pairs": pairs}

    def words(self) -> str:
        return f"smoothed ({', '.join(posixpath.basename(pair.source) for pair in self.pairs)})"

    def sentence(self, layers: int) -> str:
        names = ", ".join(posixpath.basename(pair.source) for pair in self.pairs)
        return f"The channels of {names} are smoothed in {layers} layers: scaled by powers of two, the same function."

    def placed_like(self, like: DeviceAndDtype | Tensor) -> Smoothing:
        """Move the powers to the device of `like`. They stay whole numbers."""
        return self.to(like.device)

    def powers(self, number: int) -> Tensor:
        """The powers k of a pair, (C,)."""
        return self.get_buffer(f"powers_{number}")

    def undo(self, root: nn.Module, path: str) -> Callable[[], None]:
        changes: list[tuple[Tensor, int, Tensor]] = []
        for number, pair in reversed(
            list(enumerate(self.pairs))
        ):  # a matrix of two pairs was scaled by the first first
            powers = self.powers(number)
            if powers.is_meta or not bool(powers.any()):  # nothing is loaded yet
                continue
            if int(powers.short().abs().max()) > LARGEST_POWER:
                raise ValueError(f"{path}: the powers of {pair.source} are damaged; load the checkpoint again.")
            for weight, axis, sign in axes(root, path, pair):
                self._check(weight, path)
                changes.append((weight, axis, -sign * powers))

        def write() -> None:
            for weight, axis, powers in changes:
                scale_(weight, axis, powers)

        return write

    def _check(self, weight: Tensor, path: str) -> None:
        """Refuse weights from which the original cannot be had.

        Raises:
            ValueError: they are offloaded, or were cast to fp16, where small numbers lose bits.
        """
        if weight.is_meta:
            raise ValueError(
                f"{path}: smoothed weights are offloaded, so they cannot be scaled back; load the model without "
                "device_map to take its swaps out."
            )
        if weight.dtype == torch.float16 and self.dtype != "float16":
            raise ValueError(
                f"{path}: the weights were smoothed in {self.dtype} and then cast to float16, which has no room for "
                f"the scales; load the model in {self.dtype} to take its swaps out."
            )


def axes(root: nn.Module, path: str, pair: Pair) -> list[tuple[Tensor, int, int]]:
    """The weights of a pair, each with the axis of its channels, and the sign of k in its scale: -1 at the source.

    Args:
        root: the model.
        path: the path of the attention module of the layer.
        pair: the pair.

    Raises:
        ValueError: a module is not there, is no plain norm or matrix any more, or has other channels.
    """
    scaled_weights: list[tuple[Tensor, int, int]] = []
    for name, sign in ((pair.source, -1), *((reader, 1) for reader in pair.readers)):
        module = _module(root, path, name)
        parameters = parts(module, source=sign < 0)
        whole = bool(parameters) and not any(True for _ in module.children())
        fits = all(
            plain(weight) and weight.dim() > axis and weight.shape[axis] == pair.channels for weight, axis in parameters
        )
        if not (whole and fits):
            raise ValueError(
                f"{path}: {name} was smoothed, and is now {type(module).__name__}, which cannot be scaled back; take "
                "adapters and quantised weights out of the model first."
            )
        scaled_weights += [(weight, axis, sign) for weight, axis in parameters]
    return scaled_weights


def plain(weight: Tensor) -> bool:
    """True for a plain tensor of floating-point numbers: not quantised, and not sharded over processes."""
    return weight.is_floating_point() and type(weight.data) is Tensor


def parts(module: nn.Module, *, source: bool) -> list[tuple[nn.Parameter, int]]:
    """The parameters that are scaled if a module gives channels, or if it reads them, each with the channels' axis."""
    turned = type(module).__name__ == "Conv1D"  # of GPT-2: its weight has the inputs first
    if source:
        return [
            (parameter, 1 if turned and parameter.dim() == 2 else 0) for parameter in module.parameters(recurse=False)
        ]
    weight = getattr(module, "weight", None)
    return [(weight, 0 if turned else 1)] if isinstance(weight, nn.Parameter) else []


def _module(root: nn.Module, path: str, name: str) -> nn.Module:
    """The module at a path from an attention module."""
    place = posixpath.normpath(posixpath.join(path.replace(".", "/"), name)).replace("/", ".")
    try:
        return root.get_submodule(place)
    except AttributeError:
        raise ValueError(
            f"{path}: {name} was smoothed and is not in the model any more; take adapters out first, or load the "
            "model again."
        ) from None


def relative(module: str, path: str) -> str:
    """The path of a module from the attention module at `path`, with slashes."""
    return posixpath.relpath(module.replace(".", "/"), path.replace(".", "/"))


@torch.no_grad()
def scale_(weight: Tensor, axis: int, powers_C: Tensor) -> None:
    """Multiply a weight by 2^k along an axis, in place. Bits are lost only at the ends of the dtype's range."""
    weight.copy_(scaled(weight, axis, powers_C))


def scaled(weight: Tensor, axis: int, powers_C: Tensor) -> Tensor:
    """A weight times 2^k along an axis, in its dtype."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    factors = POWERS.to(wide)[powers_C.cpu().long() + LARGEST_POWER].to(weight.device)  # exp2 of a device may round
    shape = [1] * weight.dim()
    shape[axis] = -1
    return (weight.detach().to(wide) * factors.view(shape)).to(weight.dtype)
