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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from hf_attn_swap.conversion.rescalable_edge import Trace, channels_read, is_matrix, is_norm, owners, tensors
from hf_attn_swap.core.checks import is_whole
from hf_attn_swap.families import sites
from hf_attn_swap.layer.smoothing import parts, plain
from hf_attn_swap.measuring.batches import Batch, as_batches, evaluating, forward, on_device, real_tokens
from hf_attn_swap.wiring.install import installation_of, model_root

# -- What a norm multiplies and adds


SAMPLES = 16
NORM_ROUNDING = 1e-4  # the largest relative difference that is rounding, in fp32


@dataclass(frozen=True)
class Affine:
    """The parameters of a norm.

    Attributes:
        weight: the name of w.
        bias: the name of b; None without one.
        neutral: the value of w with which the norm multiplies by 1.
        scale: what the norm multiplies by, a + w, (C,) in float64.
        shift: b, (C,) in float64; None without one.
    """

    weight: str
    bias: str | None
    neutral: float
    scale: Tensor
    shift: Tensor | None

    @property
    def behind(self) -> Tensor | None:
        """The bias b / (a + w), which gives b once a + w is in the matrices behind; not finite where that is 0."""
        return None if self.shift is None else torch.where(self.shift == 0, self.shift, self.shift / self.scale)


@torch.no_grad()
def affine(norm: nn.Module, channels: int) -> Affine | None:
    """The parameters of a norm; None if it does not have this form."""
    own = dict(norm.named_parameters())
    x_NC = _samples(next(iter(own.values())), channels)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in own.items()}
    bare = _call(norm, zeros, x_NC)
    changes = {name: _call(norm, zeros | {name: torch.ones_like(own[name])}, x_NC) - bare for name in own}
    shifts = [name for name, change in changes.items() if _near(change, torch.ones_like(change))]
    weights = [name for name in own if name not in shifts]
    if len(weights) != 1 or len(shifts) > 1 or own[weights[0]].shape != (channels,):
        return None
    unit = changes[weights[0]]
    a = round(float((bare * unit).sum() / unit.square().sum().clamp_min(1e-30)))
    scale = a + own[weights[0]].cpu().double()
    shift = own[shifts[0]].cpu().double() if shifts else None
    if not _near(_call(norm, own, x_NC), unit * scale + (0 if shift is None else shift)):
        return None
    return Affine(weights[0], shifts[0] if shifts else None, 1.0 - a, scale, shift)


@torch.no_grad()
def commutes(norm: nn.Module, form: Affine, rotation_CC: Tensor) -> bool:
    """True if n(x Q) = n(x) Q, where n is the norm with neutral parameters."""
    own = dict(norm.named_parameters())
    plain = {name: torch.full_like(weight, form.neutral if name == form.weight else 0) for name, weight in own.items()}
    x_NC = _samples(own[form.weight], len(rotation_CC))
    turned = _call(norm, plain, (x_NC.cpu().double() @ rotation_CC).to(x_NC.dtype).to(x_NC.device))
    return _near(turned, _call(norm, plain, x_NC) @ rotation_CC)


def _samples(like: Tensor, channels: int) -> Tensor:
    """Tokens of different sizes and channels with different means, (N,C)."""
    generator = torch.Generator().manual_seed(0)
    x_NC = torch.randn(SAMPLES, channels, generator=generator, dtype=torch.float64) + 0.5
    x_NC = x_NC * torch.exp(torch.randn(channels, generator=generator, dtype=torch.float64))
    return (x_NC * torch.logspace(-1, 2, SAMPLES, dtype=torch.float64)[:, None]).to(like.dtype).to(like.device)


def _call(norm: nn.Module, parameters: Mapping[str, Tensor], x_NC: Tensor) -> Tensor:
    """What the norm gives with other parameters, in float64 (which some devices do not have)."""
    out: Tensor = functional_call(norm, dict(parameters), (x_NC[None],))
    return out[0].cpu().double()


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= NORM_ROUNDING * other.norm())


# -- Orthogonal matrices


def spreading(channels: int, generator: torch.Generator) -> Tensor:
    """Random signs times a Hadamard matrix, all of whose entries have one size, (C,C): x (N,C) is rotated by x Q.

    QuaRot (Ashkboos et al., 2024, section 3). Where no Hadamard matrix is found, the odd part of C gets a random
    orthogonal matrix, and the power of two a Hadamard matrix; the Kronecker product of both is taken. In float64.
    """
    power = channels & -channels
    factor = next((matrix for matrix in map(hadamard, _sizes(channels)) if matrix is not None), None)
    if factor is None:
        factor = random(channels // power, generator)
    rest = sylvester(channels // len(factor))
    signs = torch.randint(0, 2, (channels, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return signs * torch.kron(factor.contiguous(), rest)


def _sizes(channels: int) -> Iterator[int]:
    """The odd part of C times 1, 2, 4 and so on, up to C."""
    part = channels // (channels & -channels)
    while part <= channels:
        yield part
        part *= 2


def sylvester(order: int) -> Tensor:
    """The Hadamard matrix of a power of two, with entries of size 1 / sqrt(order)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / order**0.5
    return scaled


def hadamard(order: int) -> Tensor | None:
    """A Hadamard matrix by one of Paley's two constructions (1933), with entries of size 1 / sqrt(order), or None.

    They exist for an order q + 1 with a prime q = 3 mod 4, and 2 (q + 1) with a prime q = 1 mod 4.
    """
    matrix: Tensor | None = None
    if order == 1:
        matrix = torch.ones(1, 1, dtype=torch.float64)
    elif order % 4 == 0 and _is_prime(order - 1):
        matrix = _conference(order - 1, -1.0) + torch.eye(order, dtype=torch.float64)
    elif order % 8 == 4 and _is_prime(order // 2 - 1):
        pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        one = torch.eye(order // 2, dtype=torch.float64)
        matrix = torch.kron(_conference(order // 2 - 1, 1.0), pairs) + torch.kron(one, other)
    return None if matrix is None else matrix / order**0.5


def _conference(prime: int, sign: float) -> Tensor:
    """A matrix (q+1,q+1) of zeros on the diagonal and ones and minus ones, orthogonal but for its size.

    Entry (i,j) of its core is 1 if i - j is a square mod q, and otherwise -1.
    """
    squares = torch.zeros(prime, dtype=torch.bool)
    squares[torch.arange(1, prime).square() % prime] = True
    character = squares.double() * 2 - 1
    character[0] = 0
    numbers = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = character[(numbers[:, None] - numbers) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def mean_keeping(channels: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix Q (C,C) with Q 1 = 1, so that x Q has the mean of x. In float64.

    It turns the space of the vectors with mean 0, and leaves the vector of ones as it is.
    """
    basis, _ = torch.linalg.qr(
        torch.cat([torch.ones(channels, 1, dtype=torch.float64), _normal(channels, channels - 1, generator)], 1)
    )
    within = basis[:, 1:]  # with mean 0
    turned: Tensor = within @ random(channels - 1, generator) @ within.T
    return turned + 1 / channels


def random(channels: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (C,C), in float64."""
    matrix: Tensor = torch.linalg.qr(_normal(channels, channels, generator)).Q
    return matrix


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


# -- The residual stream


ELSE = "quantise it without a rotation."


@dataclass(frozen=True)
class Stream:
    """The modules around a residual stream, by their paths.

    Attributes:
        channels: the number of channels, E.
        writers: the matrices and embeddings that add to the stream.
        norms: by norm that reads the stream: the matrices that read what it gives.
        bare: the matrices that read the stream without a norm.
    """

    channels: int
    writers: tuple[str, ...]
    norms: Mapping[str, tuple[str, ...]]
    bare: tuple[str, ...]

    @property
    def matrices(self) -> dict[str, None]:
        """Every module whose weights are rotated, in the order writers, readers; a module may be both."""
        readers = (reader for behind in self.norms.values() for reader in behind)
        return dict.fromkeys((*self.writers, *readers, *self.bare))


def stream_of(root: Any, trace: Trace) -> Stream:
    """The residual stream of a model.

    Args:
        root: the model.
        trace: what one forward pass showed.

    Raises:
        ValueError: there is none, or it cannot be rotated.
    """
    name, modules = type(root).__name__, dict(root.named_modules())
    if rested := _rested(trace, modules):
        raise ValueError(
            f"{_listed(rested)} of {name} did not run on the first batch, so what they read is not known; pass a batch "
            "that reaches every part of the model, or " + ELSE
        )
    writers = _writers(trace, modules)
    if not writers:
        raise ValueError(f"no embedding of {name} reaches a norm, so it has no stream of tokens to rotate; " + ELSE)
    if all(isinstance(modules[path], nn.Embedding) for path in writers):
        raise ValueError(
            f"no layer of {name} adds to what its embeddings give, so this is no residual stream (embeddings of fewer "
            f"channels, or a post-norm model); {ELSE}"
        )
    channels = trace.width[next(iter(writers))]
    for path in writers:
        _check_writer(path, modules[path], trace, channels)
    readers = dict.fromkeys(reader for path in writers for reader in trace.readers(path))
    norms = {path: trace.readers(path) for path in readers if is_norm(modules[path])}
    bare = tuple(path for path in readers if path not in norms)
    for path, behind in norms.items():
        _check_norm(path, behind, modules, trace)
    for path in (*bare, *(reader for behind in norms.values() for reader in behind)):
        if channels_read(modules[path]) != channels:
            raise ValueError(f"{path} of {name} reads the stream in another shape, not as {channels} channels; " + ELSE)
    return Stream(channels, tuple(writers), norms, bare)


def _rested(trace: Trace, modules: Mapping[str, nn.Module]) -> list[str]:
    """Norms and matrices that did not run, and whose weights are not those of another module that did."""
    ran = {id(parameter) for path in trace.called for parameter in modules[path].parameters()}
    still = [*trace.rested, *(path for path in modules if is_norm(modules[path]) and path not in trace.called)]
    return [path for path in still if not all(id(parameter) in ran for parameter in modules[path].parameters())]


def _writers(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, None]:
    """Embeddings that reach a norm, and all sources that reach what they, and these sources, reach."""
    writers = {
        path: None
        for path in trace.width
        if isinstance(modules[path], nn.Embedding) and any(is_norm(modules[each]) for each in trace.readers(path))
    }
    waiting = list(writers)
    while waiting:
        for reader in trace.readers(waiting.pop()):
            new = trace.reads[reader] - writers.keys()
            writers |= dict.fromkeys(sorted(new))
            waiting += new
    return writers


def _check_writer(path: str, module: nn.Module, trace: Trace, channels: int) -> None:
    """Refuse a source that cannot be rotated.

    Raises:
        ValueError: it is no plain matrix or embedding, has other channels, or reaches something else than norms and
            matrices.
    """
    if is_norm(module):
        raise ValueError(_added(path))
    if not (is_matrix(module) or is_table(module)) or trace.width[path] != channels:
        raise ValueError(
            f"{path} ({type(module).__name__}) reaches the residual stream, and is no plain matrix of {channels} "
            f"outputs; {ELSE}"
        )
    if path in trace.given:
        raise ValueError(
            f"the model gives its residual stream as an output ({path} reaches it), which a rotation would change; "
            "load the model with its head, and without output_hidden_states in its config."
        )
    modules = dict(trace.root.named_modules())
    if others := [
        reader for reader in trace.readers(path) if not (is_norm(modules[reader]) or is_matrix(modules[reader]))
    ]:
        raise ValueError(f"{_listed(others)} reads the residual stream, and is no norm or plain matrix; {ELSE}")


def _check_norm(path: str, behind: Iterable[str], modules: Mapping[str, nn.Module], trace: Trace) -> None:
    """Refuse a norm behind which something else stands than matrices that read it alone.

    Raises:
        ValueError: there is something else.
    """
    if path in trace.given:
        raise ValueError(
            f"the model gives what the norm {path} gives as an output, which a rotation would change; load a model "
            "without its head with it, and quantise others without a rotation."
        )
    if any(is_norm(modules[reader]) for reader in behind):
        raise ValueError(_added(path))
    if other := [reader for reader in behind if not is_matrix(modules[reader])]:
        raise ValueError(
            f"what the norm {path} gives is read by {_listed(other)}, which is no plain matrix (a router, experts that "
            f"are one parameter); {ELSE}"
        )
    if mixed := [reader for reader in behind if trace.reads[reader] != {path}]:
        raise ValueError(f"{_listed(mixed)} reads something else beside what the norm {path} gives; {ELSE}")


def _added(path: str) -> str:
    """Why a norm whose output goes on as a stream is refused."""
    return (
        f"what the norm {path} gives is added to the residual stream, or is this stream: a post-norm block, a norm "
        f"behind the embedding or at the end of a branch, or experts that are no plain matrices; {ELSE}"
    )


def _listed(paths: Iterable[str]) -> str:
    """The first paths of many."""
    every = list(paths)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


# -- The rotation


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
    for paths in owners(root).values():
        modules = dict.fromkeys(map(root.get_submodule, paths))
        rest = [module for module in modules if not is_table(module)]
        if len(modules) < 2 or not rest or touched.isdisjoint(modules):
            continue
        if len(rest) > 1 or rest[0] is not root.get_output_embeddings():
            raise ValueError(f"{', '.join(paths[:3])} of {type(root).__name__} share weights; {ELSE}")
        untied = True
    if untied:
        _own_parameters(root, root.get_output_embeddings(), weights)
    return untied


def is_table(module: nn.Module) -> bool:
    """True for an Embedding with a plain table."""
    own = dict(module.named_parameters())
    return (
        isinstance(module, nn.Embedding) and [*own] == ["weight"] and plain(module.weight) and not module.weight.is_meta
    )


def _own_parameters(root: Any, head: nn.Module, weights: _Weights) -> None:
    """Give the head copies of all that it shares, and say so in the configs.

    A bias too: where the config says that nothing is tied, a loaded model reads it under the head's own name.
    """
    holders = owners(root)
    for name, shared in list(head.named_parameters(recurse=False)):
        if len(set(holders[shared])) > 1:
            setattr(head, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
            weights.back.append(partial(setattr, head, name, shared))
    configs = [module.config for module in root.modules() if isinstance(module, PreTrainedModel)]
    for config in {id(config): config for config in (*configs, root.config.get_text_config())}.values():
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
        written = (
            [(parameter, 1) for parameter in module.parameters()] if is_table(module) else parts(module, source=True)
        )
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
    measured = _Measured()
    for batch in rows:
        with contextlib.ExitStack() as hooked:
            for path in stream.norms:
                norm = root.get_submodule(path)
                hooked.callback(norm.register_forward_pre_hook(measured.hook(path, batch)).remove)
            measured.outputs.append(_outputs(root, batch))
    return measured


def _outputs(root: nn.Module, batch: Batch) -> list[Tensor]:
    """What the model gives."""
    return [output.cpu() for output in tensors(forward(root, batch)) if output.is_floating_point()]


def _error(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest relative difference of two lists of outputs; infinite if numbers are not finite."""
    pairs = [(one.double(), other.double()) for one, other in zip(before, after, strict=True)]
    errors = [float((other - one).norm() / one.norm().clamp_min(1e-30)) for one, other in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _bound(outputs: list[list[Tensor]]) -> float:
    """The largest error that is rounding, in the dtype of the outputs."""
    return max(ROUNDING.get(output.dtype, 0.0) for row in outputs for output in row)


def _sized(read: Read) -> str:
    """The number, and the same in medians: "2,524, 694 medians"."""
    value = f"{read.largest:,.0f}" if read.largest >= 100 else f"{read.largest:.3g}"
    return f"{value}, {read.medians:,.0f} medians"
