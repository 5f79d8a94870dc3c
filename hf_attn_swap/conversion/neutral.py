"""Lets the skip of a swapped pre-norm layer start at almost nothing, without leaving the paper's formula.

A pre-norm block computes h + f(x) with x = gamma n(h) + beta. Some variants add a multiple of x to their output. The
pretrained model never had this skip, and in a pre-norm block no fit can take the skip back.

The scale of the norm is free, however. Let e = 2^-k. Multiply gamma and beta by e, and divide every matrix that reads x
by e. All these matrices then give the same numbers as before, to the bit, and only the skip is e times as large. So a
model whose skip is e x, and a model with other weights whose skip is x, are one and the same function. `neutral_start`
keeps the weights, and scales the skip. The reason is training: an optimiser such as Adam takes steps of one size, which
would destroy a norm of size e and hardly move matrices of size 1/e, and an adapter beside these matrices would read an
input of size e.

docs/mathematics.md, section Neutral start. Axes: B batch, L token, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..families import Site
from ..layer.neutral_start import LARGEST_EXPONENT, SkipScale
from ..measuring.batches import Batch, as_batches, evaluating, on_device
from ..patch import need_installation

EXPONENT = 10


@dataclass(frozen=True, kw_only=True)
class NeutralStart:
    """What a neutral start did.

    Attributes:
        exponent: k; the skip is multiplied by 2^-k.
        layers: the numbers of the layers whose skip was scaled.
        left: a sentence for every layer that was left alone, by the layer's number.
    """

    exponent: int
    layers: tuple[int, ...]
    left: Mapping[int, str]

    def __str__(self) -> str:
        words = f"The skip of {len(self.layers)} layers starts at 2^-{self.exponent} of the input."
        for reason in sorted(set(self.left.values())):
            numbers = ", ".join(str(index) for index, why in self.left.items() if why == reason)
            words += f" Layers {numbers} are left alone: {reason}."
        return words


def neutral_start(model: nn.Module, batch: Any = None, *, exponent: int = EXPONENT) -> NeutralStart:
    """Scale the skip of every swapped pre-norm layer by 2^-exponent, in place.

    Only variants that add their input have a skip (`modern_hopfield`, `simpletron_res`, `simpletron_resl`). No weight
    changes, and the model at strength 0 does not change. `config.attn_swap` records the exponent, and `unpatch_model`
    removes it with the swap. A layer is left alone, and named in the result, where the scale of the norm is not free:
    in a post-norm block, where the norm feeds something else than this attention, and where the attention reads the
    norm's output by something else than matrices.
    docs/mathematics.md, section Neutral start.

    Args:
        model: a patched model.
        batch: a dict of tensors as the model takes them. Two forward passes with this batch show what each norm
            feeds. None makes up token ids or an image.
        exponent: k, a whole number of at least 1. With 0, the skip is the paper's again.

    Returns:
        The layers whose skip was scaled, and a reason for every other layer.

    Raises:
        ValueError: the model is not patched, no variant has a skip, the exponent is out of range, or no batch can be
            made up for this model.
    """
    if isinstance(exponent, bool) or not isinstance(exponent, int) or not 0 <= exponent <= LARGEST_EXPONENT:
        raise ValueError(f"exponent must be a whole number from 0 to {LARGEST_EXPONENT}, got {exponent!r}.")
    installation = need_installation(model)
    skips = [layer for layer in installation.layers() if layer.swap.adds_input]
    if not skips:
        raise ValueError("no swapped layer adds its input, so there is no skip to start at nothing.")
    found = bound(model, batch) if exponent else {}
    left = {layer.number: found[layer.number] for layer in skips if layer.number in found}
    scaled = [layer for layer in skips if layer.number not in left]
    for layer in scaled:
        for swap in layer.copies:
            if exponent:
                swap.put(SkipScale(exponent))
            else:
                swap.drop(SkipScale.name)
    installation.refresh()
    return NeutralStart(exponent=exponent, layers=tuple(layer.number for layer in scaled), left=left)


@torch.inference_mode(False)
@torch.enable_grad()
def bound(model: nn.Module, batch: Any = None) -> dict[int, str]:
    """Find the swapped layers in front of which the scale of the norm is not free, by two passes of the stock model.

    In the first, every attention is cut off from the norm in front of it. If autograd's graph still leads from the
    model's output to the output of this norm, the norm feeds something else too. In the second, every attention reads
    twice its input, and the matrices inside half of what they read: if the attention gives other numbers than before,
    something else than its matrices reads the input. No pass computes a gradient.

    Returns:
        By the layer's number: the reason why the scale is not free.
    """
    installation = need_installation(model)
    layers = installation.layers()
    inputs: Batch = next(as_batches(made_up(installation.root) if batch is None else batch))
    cut = _Cut()
    with evaluating(model), contextlib.ExitStack() as hooked:
        for module in filter(is_norm, model.modules()):
            hooked.callback(module.register_forward_hook(cut.leaves).remove)
        for layer in layers:
            core = layer.site.core
            hooked.callback(core.register_forward_pre_hook(cut.arrives(layer.site), with_kwargs=True).remove)
            hooked.callback(core.register_forward_hook(cut.gives).remove)
        hooked.enter_context(installation.stock())
        output = model(**on_device(model, inputs))
    reached = _reached(output)
    reasons = {layer.number: cut.reason(layer.site, reached) for layer in layers}
    found = {number: reason for number, reason in reasons.items() if reason is not None}
    doubled = _Doubled(cut.given)
    with evaluating(model), contextlib.ExitStack() as hooked:
        for layer in layers:
            if layer.number in found:
                continue
            core = layer.site.core
            hooked.callback(core.register_forward_pre_hook(doubled.arrives(layer.site), with_kwargs=True).remove)
            hooked.callback(core.register_forward_hook(doubled.gives(layer.number)).remove)
            for module in filter(_is_matrix, core.modules()):
                hooked.callback(module.register_forward_pre_hook(doubled.reads).remove)
        hooked.enter_context(installation.stock())
        model(**on_device(model, inputs))
    return found | dict.fromkeys(doubled.other, "this attention reads the norm's output not by matrices alone")


def made_up(root: PreTrainedModel) -> Batch:
    """A small batch for a model that reads token ids or images.

    Raises:
        ValueError: the model reads something else.
    """
    name, config = root.main_input_name, root.config
    if name == "input_ids":
        batch = {"input_ids": torch.arange(1, 9)[None]}
        return batch | ({"decoder_input_ids": batch["input_ids"]} if config.is_encoder_decoder else {})
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width)}
    raise ValueError(f"{type(root).__name__} reads {name}; pass a batch, a dict of tensors as the model takes them.")


class _Cut:
    """Notes the outputs of norms, and cuts the attentions off from them, in one forward pass."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Tensor, Any]] = []  # of norms, each with its node of autograd's graph
        self.fronts: dict[int, list[Any]] = {}  # by the id of an attention's core: the nodes of the norms in front
        self.given: dict[int, Any] = {}  # by the same id: what the attention gave

    def leaves(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After a norm: let autograd follow its output, also where no weight trains."""
        if not isinstance(output, Tensor):
            return None
        followed = (output if output.requires_grad else output.detach().requires_grad_()).clone()
        self.outputs.append((followed, followed.grad_fn))
        return followed

    def arrives(self, site: Site) -> Any:
        """Make a hook that runs before an attention's core: it notes the norm in front, and cuts the core off."""

        def cut(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            x = site.input(args, kwargs)
            self.fronts.setdefault(id(module), []).append(self._front(x))
            return _in_place_of(x, x.detach(), args, kwargs)

        return cut

    def gives(self, module: nn.Module, args: Any, output: Any) -> None:
        """After an attention's core: keep what it gave."""
        self.given[id(module)] = output

    def _front(self, x: Tensor) -> Any:
        """The node of the norm whose output is x, perhaps in another shape; None if there is no such norm."""
        for output, node in reversed(self.outputs):
            if output.data_ptr() == x.data_ptr() and output.numel() == x.numel():
                return node if output.grad_fn is node else None  # another node: the output was changed in place
        return None

    def reason(self, site: Site, reached: set[Any]) -> str | None:
        """Why the scale of the norm in front of an attention is not free; None if it is free."""
        if site.family.post_norm:
            return "the input is the residual stream itself (post-norm), where `calibrate` undoes the skip"
        fronts = self.fronts.get(id(site.core), [])
        if len(fronts) != 1:
            return f"the batch reached this attention {len(fronts)} times instead of once"
        if fronts[0] is None:
            return "no norm was found right in front of this attention"
        return "the norm in front also feeds something else than this attention" if fronts[0] in reached else None


class _Doubled:
    """Gives attentions twice their input and the matrices inside half of what they read, both to the bit.

    Args:
        given: what each attention gave for its input, by the id of its core. The model goes on with this.
    """

    def __init__(self, given: Mapping[int, Any]) -> None:
        self.given = given
        self.x: Tensor | None = None  # twice the input of the attention that runs
        self.other: list[int] = []  # the numbers of the layers that gave something else

    def arrives(self, site: Site) -> Any:
        """Make a hook that runs before an attention's core, and doubles its input."""

        def double(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            x = site.input(args, kwargs)
            self.x = 2 * x.detach()  # as in the first pass: gradients choose among kernels, which round differently
            return _in_place_of(x, self.x, args, kwargs)

        return double

    def reads(self, module: nn.Module, args: Any) -> Any:
        """Before a matrix: halve its input if this is the doubled one, perhaps in another shape or dtype."""
        first = args[0] if args else None
        if self.x is None or not isinstance(first, Tensor) or first.numel() != self.x.numel():
            return None
        same = torch.equal(first.reshape(-1), self.x.reshape(-1).to(first.dtype))
        return (first / 2, *args[1:]) if same else None

    def gives(self, index: int) -> Any:
        """Make a hook that runs after an attention's core, and compares what it gave."""

        def compare(module: nn.Module, args: Any, output: Any) -> Any:
            self.x = None
            before = self.given[id(module)]
            pairs = zip(tensors(output), tensors(before), strict=True)
            if not all(torch.allclose(now, then, rtol=0, atol=0, equal_nan=True) for now, then in pairs):
                self.other.append(index)
            return before

        return compare


def _in_place_of(x: Tensor, other: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, with another tensor instead of x."""
    return (
        tuple(other if each is x else each for each in args),
        {name: other if each is x else each for name, each in kwargs.items()},
    )


def _reached(output: Any) -> set[Any]:
    """Every node of autograd's graph from which a tensor of the output was computed."""
    waiting = [each.grad_fn for each in tensors(output)]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
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


def _is_matrix(module: nn.Module) -> bool:
    """True for a module without children that holds one matrix, as `nn.Linear`, whatever form the weight has."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not any(True for _ in module.children())
