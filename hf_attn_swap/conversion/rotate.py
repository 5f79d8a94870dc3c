"""Rotates the residual stream of a pretrained model, so that no channel is much larger than the others.

Let the stream be x (a row), and Q an orthogonal matrix. What writes x writes x Q instead, what reads x reads x Q and
multiplies by Q^T first, and all of this lies in the weights: W Q for an embedding, Q^T W for an output projection, and
W diag(g) Q for a matrix behind a norm with the scale g, which is folded into the matrix. A norm without a scale
commutes with Q. The model is the same function, and a channel that was a thousand times the others is spread over all.

QuaRot (Ashkboos et al., 2024), section 4, stage 1a and 1c; SliceGPT (Ashkboos et al., 2024), section 3, for folded
norms. That no module is found by its name, and that a LayerNorm is rotated as it is (by a Q that keeps the mean), is
this package's own. docs/mathematics.md, section Rotated stream. Axes: N token, C channel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.checks import is_whole
from ..families import sites
from ..layer.smoothing import parts, plain
from ..measuring.batches import Batch, as_batches, evaluating, forward, on_device, real_tokens
from ..wiring.install import installation_of, model_root
from .norms import Affine, affine, commutes
from .orthogonal import mean_keeping, spreading
from .stream import ELSE, Stream, stream_of
from .trace import Trace, is_matrix, is_table, owners, tensors

BATCHES = 4  # that are read
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # norms compute in fp32 also in a model in fp64
ROWS = 4096  # of a weight that are rotated at once


@dataclass(frozen=True, kw_only=True)
class Read:
    """The largest number that a norm of the stream reads.

    Attributes:
        largest: its absolute value.
        medians: the same, in medians of the absolute values that this norm reads.
        norm: the path of the norm.
    """

    largest: float = 0.0
    medians: float = 0.0
    norm: str = ""


@dataclass(frozen=True, kw_only=True)
class Rotated:
    """What `rotate` did.

    Attributes:
        channels: the number of channels of the stream, E.
        norms: the number of norms whose weights were folded into the matrices behind them.
        heads: the number of attention modules whose values were rotated.
        attentions: the number of attention modules.
        untied: True if the head shared its matrix with the embedding and has its own now.
        before: the largest number that a norm of the stream reads, before.
        after: the same, after.
        error: the largest relative difference of the outputs, |after - before| / |before|.
    """

    channels: int
    norms: int
    heads: int
    attentions: int
    untied: bool
    before: Read
    after: Read
    error: float

    def __str__(self) -> str:
        words = f"The residual stream ({self.channels} channels) is rotated"
        if self.heads:
            words += f", and so are the values of {self.heads} of {self.attentions} attention modules. "
        else:
            words += ", but not the values of the heads: no projection of its own gives them to W_o alone. "
        words += f"The weights of {self.norms} norms are in the matrices behind them. Largest number that a norm "
        words += f"reads: {_sized(self.after)} ({_sized(self.before)} before). "
        words += f"Relative error of the outputs: {self.error:.1e}."
        return words + (" The head has a matrix of its own now." if self.untied else "")


def rotate(model: nn.Module, batches: Iterable[Any], *, seed: int = 0) -> Rotated:
    """Rotate the residual stream of a stock model, and the values of each head, in place; the same function.

    The norms' weights go into the matrices behind them, and an orthogonal matrix into all matrices around the stream. A
    head that shares its matrix with the embedding gets its own (`config.tie_word_embeddings` is then False). The result
    is an ordinary model of the same class, which plain transformers saves and loads. Hidden states are rotated, too:
    outputs of `output_hidden_states` are other numbers. While it runs, weights need their memory twice.

    Rotate first, then patch, convert or quantise. No original weights can be had from rotated ones.
    QuaRot (Ashkboos et al., 2024); docs/mathematics.md, section Rotated stream.

    Args:
        model: a stock model with its head, in float32 or float64.
        batches: a few dicts of tensors as the model takes them; the first four are read, and labels are ignored. The
            first must reach every part of the model.
        seed: of the random rotation.

    Returns:
        What was done.

    Raises:
        ValueError: the model is patched, has adapters, offloaded, quantised or sharded weights, or weights in half
            precision; the seed is no whole number; there are no batches; the stream cannot be rotated (norms behind the
            addition, routers, experts that are one parameter, weights that layers share), with the reason; outputs
            are not finite, or differ afterwards by more than rounding. The model is then unchanged, bit for bit.
    """
    if not is_whole(seed):
        raise ValueError(f"seed must be a whole number, got {seed!r}.")
    root = model_root(model)
    _refuse(root)
    rows = [batch for batch, _ in zip(as_batches(batches), range(BATCHES), strict=False)]
    weights = _Weights()
    with torch.inference_mode(False), torch.no_grad(), evaluating(root):
        trace = Trace(root)
        trace.run(on_device(root, rows[0]))
        stream = stream_of(root, trace)
        rotation, forms = _rotation(root, stream, seed)
        before = _measure(root, rows, stream)
        if not all(torch.isfinite(each).all() for row in before.outputs for each in row):
            raise ValueError(f"what {type(root).__name__} gives is not finite; check the weights and the batches.")
        try:
            untied = _untie(root, stream, weights)
            heads = _turn_values(root, trace, rows[0], before.outputs[0], seed, weights)
            _turn_stream(root, stream, rotation, forms, weights)
            after = _measure(root, rows, stream)
            error = max(map(_error, before.outputs, after.outputs))
            if not error <= _bound(before.outputs):
                raise ValueError(
                    f"the outputs of the rotated {type(root).__name__} differ by {error:.1e} of their size, so it is "
                    "another function: something reads or writes the residual stream that is no matrix and no norm (a "
                    f"parameter that is added, a scale that depends on the tied head); {ELSE}"
                )
        except BaseException:
            weights.undo()
            raise
    return Rotated(
        channels=stream.channels,
        norms=len(stream.norms),
        heads=heads,
        attentions=len(sites(root)),
        untied=untied,
        before=before.read,
        after=after.read,
        error=error,
    )


def _refuse(root: PreTrainedModel) -> None:
    """Refuse a model whose weights are not all here, are not its own, or are not those of the stock model.

    Raises:
        ValueError: the reason.
    """
    if installation_of(root) is not None or hasattr(root.config, "attn_swap"):
        raise ValueError(
            "this model is patched, and a rotation cannot be taken back bit for bit; unpatch it, or rotate the stock "
            "model first and patch it then."
        )
    if any(hasattr(module, "base_layer") for module in root.modules()):
        raise ValueError("this model has adapters; rotate it before they are added, or merge them into the weights.")
    every = list(root.parameters())
    if any(parameter.is_meta for parameter in every):
        raise ValueError("weights of this model are offloaded; rotate it before it is dispatched.")
    if getattr(root, "is_quantized", False) or not all(map(plain, every)):
        raise ValueError("weights of this model are quantised or sharded; rotate it before, in float32.")
    if half := {parameter.dtype for parameter in every} - ROUNDING.keys():
        raise ValueError(
            f"weights are in {', '.join(sorted(map(str, half)))}, whose rounding would hide whether the rotated model "
            "is the same function; load the model with dtype=torch.float32, rotate it, and cast it then."
        )


def _rotation(root: nn.Module, stream: Stream, seed: int) -> tuple[Tensor, dict[str, Affine]]:
    """An orthogonal matrix (E,E) with which every norm of the stream commutes, and the parameters of these norms.

    Raises:
        ValueError: a norm has another form, or there is no such matrix.
    """
    forms: dict[str, Affine] = {}
    for path in stream.norms:
        form = affine(root.get_submodule(path), stream.channels)
        if form is None or (form.behind is not None and not torch.isfinite(form.behind).all()):
            kind = type(root.get_submodule(path)).__name__
            raise ValueError(
                f"the norm {path} ({kind}) is no product of normalised channels with one weight and a bias, or a "
                f"weight is 0 beside a bias, so its weight cannot go into the matrices behind it; {ELSE}"
            )
        forms[path] = form
    left: list[str] = []
    for make in (spreading, mean_keeping):
        rotation = make(stream.channels, torch.Generator().manual_seed(seed))
        left = [path for path in forms if not commutes(root.get_submodule(path), forms[path], rotation)]
        if not left:
            return rotation, forms
    raise ValueError(
        f"the norm {left[0]} ({type(root.get_submodule(left[0])).__name__}) gives other numbers for rotated channels, "
        f"so it cannot stand in a rotated stream; {ELSE}"
    )


@dataclass
class _Weights:
    """Gives parameters other numbers, and puts all back."""

    back: list[Callable[[], None]] = field(default_factory=list)
    done: set[tuple[nn.Parameter, int]] = field(default_factory=set)

    def turn(self, weight: nn.Parameter, axis: int, rotation: Tensor, scale: Tensor | None = None) -> None:
        """Multiply the channels along an axis by a scale, and rotate them; by a smaller matrix, each block of them.

        Computed in float64. A weight that several embeddings share is rotated once.
        """
        if (weight, axis) in self.done:
            return
        self.done.add((weight, axis))
        at = weight.device if weight.is_cuda else torch.device("cpu")  # not every device has float64
        rotation = rotation.to(at)
        moved = weight.data.movedim(axis, -1)
        turned = []
        for some in torch.split(moved.reshape(-1, moved.shape[-1]), ROWS):
            wide = some.to(at, torch.float64)
            wide = wide if scale is None else wide * scale.to(at)
            blocks = wide.reshape(len(wide), -1, len(rotation))
            turned.append((blocks @ rotation).flatten(1).to(weight.dtype))
        self.put(weight, torch.cat(turned).to(weight.device).view(moved.shape).movedim(-1, axis).contiguous())

    def put(self, weight: nn.Parameter, numbers: Tensor) -> None:
        """Give a parameter these numbers."""
        self.back.append(partial(setattr, weight, "data", weight.data))
        weight.data = numbers

    def undo(self, start: int = 0) -> None:
        """Put everything back, bit for bit, that was changed after the first `start` changes."""
        while len(self.back) > start:
            self.back.pop()()


def _untie(root: Any, stream: Stream, weights: _Weights) -> bool:
    """Give the head a matrix of its own, if it shares that of an embedding. True if it did.

    Raises:
        ValueError: other modules share weights, too.
    """
    touched = {root.get_submodule(path) for path in (*stream.matrices, *stream.norms)}
    untied = False
    for parameter, paths in owners(root).items():
        modules = dict.fromkeys(map(root.get_submodule, paths))
        rest = [module for module in modules if not is_table(module)]
        if len(modules) < 2 or not rest or touched.isdisjoint(modules):
            continue
        if len(rest) > 1 or rest[0] is not root.get_output_embeddings():
            raise ValueError(f"{', '.join(paths[:3])} of {type(root).__name__} share weights; {ELSE}")
        _own_matrix(root, rest[0], parameter, weights)
        untied = True
    return untied


def _own_matrix(root: Any, head: nn.Module, shared: nn.Parameter, weights: _Weights) -> None:
    """Give the head a copy of a matrix, and say so in the configs."""
    (name,) = [name for name, each in head.named_parameters() if each is shared]
    setattr(head, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
    weights.back.append(partial(setattr, head, name, shared))
    configs = [module.config for module in root.modules() if isinstance(module, PreTrainedModel)]
    for config in {id(each): each for each in (*configs, root.config.get_text_config())}.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
            weights.back.append(partial(setattr, config, "tie_word_embeddings", True))


def _turn_values(
    root: nn.Module, trace: Trace, batch: Batch, wanted: list[Tensor], seed: int, weights: _Weights
) -> int:
    """Rotate the values of each head where they are made, and back where W_o reads them; in so many modules.

    If the outputs then differ, as with a gate between them, nothing is rotated.
    """
    start, count = len(weights.back), 0
    for value, output, width in _values(root, trace):
        rotation = spreading(width, torch.Generator().manual_seed(seed))
        for weight, axis in (*parts(value, source=True), *parts(output, source=False)):
            weights.turn(weight, axis, rotation)
        count += 1
    if count and not _error(wanted, _outputs(root, batch)) <= _bound([wanted]):
        weights.undo(start)
        return 0
    return count


def _values(root: nn.Module, trace: Trace) -> Iterable[tuple[nn.Module, nn.Module, int]]:
    """The value projection, W_o and the width of a head of each attention where W_o alone reads the values."""
    for site in sites(root):
        family = site.family
        fused = family.value in (family.query, family.key)
        if not site.usable or family.value is None or family.output is None or fused:
            continue
        value, output = site.core.get_submodule(family.value), site.container.get_submodule(family.output)
        sizes = family.geometry(site.core)
        path = trace.names.get(value, "")
        alone = trace.readers(path) == (trace.names.get(output),) and path not in trace.given
        if alone and is_matrix(value) and is_matrix(output):
            ends = (*parts(value, source=True), *parts(output, source=False))
            if all(weight.shape[axis] % sizes.head_dim == 0 for weight, axis in ends):
                yield value, output, sizes.head_dim


def _turn_stream(
    root: nn.Module, stream: Stream, rotation: Tensor, forms: Mapping[str, Affine], weights: _Weights
) -> None:
    """Fold the norms into the matrices behind them, and rotate all that writes or reads the stream."""
    for path in stream.writers:
        module = root.get_submodule(path)
        written = [(each, 1) for each in module.parameters()] if is_table(module) else parts(module, source=True)
        for weight, axis in written:
            weights.turn(weight, axis, rotation)
    for path in stream.bare:
        for weight, axis in parts(root.get_submodule(path), source=False):
            weights.turn(weight, axis, rotation)
    for path, readers in stream.norms.items():
        form, norm = forms[path], root.get_submodule(path)
        for reader in readers:
            for weight, axis in parts(root.get_submodule(reader), source=False):
                weights.turn(weight, axis, rotation, form.scale)
        own = norm.get_parameter(form.weight)
        weights.put(own, torch.full_like(own.data, form.neutral))
        if form.bias is not None and form.behind is not None:
            bias = norm.get_parameter(form.bias)
            weights.put(bias, (form.behind @ rotation).to(bias.dtype).to(bias.device))


@dataclass
class _Measured:
    """What the model gives on each batch, and the largest number that a norm of its stream reads."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    read: Read = field(default_factory=Read)

    def hook(self, path: str, batch: Batch) -> Any:
        """A forward pre-hook of a norm."""

        def reads(module: nn.Module, args: Any) -> None:
            sizes = real_tokens(batch, args[0]).abs()
            largest = float(sizes.max())
            if largest > self.read.largest:
                self.read = Read(largest=largest, medians=largest / float(sizes.median().clamp_min(1e-30)), norm=path)

        return reads


def _measure(root: nn.Module, rows: list[Batch], stream: Stream) -> _Measured:
    """Run the model on batches."""
    found = _Measured()
    for batch in rows:
        with contextlib.ExitStack() as hooked:
            for path in stream.norms:
                norm = root.get_submodule(path)
                hooked.callback(norm.register_forward_pre_hook(found.hook(path, batch)).remove)
            found.outputs.append(_outputs(root, batch))
    return found


def _outputs(root: nn.Module, batch: Batch) -> list[Tensor]:
    """What the model gives."""
    return [each.cpu() for each in tensors(forward(root, batch)) if each.is_floating_point()]


def _error(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest relative difference of two lists of outputs; infinite if numbers are not finite."""
    pairs = [(one.double(), other.double()) for one, other in zip(before, after, strict=True)]
    errors = [float((other - one).norm() / one.norm().clamp_min(1e-30)) for one, other in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _bound(outputs: list[list[Tensor]]) -> float:
    """The largest error that is rounding, in the dtype of the outputs."""
    return max(ROUNDING.get(each.dtype, 0.0) for row in outputs for each in row)


def _sized(read: Read) -> str:
    """The number, and the same in medians: "2,524, 694 medians"."""
    value = f"{read.largest:,.0f}" if read.largest >= 100 else f"{read.largest:.3g}"
    return f"{value}, {read.medians:,.0f} medians"
