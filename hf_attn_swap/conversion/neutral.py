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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..families import Site
from ..layer.swap import LARGEST_EXPONENT
from ..measuring.batches import Batch, as_batches, evaluating, forward
from ..patch import need_installation

EXPONENT = 10
PRODUCTS = {"linear", "addmm", "matmul", "mm", "__matmul__"}
SAME_NUMBERS = {"view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "to", "dropout"}


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
    in a post-norm block, and where the norm feeds something else than the projections of this attention.
    docs/mathematics.md, section Neutral start.

    Args:
        model: a patched model.
        batch: a dict of tensors as the model takes them. One forward pass with this batch shows which norm feeds which
            matrices. None makes up token ids or an image.
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
    found = readers(model, batch) if exponent else {}
    left = {each.number: reason for each in skips if isinstance(reason := found.get(each.number), str)}
    scaled = [layer for layer in skips if layer.number not in left]
    for layer in scaled:
        for swap in layer.copies:
            swap.neutral = exponent or None
    installation.refresh()
    return NeutralStart(exponent=exponent, layers=tuple(layer.number for layer in scaled), left=left)


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The norm in front of one attention, and everything that multiplies the norm's output by a matrix.

    Attributes:
        norm: the norm.
        modules: the modules that hold such a matrix, as `nn.Linear` does.
        weights: matrices that no such module holds, but that a function of the attention itself reads.
    """

    norm: nn.Module
    modules: tuple[nn.Module, ...]
    weights: tuple[nn.Parameter, ...]


@torch.no_grad()
def readers(model: nn.Module, batch: Any = None) -> dict[int, Readers | str]:
    """Find the norm in front of every swapped layer, and what reads its output, by one forward pass of the stock model.

    Returns:
        By the layer's number: the norm and the matrices, or a reason why the scale of the norm is not free.
    """
    installation = need_installation(model)
    layers = installation.layers()
    inputs: Batch = next(as_batches(made_up(installation.root) if batch is None else batch))
    watch = _Watch()
    with evaluating(model), contextlib.ExitStack() as hooked:
        for layer in layers:
            core = layer.site.core
            hooked.callback(core.register_forward_pre_hook(watch.arrives(layer.site), with_kwargs=True).remove)
        for module in model.modules():
            if _is_norm(module):
                hooked.callback(module.register_forward_hook(watch.leaves).remove)
            elif _holds_matrix(module):
                hooked.callback(module.register_forward_pre_hook(watch.reads, with_kwargs=True).remove)
                hooked.callback(module.register_forward_hook(watch.has_read).remove)
        hooked.enter_context(installation.stock())
        with watch:
            forward(model, inputs)
    return {layer.number: watch.answer(layer.site) for layer in layers}


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


class _Watch(TorchFunctionMode):
    """Follows the outputs of norms through one forward pass: which attention they reach, and what computes with them.

    Tensors are told apart by identity, so every followed tensor is kept until the end of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.roots: dict[int, int] = {}  # from the id of a tensor to the id of the norm's output that it shows
        self.norms: dict[int, nn.Module] = {}
        self.uses: dict[int, list[nn.Module | nn.Parameter | str]] = {}
        self.inside = 0  # above 0 inside a module that holds a matrix: what happens there is the module's own business
        self.reached: dict[int, list[int | None]] = {}  # by the id of an attention's core

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        roots = {self.roots[id(each)] for each in given if id(each) in self.roots}
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [each for each in results if isinstance(each, Tensor)]
        if not roots or not tensors:
            return result
        name = getattr(func, "__name__", str(func))
        for root in roots:
            if name in SAME_NUMBERS:
                for tensor in tensors:
                    self._follow(tensor, root)
            else:
                matrices = [each for each in given if isinstance(each, nn.Parameter) and each.dim() == 2]
                self.uses[root] += matrices if matrices and name in PRODUCTS else [name]
        return result

    def leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a norm: follow its output."""
        if isinstance(output, Tensor):
            self._follow(output, id(output))
            self.norms[id(output)] = module
            self.uses[id(output)] = []

    def reads(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a module that holds a matrix: note whether it reads a followed tensor.

        The module is noted and not its weight, because the weight may be bytes (4 bits), or on another device.
        """
        self.inside += 1
        for each in (*args, *kwargs.values()):
            if id(each) in self.roots:
                self.uses[self.roots[id(each)]].append(module)

    def has_read(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a module that holds a matrix."""
        self.inside -= 1

    def arrives(self, site: Site) -> Any:
        """Make a hook that runs before an attention's core, and notes whether a followed tensor is its input."""

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = site.input(args, kwargs)
            self.reached.setdefault(id(module), []).append(self.roots.get(id(x)))

        return note

    def answer(self, site: Site) -> Readers | str:
        """The norm in front of an attention and the matrices that read it, or why the norm's scale is not free."""
        if site.family.post_norm:
            return "the input is the residual stream itself (post-norm), where `calibrate` undoes the skip"
        reached = self.reached.get(id(site.core), [])
        if len(reached) != 1:
            return f"the batch reached this attention {len(reached)} times instead of once"
        (root,) = reached
        if root is None:
            return "no norm was found right in front of this attention"
        own = {id(each) for each in (*site.container.parameters(), *site.container.modules())}
        others = sorted({use for use in self.uses[root] if isinstance(use, str)})
        modules = [use for use in self.uses[root] if isinstance(use, nn.Module)]
        weights = [use for use in self.uses[root] if isinstance(use, nn.Parameter)]
        if others:
            return f"the norm in front also feeds something that is no projection ({', '.join(others)})"
        if any(id(each) not in own for each in (*modules, *weights)):
            return "the norm in front also feeds matrices outside this attention"
        return Readers(norm=self.norms[root], modules=tuple(modules), weights=tuple(weights))

    def _follow(self, tensor: Tensor, root: int) -> None:
        self.kept.append(tensor)
        self.roots[id(tensor)] = root


def _is_norm(module: nn.Module) -> bool:
    """True if a module has parameters of one axis alone, as a norm has its scale and its bias."""
    parameters = list(module.parameters())
    return bool(parameters) and all(each.dim() == 1 for each in parameters) and not any(True for _ in module.children())


def _holds_matrix(module: nn.Module) -> bool:
    """True for a module without children that holds one matrix, as `nn.Linear`, whatever form the weight has."""
    return isinstance(getattr(module, "weight", None), Tensor) and not any(True for _ in module.children())
