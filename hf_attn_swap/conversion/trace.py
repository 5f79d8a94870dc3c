"""Finds out, without names, which norms and matrices of a model read what which others give.

Autograd's graph of one forward pass is cut behind every norm and every matrix. So it leads from the input of a module
back to the modules whose outputs reach it, without another norm or matrix in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layer.smoothing import parts, plain
from ..measuring.batches import Batch


class Trace:
    """One forward pass. A source is the output of a norm or of a matrix, an embedding included.

    Attributes:
        names: the path of each module of the model.
        called: calls of norms and matrices, by path, in the order of the first call.
        reads: by the path of a norm or matrix: the sources that reach its input.
        given: the sources that reach the model's output.
        width: by source: the number of its channels.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names = {module: name for name, module in root.named_modules()}
        self.called: dict[str, int] = {}
        self.reads: dict[str, set[str]] = {}
        self.given: set[str] = set()
        self.width: dict[str, int] = {}
        self.sources: dict[Any, str] = {}  # by node of autograd's graph
        self.alive: list[Tensor] = []

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(self, batch: Batch) -> None:
        """Run the model once, on a batch on its device."""
        with contextlib.ExitStack() as hooked:
            for module in self.names:
                if is_norm(module) or has_matrix(module):
                    hooked.callback(module.register_forward_pre_hook(self._arrives, with_kwargs=True).remove)
                    hooked.callback(module.register_forward_hook(self._leaves).remove)
            output = self.root(**batch)
        for each in tensors(output):
            self.given |= self._behind(each)
        self.alive.clear()

    @property
    def rested(self) -> list[str]:
        """The matrices that this pass did not reach, such as an expert that no token chose."""
        return [name for module, name in self.names.items() if has_matrix(module) and name not in self.called]

    def readers(self, source: str) -> tuple[str, ...]:
        """The norms and matrices that a source reaches."""
        return tuple(reader for reader, found in self.reads.items() if source in found)

    def _arrives(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which sources reach the input of a module."""
        name = self.names[module]
        self.called[name] = self.called.get(name, 0) + 1
        for each in tensors((args, kwargs)):
            self.reads.setdefault(name, set()).update(self._behind(each))

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Begin a new graph at this output: what is computed from it has this module as a source."""
        if not isinstance(output, Tensor):
            return None
        followed = output.detach().requires_grad_().clone()
        name = self.names[module]
        self.alive.append(followed)  # its node must not be freed: another could get the same place
        self.sources[followed.grad_fn] = name
        self.width[name] = output.shape[-1]
        return followed

    def _behind(self, tensor: Tensor) -> set[str]:
        """The sources from which a tensor was computed, without other sources in between."""
        waiting, seen, found = [tensor.grad_fn], set(), set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.sources:
                found.add(self.sources[node])
            else:
                waiting += [before for before, _ in node.next_functions]
        return found


def is_matrix(module: nn.Module) -> bool:
    """True for a Linear or a Conv1D with a plain matrix: no adapter, no quantised or offloaded weight."""
    return isinstance(module, (nn.Linear, Conv1D)) and _plain_alone(module, {"weight", "bias"})


def is_table(module: nn.Module) -> bool:
    """True for an Embedding with a plain table."""
    return isinstance(module, nn.Embedding) and _plain_alone(module, {"weight"})


def _plain_alone(module: nn.Module, names: set[str]) -> bool:
    own = dict(module.named_parameters())
    return (
        "weight" in own
        and own.keys() <= names
        and not any(True for _ in module.children())
        and all(plain(each) and not each.is_meta for each in own.values())
    )


def has_matrix(module: nn.Module) -> bool:
    """True for a module without children that holds a matrix."""
    if any(True for _ in module.children()):
        return False
    own = [*module.parameters(recurse=False), getattr(module, "weight", None)]  # a quantised weight is no parameter
    return any(isinstance(each, Tensor) and each.dim() > 1 for each in own)


def channels_read(module: nn.Module) -> int:
    """The number of channels that a matrix reads."""
    ((weight, axis),) = parts(module, source=False)
    return weight.shape[axis]


def owners(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The paths of the modules that hold each parameter. A module that stands at several places has as many paths."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, []).append(name)
    return found


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, also inside tuples and dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(each)


def is_norm(module: nn.Module) -> bool:
    """True if a module has parameters of one axis alone, as a norm has its scale and its bias."""
    parameters = list(module.parameters())
    return bool(parameters) and all(each.dim() == 1 for each in parameters) and not any(True for _ in module.children())
