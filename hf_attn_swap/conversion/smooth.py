"""Smooths the channels of a patched model's activations, so that one 8-bit range serves all channels of a tensor.

Some channels of a pretrained model are always many times larger than the others. Where the scale of channels is free,
channel c is divided by s_c = 2^k_c where it is made and multiplied by it where it is read. The model stays the same
function, to the bit, because s_c is a power of two: SmoothQuant's s = max|x|^a / max|w|^(1-a), rounded.

The scale is free where nothing else reads the channel and nothing in between bends it. No name of a module tells this.
Autograd's graph of one forward pass shows which outputs of norms and matrices reach the input of which matrix, and what
else they reach. Then the edges of one kind, one or more in each layer, are tried together: with powers of two the
model's outputs must be equal to the bit.
Xiao et al. (2023), equation 4, SmoothQuant; powers of two and the search for a are this package's own.
docs/mathematics.md, section Smoothed channels. Axes: C channel, N token.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layer.smoothing import LARGEST_POWER, Pair, Smoothing, axes, parts, plain, relative, scale_, scaled
from ..measuring.batches import Batch, as_batches, evaluating, forward, on_device, read_by, real_tokens
from ..patch import need_installation
from ..quantization.places import quantizable
from ..quantization.points import Point, rounded_rows
from ..text.bar import bar
from ..wiring.install import Installation
from ..wiring.layers import Layer

ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # that are tried; 0 stands for no smoothing
TOKENS = 512  # of each held-out batch that an alpha is tried on
SMALLEST = 1e-5  # a channel or a column of weights below counts as this
ROUNDED = 0.01  # of fp16: wrong edges are wrong by a multiple of this
TRIED = 2  # edges are tried with powers from -2 to 2
NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")  # of a layer, in a path


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """What `smooth` did.

    Attributes:
        alphas: by the path of the module that gives the channels: alpha; 0 where no alpha was better than none.
        spread: by the same path, the largest channel over the median channel, before and after.
        kept: the number of channels that were left, because a weight would have lost bits.
    """

    alphas: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    kept: int

    def __str__(self) -> str:
        count = sum(alpha > 0 for alpha in self.alphas.values())
        before, after = (max(spreads) for spreads in zip(*self.spread.values(), strict=True))
        words = f"The channels of {count} of {len(self.alphas)} places are smoothed. Largest channel over the median: "
        words += f"{after:,.1f} ({before:,.1f} before)."
        return words + (f" {self.kept} channels are left, because weights would lose bits." if self.kept else "")


def smooth(model: nn.Module, batches: Iterable[Any], alpha: float | None = None, *, progress: bool = True) -> Smoothed:
    """Smooth the channels between norms (or matrices) and the matrices that read them, in place; the same function.

    Only places around swapped layers count. Weights change by powers of two, and each layer keeps these powers, so that
    `unpatch_model` gives the original weights, bit for bit, also from a checkpoint. Smooth after training: it changes
    the sizes of weights, which an optimiser's steps do not follow, and an adapter that was trained on the model before
    does not fit (loading it raises a ValueError: merge it first).
    Xiao et al. (2023), SmoothQuant; docs/mathematics.md, section Smoothed channels.

    Args:
        model: a patched model, patched with any variant.
        batches: a few dicts of tensors as the model takes them; labels are ignored.
        alpha: from 0 to 1, how much of the unevenness moves from the activations into the weights. None finds an alpha
            for each place, which costs a second pass: every fourth batch, at least one, is held out, and the smallest
            error of the readers' outputs in 8 bits decides.
        progress: show progress bars.

    Returns:
        What was done.

    Raises:
        ValueError: the model is not patched, is smoothed already, has adapters, or is offloaded; alpha is out of
            range; there are no batches, or a single one without an alpha; no place of the model is free; or the model
            with other scales is not the same function. The model is then unchanged.
    """
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1):
        raise ValueError(f"alpha must be a number above 0 and at most 1, or None for a search, got {alpha!r}.")
    installation = need_installation(model)
    _refuse_other_weights(installation)
    rows = list(as_batches(batches))
    if alpha is None and len(rows) < 2:
        raise ValueError("one batch cannot be both measured and held out; pass two batches or more, or an alpha.")
    held = [] if alpha is not None else rows[3::4] or rows[-1:]
    fitted = [row for row in rows if not any(row is other for other in held)]
    with evaluating(model), torch.no_grad():
        places = _places(installation, rows[0])
        for row in bar(fitted, desc="channels", unit="batch", shown=progress, leave=False):
            _run(installation.root, row, {name: place.see for name, place in places.items()}, places)
        for row in bar(held, desc="alphas", unit="batch", shown=progress, leave=False):
            _run(installation.root, row, {name: place.compare for name, place in places.items()}, places)
        _write(installation, list(places.values()), rows[0], alpha)
    return Smoothed(
        alphas={name: place.alpha for name, place in places.items()},
        spread={name: place.spread() for name, place in places.items()},
        kept=sum(place.kept for place in places.values()),
    )


class _Place:
    """A place where channels are smoothed: the sizes of its channels, the error of each alpha, and the chosen powers.

    Args:
        root: the model.
        edge: the source and its readers.
        layer: the layer that keeps the powers.
    """

    def __init__(self, root: nn.Module, edge: RescalableEdge, layer: Layer) -> None:
        self.edge = edge
        self.layer = layer
        source, *readers = (relative(path, layer.path) for path in edge.parts)
        self.pair = Pair(source, tuple(readers), edge.channels)
        self.weights = axes(root, layer.path, self.pair)
        self.matrices = [  # (outputs,C)
            weight.detach() if axis == 1 else weight.detach().T for weight, axis, sign in self.weights if sign > 0
        ]
        columns = torch.stack([matrix.abs().amax(0) for matrix in self.matrices]).amax(0)
        self.columns = columns.float().clamp_min(SMALLEST)
        self.low = torch.zeros_like(self.columns)
        self.high = torch.zeros_like(self.columns)
        self.errors = dict.fromkeys(ALPHAS, 0.0)
        self.alpha = 0.0
        self.powers = torch.zeros(edge.channels, dtype=torch.int8, device=self.columns.device)
        self.kept = 0

    @property
    def sizes(self) -> Tensor:
        """The largest activation of each channel, (C,)."""
        return torch.maximum(-self.low, self.high)

    def see(self, x_NC: Tensor) -> None:
        """Note the sizes of the channels of some tokens.

        Raises:
            ValueError: they are not finite.
        """
        low, high = torch.aminmax(x_NC.float(), dim=0)
        if not torch.isfinite(low + high).all():
            raise ValueError(f"what {self.edge.source} gives is not finite; check the weights, inputs and dtype.")
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def compare(self, x_NC: Tensor) -> None:
        """Add the error of the readers' outputs in 8 bits, under each alpha, for some tokens."""
        x_NC = x_NC[:TOKENS].float()
        matrices = [matrix.float() for matrix in self.matrices]
        wanted = [x_NC @ matrix.T for matrix in matrices]
        for alpha in self.errors:
            factors = torch.ldexp(torch.ones_like(self.columns), self.powers_of(alpha))
            point = Point("", float((self.low / factors).min()), float((self.high / factors).max()), seen=True)
            rounded = point.apply(x_NC / factors)
            for matrix, out in zip(matrices, wanted, strict=True):
                error = rounded @ rounded_rows(matrix * factors, 0).T - out
                self.errors[alpha] += float(error.square().sum() / out.square().sum().clamp_min(SMALLEST))

    def powers_of(self, alpha: float) -> Tensor:
        """The powers k of the channels under an alpha, (C,). Their median is 0: a factor for all changes nothing."""
        if alpha == 0:
            return torch.zeros_like(self.powers)
        scales = self.sizes.clamp_min(SMALLEST).log2() * alpha - self.columns.log2() * (1 - alpha)
        powers = (scales - scales.median()).round()
        return powers.clamp(-LARGEST_POWER, LARGEST_POWER).to(torch.int8)

    def choose(self, alpha: float | None) -> None:
        """Take an alpha, or the one with the smallest error. Channels in which a weight would lose bits keep k = 0.

        A matrix may read channels of one place and give those of another. So the weights are those of now: the places
        are chosen and scaled one after the other, and scaled back in the reverse order.
        """
        self.alpha = min(self.errors, key=lambda candidate: self.errors[candidate]) if alpha is None else float(alpha)
        self.powers = self.powers_of(self.alpha)
        whole = torch.ones_like(self.powers, dtype=torch.bool)
        for weight, axis, sign in self.weights:
            there = scaled(weight, axis, sign * self.powers)
            same = (scaled(there, axis, -sign * self.powers) == weight) & torch.isfinite(there)
            whole &= same if same.dim() == 1 else same.all(1 - axis)
        self.kept = int((~whole & (self.powers != 0)).sum())
        self.powers = self.powers * whole

    def scale(self, direction: int) -> None:
        """Scale the weights, or with -1 scale them back."""
        for weight, axis, sign in self.weights:
            scale_(weight, axis, direction * sign * self.powers)

    def spread(self) -> tuple[float, float]:
        """The largest channel over the median channel, before and after."""
        sizes = (self.sizes, torch.ldexp(self.sizes, -self.powers))
        before, after = (float(size.max() / size.median().clamp_min(SMALLEST)) for size in sizes)
        return before, after


def _refuse_other_weights(installation: Installation) -> None:
    """Refuse a model whose weights are not all here, are not its own, or are scaled already.

    Raises:
        ValueError: there are adapters, offloaded weights, or an earlier smoothing.
    """
    if any(len(layer.copies) > 1 for layer in installation.layers()) or any(
        hasattr(module, "base_layer") for module in installation.root.modules()
    ):
        raise ValueError("this model has adapters; smooth it before they are added, or merge them into the weights.")
    if any(layer.swap.fit_of(Smoothing) is not None for layer in installation.layers()):
        raise ValueError("this model is smoothed already; call unpatch_model and patch_model to smooth it anew.")
    if any(parameter.is_meta for parameter in installation.root.parameters()):
        raise ValueError("weights of this model are offloaded; smooth it before it is dispatched.")


@contextlib.contextmanager
def _full(installation: Installation) -> Iterator[None]:
    """Inside, every swapped layer is at strength 1, where a variant reads all that it may read."""
    with installation.strengths_kept():
        installation.set_strength(dict.fromkeys(installation.layers(), 1.0))
        yield


def _places(installation: Installation, batch: Batch) -> dict[str, _Place]:
    """The places around swapped layers, by the path of their source.

    Raises:
        ValueError: there is none.
    """
    root = installation.root
    matrices = {path: module for path, module in quantizable(root) if is_matrix(module)}
    with _full(installation):
        edges = rescalable_edges(root, batch, matrices)
    places = {}
    for edge in edges:
        layer = _nearest(installation, edge)
        if layer is not None and layer.swapped:
            places[edge.source] = _Place(root, edge, layer)
    if not places:
        raise ValueError(
            f"no place of {type(root).__name__} around the swapped layers has channels whose scale is free: what the "
            "norms give is also read by something else than plain matrices, as in post-norm blocks and in layers with "
            "shared weights; quantise it without smoothing."
        )
    return places


def _nearest(installation: Installation, edge: RescalableEdge) -> Layer | None:
    """The layer in whose block all modules of an edge lie; None if it is not one layer's, or serves several layers."""
    layers = installation.numbered()
    shared = {layer: len(in_common(layer.path, *edge.parts)) for layer in layers}
    most = max(shared.values())
    nearest = [layer for layer, length in shared.items() if length == most]
    alone = most > 0 and len(nearest) == 1 and not nearest[0].site.family.shared
    return nearest[0] if alone else None


def _run(root: Any, batch: Batch, calls: Mapping[str, Callable[[Tensor], None]], places: Mapping[str, _Place]) -> None:
    """Run the model on a batch. Each call gets the real tokens (N,C) that the readers of its place read."""

    def reads(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            calls[name](real_tokens(read_by(places[name].layer.site.core, batch), args[0]))

        return hook

    with contextlib.ExitStack() as hooked:
        for name in calls:
            reader = root.get_submodule(places[name].edge.readers[0])
            hooked.callback(reader.register_forward_pre_hook(reads(name)).remove)
        forward(root, batch)


def _write(installation: Installation, places: list[_Place], batch: Batch, alpha: float | None) -> None:
    """Scale the weights, compare the model's outputs with those from before, and let the layers keep the powers.

    Raises:
        ValueError: the outputs differ by more than rounding. The weights are then as before.
    """
    before = _outputs(installation, batch)
    done: list[_Place] = []
    try:
        for place in places:
            place.choose(alpha)
            place.scale(1)
            done.append(place)
        if not all(map(_equal, before, _outputs(installation, batch))):
            raise ValueError(
                "with other scales of its channels this model is not the same function: something else than plain "
                f"matrices reads them, or {installation.root.dtype} has no room for them; quantise without smoothing."
            )
    except BaseException:
        for place in reversed(done):
            place.scale(-1)
        raise
    for layer in {place.layer: None for place in places}:
        own = [place for place in places if place.layer == layer]
        dtype = str(own[0].matrices[0].dtype).removeprefix("torch.")
        fit = Smoothing([place.pair for place in own], dtype)
        for number, place in enumerate(own):
            fit.powers(number).copy_(place.powers)
        layer.swap.put(fit.placed_like(own[0].powers))
    installation.record.bases.clear()  # adapters of those checkpoints were trained for other scales
    installation.refresh()


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if two outputs differ by no more than a rounding of the whole."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    one_wide, other_wide = (tensor.cpu().double() for tensor in (one, other))
    if not torch.equal(one_wide.isfinite(), other_wide.isfinite()):
        return False
    difference = (one_wide - other_wide).nan_to_num(0, 0, 0)  # inf - inf is nan
    return bool(difference.norm() <= torch.finfo(one.dtype).eps * one_wide.nan_to_num(0, 0, 0).norm())


def _outputs(installation: Installation, batch: Batch) -> list[Tensor]:
    """What the model gives: as it is, with the stock attention, and at strength 1 if this is another."""
    outputs = list(tensors(forward(installation.root, batch)))
    with installation.stock():
        outputs += tensors(forward(installation.root, batch))
    if any(layer.swap.strength < 1 for layer in installation.layers()):
        with _full(installation):
            outputs += tensors(forward(installation.root, batch))
    return outputs


# -- Where the scale of channels is free -------------------------------------------------------------------------------


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
