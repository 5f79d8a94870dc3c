"""Quantisation to 8 bits as machines run it, computed as fake quantisation.

Integer kernels multiply 8-bit inputs by 8-bit weights, and keep the sums wide. So the inputs of every Linear (and
Conv1D) of the layers are rounded: asymmetric, with one range per tensor that is fitted before, or symmetric, with one
range per token; and the weights, symmetric, with one step per row. Sums, norms, scores, probabilities, embeddings,
pairs of a sink and the task head stay wide. docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .places import linears
from .points import Point, rounded_rows, rounded_tokens
from .quantizer import Quantizer, quantized


@contextlib.contextmanager
def machine_w8a8(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, dynamic: bool = False
) -> Iterator[tuple[Point, ...]]:
    """Inside the `with` block, the model computes with 8-bit weights and 8-bit inputs of its matrices, sums wide.

    The batches are run once to find the ranges of the inputs, as in `fake_w8a8`. After the block the model
    is as before. docs/mathematics.md, section Quantisation to 8 bits.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in evaluation mode. Its task head is not quantised.
        batches: dicts of tensors, from the training data; labels are ignored.
        dynamic: each token of an input has its own range, and the batches are not read.

    Yields:
        The quantised tensors with their ranges: first the weights, then the activations in the order of the pass.

    Raises:
        ValueError: as `fake_w8a8`; or the model has no Linear.
    """
    with quantized(model, None if dynamic else batches, _PerToken if dynamic else _Machine) as inside:
        yield inside


class _Machine(Quantizer):
    """Rounds the inputs of matrices to ranges that hold all that was seen, and weights with a step per row."""

    def place(self, stack: contextlib.ExitStack) -> None:
        super().place(stack)
        chosen = dict(linears(self.root))
        if not chosen:
            raise ValueError(f"{type(self.root).__name__} has no Linear whose input could be rounded.")
        for path, module in chosen.items():
            self.weight(path, module, stack)
            stack.callback(module.register_forward_pre_hook(self._input(path)).remove)

    def rounded_weight(self, module: nn.Module, weight: Tensor, point: Point) -> Tensor:
        return rounded_rows(weight, 1 if isinstance(module, Conv1D) else 0)

    def _input(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return self.round(f"{path}.input", args[0]), *args[1:]

        return hook


class _PerToken(_Machine):
    """Rounds each token of an input to its own range."""

    def _input(self, path: str) -> Any:
        return lambda module, args: (rounded_tokens(args[0]), *args[1:])
