"""Finds where the scale of channels is free: a module that gives channels, and all the matrices that read them.

If channel c is divided by a number where it is made and multiplied by the number where it is read, the model stays the
same function, as long as nothing else reads the channel and nothing between the two bends it. No name of a module tells
this. Autograd's graph of one forward pass shows which outputs of norms and matrices reach the input of which matrix,
and what else they reach. Then the edges of one kind, one or more in each layer, are tried together: with powers of two
the model's outputs must be equal to the bit.
docs/mathematics.md, section Smoothed channels. Axes: C channel.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layer.smoothing import parts, plain, scaled
from ..measuring.batches import Batch, on_device


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
        for tensor in tensors(output):
            self.given |= self._behind(tensor)
        self.alive.clear()

    @property
    def rested(self) -> list[str]:
        """The matrices that this pass did not reach, such as an expert that no token chose."""
        return [name for module, name in self.names.items() if has_matrix(module) and name not in self.called]

    def readers(self, source: str) -> tuple[str, ...]:
        """The norms and matrices that a source reaches."""
        return tuple(reader for reader, sources in self.reads.items() if source in sources)

    def _arrives(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which sources reach the input of a module."""
        name = self.names[module]
        self.called[name] = self.called.get(name, 0) + 1
        for tensor in tensors((args, kwargs)):
            self.reads.setdefault(name, set()).update(self._behind(tensor))

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
        waiting, visited, sources = [tensor.grad_fn], set(), set()
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if node in self.sources:
                sources.add(self.sources[node])
            else:
                waiting += [before for before, _ in node.next_functions]
        return sources


def is_matrix(module: nn.Module) -> bool:
    """True for a Linear or a Conv1D with a plain matrix: no adapter, no quantised or offloaded weight."""
    own = dict(module.named_parameters())
    return (
        isinstance(module, (nn.Linear, Conv1D))
        and "weight" in own
        and own.keys() <= {"weight", "bias"}
        and not any(True for _ in module.children())
        and all(plain(parameter) and not parameter.is_meta for parameter in own.values())
    )


def has_matrix(module: nn.Module) -> bool:
    """True for a module without children that holds a matrix."""
    if any(True for _ in module.children()):
        return False
    own = [*module.parameters(recurse=False), getattr(module, "weight", None)]  # a quantised weight is no parameter
    return any(isinstance(tensor, Tensor) and tensor.dim() > 1 for tensor in own)


def channels_read(module: nn.Module) -> int:
    """The number of channels that a matrix reads."""
    ((weight, axis),) = parts(module, source=False)
    return weight.shape[axis]


def owners(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The paths of the modules that hold each parameter. A module that stands at several places has as many paths."""
    paths: dict[nn.Parameter, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            paths.setdefault(parameter, []).append(name)
    return paths


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, also inside tuples and dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(value)


def is_norm(module: nn.Module) -> bool:
    """True if a module has parameters of one axis alone, as a norm has its scale and its bias."""
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and all(parameter.dim() == 1 for parameter in parameters)
        and not any(True for _ in module.children())
    )


ROUNDED = 0.01  # of fp16: wrong edges are wrong by a multiple of this
TRIED = 2  # edges are tried with powers from -2 to 2
NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")  # of a layer, in a path


@dataclass(frozen=True)
class RescalableEdge:
    """A source of channels and its readers, by their paths in the model.

    Attributes:
        source: a norm or a matrix.
        readers: every matrix that reads its output.
        channels: their number.
    """

    source: str
    readers: tuple[str, ...]
    channels: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The source and its readers."""
        return self.source, *self.readers


def rescalable_edges(root: Any, batch: Batch, places: Mapping[str, nn.Module]) -> list[RescalableEdge]:
    """Every place of the model where the scale of channels is free, in the order of the calls.

    A matrix reads at most one source of the result.

    Args:
        root: the model, in evaluation mode.
        batch: a batch as the model takes it.
        places: the matrices that may be scaled, by path.
    """
    batch = on_device(root, batch)
    trace = Trace(root)
    trace.run(batch)
    kinds: dict[tuple[str, ...], list[RescalableEdge]] = {}
    for edge in _candidates(trace, places):
        if _plain(root, edge):
            kinds.setdefault(tuple(NUMBER.sub(r"\1#", path) for path in edge.parts), []).append(edge)
    edges: list[RescalableEdge] = []
    with torch.no_grad():
        wanted = list(tensors(root(**batch)))
        for kind in kinds.values():
            taken = {reader for edge in edges for reader in edge.readers}
            free = [edge for edge in kind if taken.isdisjoint(edge.readers)]
            if free and _hold(root, batch, free, wanted):
                edges += free
    order = {name: number for number, name in enumerate(trace.called)}
    return sorted(edges, key=lambda edge: order[edge.source])


def _candidates(trace: Trace, places: Mapping[str, nn.Module]) -> Iterator[RescalableEdge]:
    """Sources that reach matrices alone, all of them in `places`, and of as many channels as each of them reads.

    A matrix beside them that this pass did not reach, such as an expert that no token chose, may read the same
    channels in another pass. So the block around source and readers has no such matrix.
    """
    modules, rested = dict(trace.root.named_modules()), trace.rested
    shared = {name for names in owners(trace.root).values() if len(set(names)) > 1 for name in names}
    bound = trace.given.union(
        *(sources for reader, sources in trace.reads.items() if not isinstance(modules[reader], (nn.Linear, Conv1D)))
    )
    for name, width in trace.width.items():
        readers = trace.readers(name)
        once = all(trace.called[path] == 1 and path not in shared for path in (name, *readers))
        if not readers or name in bound or not once:
            continue
        if not all(reader in places and is_matrix(modules[reader]) for reader in readers):
            continue
        block = in_common(name, *readers)
        if any(path.split(".")[: len(block)] == block for path in rested):
            continue
        if all(channels_read(modules[reader]) == width for reader in readers):
            yield RescalableEdge(name, readers, width)


def in_common(*paths: str) -> list[str]:
    """The names with which all of these paths start, such as ["model", "layers", "0"]."""
    together = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, together)]


def _plain(root: nn.Module, edge: RescalableEdge) -> bool:
    """True if the source has plain parameters along its channels, on this machine."""
    module = root.get_submodule(edge.source)
    own = parts(module, source=True)
    if not (is_matrix(module) or is_norm(module)) or not all(plain(p) and not p.is_meta for p, _ in own):
        return False
    return all(p.dim() > axis and p.shape[axis] == edge.channels for p, axis in own)


def _hold(root: Any, batch: Batch, edges: list[RescalableEdge], wanted: list[Tensor]) -> bool:
    """True if the model gives what it gave, to the bit, with these edges scaled."""
    generator = torch.Generator().manual_seed(0)
    with contextlib.ExitStack() as scales:
        for edge in edges:
            scales.enter_context(
                under(root, edge, torch.randint(-TRIED, TRIED + 1, (edge.channels,), generator=generator))
            )
        return all(map(_same, tensors(root(**batch)), wanted))


def _same(one: Tensor, other: Tensor) -> bool:
    """True if all bits are equal. In fp16, where scaled weights may be subnormal, a small part may be lost."""
    if one.dtype != torch.float16:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    wide, wanted = (tensor.float().nan_to_num() for tensor in (one, other))
    return bool((wide - wanted).norm() <= ROUNDED * wanted.norm())


@contextlib.contextmanager
def under(root: nn.Module, edge: RescalableEdge, powers_C: Tensor) -> Iterator[None]:
    """Inside, the weights are scaled: 2^-k where the channels come out, 2^k where they are read."""
    source, readers = root.get_submodule(edge.source), map(root.get_submodule, edge.readers)
    changed = [(p, axis, -powers_C) for p, axis in parts(source, source=True)]
    changed += [(p, axis, powers_C) for reader in readers for p, axis in parts(reader, source=False)]
    before = [(p, p.data) for p, _, _ in changed]
    try:
        for p, axis, powers in changed:
            p.data = scaled(p.data, axis, powers)
        yield
    finally:
        for p, data in before:
            p.data = data
