"""Finds where the scale of channels is free: a module that gives channels, and all the matrices that read them.

If channel c is divided by a number where it is made and multiplied by the number where it is read, the model stays the
same function, as long as nothing else reads the channel and nothing between the two bends it. No name of a module tells
this. Autograd's graph of one forward pass shows which outputs of norms and matrices reach the input of which matrix,
and what else they reach. Then each pair is tried: with powers of two the numbers must be equal to the bit.
docs/mathematics.md, section Smoothed channels. Axes: C channel.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layer.smoothing import parts, plain, scaled
from ..measuring.batches import Batch, on_device
from .neutral import is_norm, tensors

ROUNDED = 0.01  # of fp16: a wrong pair is wrong by a multiple of this
TRIED = 2  # pairs are tried with powers from -2 to 2


@dataclass(frozen=True)
class Gauge:
    """A source of channels and its readers, by their paths in the model.

    Attributes:
        source: a norm or a matrix.
        readers: every matrix that reads its output.
        channels: their number.
        norm: True if the source is a norm.
    """

    source: str
    readers: tuple[str, ...]
    channels: int
    norm: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The source and its readers."""
        return self.source, *self.readers


def gauges(root: Any, batch: Batch, places: Mapping[str, nn.Module]) -> list[Gauge]:
    """Every place of the model where the scale of channels is free, in the order of the calls.

    A matrix reads at most one source of the result.

    Args:
        root: the model, in evaluation mode.
        batch: a batch as the model takes it.
        places: the matrices that may be scaled, by path.
    """
    batch = on_device(root, batch)
    trace = _Trace(root)
    trace.run(batch)
    with torch.no_grad():
        recorded = _outputs(root, batch, trace.called)
        found: list[Gauge] = []
        waiting = [gauge for gauge in trace.candidates(places) if _plain(root, gauge)]
        while waiting:
            taken = {reader for gauge in found for reader in gauge.readers}
            waiting = [gauge for gauge in waiting if taken.isdisjoint(gauge.readers)]
            tried: list[Gauge] = []
            for gauge in waiting:  # a module may have one part in a pass alone, so that an error has one cause
                if {part for each in tried for part in each.parts}.isdisjoint(gauge.parts):
                    tried.append(gauge)
            found += _hold(root, batch, tried, recorded)
            waiting = [gauge for gauge in waiting if gauge not in tried]
    order = {name: number for number, name in enumerate(trace.called)}
    return sorted(found, key=lambda gauge: order[gauge.source])


def is_matrix(module: nn.Module) -> bool:
    """True for a Linear or a Conv1D with a plain matrix: no adapter, no quantised or offloaded weight."""
    own = dict(module.named_parameters())
    return (
        isinstance(module, (nn.Linear, Conv1D))
        and "weight" in own
        and own.keys() <= {"weight", "bias"}
        and not any(True for _ in module.children())
        and all(plain(each) and not each.is_meta for each in own.values())
    )


class _Trace:
    """One forward pass with autograd's graph cut behind every norm and every matrix."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names = {module: name for name, module in root.named_modules()}
        self.called: dict[str, int] = {}  # calls of norms and matrices, in the order of the first call
        self.sources: dict[Any, str] = {}  # nodes of autograd's graph: the outputs of norms and matrices
        self.reads: dict[str, set[str]] = {}  # by a matrix: the sources that reach its input
        self.bound: set[str] = set()  # sources that reach something else than the input of a matrix
        self.width: dict[str, int] = {}
        self.alive: list[Tensor] = []

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(self, batch: Batch) -> None:
        """Run the model once."""
        with contextlib.ExitStack() as hooked:
            for module in self.names:
                if is_norm(module) or _has_matrix(module):
                    hooked.callback(module.register_forward_pre_hook(self._arrives, with_kwargs=True).remove)
                    hooked.callback(module.register_forward_hook(self._leaves).remove)
            output = self.root(**batch)
        for each in tensors(output):
            self.bound |= self._behind(each)
        self.alive.clear()

    def _arrives(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which sources reach a matrix; those that reach a norm are bound."""
        name = self.names[module]
        self.called[name] = self.called.get(name, 0) + 1
        for each in tensors((args, kwargs)):
            found = self._behind(each)
            if isinstance(module, (nn.Linear, Conv1D)):
                self.reads.setdefault(name, set()).update(found)
            else:
                self.bound |= found

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

    def candidates(self, places: Mapping[str, nn.Module]) -> Iterator[Gauge]:
        """Sources that reach matrices alone, all of them in `places`, and of as many channels as each of them reads.

        A matrix beside them that this pass did not reach, such as an expert that no token chose, may read the same
        channels in another pass. So the block around source and readers has no such matrix.
        """
        shared = _shared(self.root)
        modules = dict(self.root.named_modules())
        rested = [name for module, name in self.names.items() if _has_matrix(module) and name not in self.called]
        for name, width in self.width.items():
            readers = tuple(reader for reader, found in self.reads.items() if name in found)
            once = all(self.called[each] == 1 and each not in shared for each in (name, *readers))
            if not readers or name in self.bound or not once:
                continue
            if not all(reader in places and is_matrix(modules[reader]) for reader in readers):
                continue
            block = in_common(name, *readers)
            if any(each.split(".")[: len(block)] == block for each in rested):
                continue
            if all(_reads(modules[reader]) == width for reader in readers):
                yield Gauge(name, readers, width, is_norm(modules[name]))


def _has_matrix(module: nn.Module) -> bool:
    """True for a module without children that holds a matrix."""
    if any(True for _ in module.children()):
        return False
    own = [*module.parameters(recurse=False), getattr(module, "weight", None)]  # a quantised weight is no parameter
    return any(isinstance(each, Tensor) and each.dim() > 1 for each in own)


def in_common(*paths: str) -> list[str]:
    """The names with which all of these paths start, such as ["model", "layers", "0"]."""
    together = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, together)]


def _reads(module: nn.Module) -> int:
    """The number of channels that a matrix reads."""
    ((weight, axis),) = parts(module, source=False)
    return weight.shape[axis]


def _shared(root: nn.Module) -> set[str]:
    """The paths of modules that share a parameter with another module, or stand at several places of the model."""
    owners: dict[int, set[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _plain(root: nn.Module, gauge: Gauge) -> bool:
    """True if the source has plain parameters along its channels, on this machine."""
    module = root.get_submodule(gauge.source)
    own = parts(module, source=True)
    if not (is_matrix(module) or is_norm(module)) or not all(plain(p) and not p.is_meta for p, _ in own):
        return False
    return all(p.dim() > axis and p.shape[axis] == gauge.channels for p, axis in own)


def _outputs(root: Any, batch: Batch, names: Mapping[str, int]) -> dict[str, Tensor]:
    """What modules give, by path."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                found[name] = output.detach().clone()

        return hook

    with contextlib.ExitStack() as hooked:
        for name in names:
            hooked.callback(root.get_submodule(name).register_forward_hook(keep(name)).remove)
        root(**batch)
    return found


@dataclass
class _Tried:
    """Compares what modules give under a gauge with what they gave before."""

    recorded: Mapping[str, Tensor]
    source: dict[str, Gauge] = field(default_factory=dict)
    reader: dict[str, Gauge] = field(default_factory=dict)
    powers: dict[str, Tensor] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)

    def hook(self, name: str) -> Any:
        """Make a hook that compares, and hands on what the module must give, so that no error reaches the next one."""

        def compare(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            wanted = self.recorded[name]
            if name in self.source:
                wanted = scaled(wanted, wanted.dim() - 1, -self.powers[name])
            if not _same(output, wanted):
                concerned = (self.source.get(name), self.reader.get(name))
                self.wrong.update(gauge.source for gauge in concerned if gauge is not None)
            return wanted

        return compare


def _same(one: Tensor, other: Tensor) -> bool:
    """True if all bits are equal. In fp16, where scaled weights may be subnormal, a small part may be lost."""
    if one.dtype != torch.float16:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    wide, wanted = (each.float().nan_to_num() for each in (one, other))
    return bool((wide - wanted).norm() <= ROUNDED * wanted.norm())


def _hold(root: Any, batch: Batch, tried: list[Gauge], recorded: Mapping[str, Tensor]) -> list[Gauge]:
    """Those gauges under which each module gives what it gave, to the bit. They are tried together in one pass."""
    check = _Tried(recorded)
    generator = torch.Generator().manual_seed(0)
    for gauge in tried:
        check.source[gauge.source] = gauge
        check.reader |= dict.fromkeys(gauge.readers, gauge)
        check.powers[gauge.source] = torch.randint(-TRIED, TRIED + 1, (gauge.channels,), generator=generator)
    with contextlib.ExitStack() as hooked:
        for gauge in tried:
            hooked.enter_context(under(root, gauge, check.powers[gauge.source]))
        for name in {*check.source, *check.reader}:
            hooked.callback(root.get_submodule(name).register_forward_hook(check.hook(name)).remove)
        root(**batch)
    return [gauge for gauge in tried if gauge.source not in check.wrong]


@contextlib.contextmanager
def under(root: nn.Module, gauge: Gauge, powers_C: Tensor) -> Iterator[None]:
    """Inside, the weights are scaled: 2^-k where the channels come out, 2^k where they are read."""
    source, readers = root.get_submodule(gauge.source), map(root.get_submodule, gauge.readers)
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
