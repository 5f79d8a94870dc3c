"""Carries the context of a call to the attention function, by hooks on models, layers and attention modules.

Hooks that run before a module add the context to the keyword arguments. Hooks that run after an attention module do
what a variant does after W_o. All hooks are functions of the module level. They use their `module` argument and keep
nothing between calls, so that copies, pickles and threads are safe. docs/design.md describes the way of a call.
Axes: B batch, Q query, L token, E model width.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.call import Call, ForwardContext
from ..core.masks import compiling
from ..families import stock_class
from ..families.source import arguments
from ..layer.swap import STOCK, Phase, Swap, Wiring
from .cache import LinearState, cache_of, keep_all_keys
from .implementations import NAME, accepted
from .positions import rotated_from_first_seen
from .seam import CALL, CONTEXT, LAYER, OF_KEYS, MaskWithContext, kind_of_masks, swap_of
from .state import State
from .window_cache import WindowState


def before_stack(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before a stack: add a new `ForwardContext` to the keyword arguments, which the layers share during this pass.

    A program that reads attention weights may set the model to "eager" by itself, because SDPA gives no weights
    (Whisper does for the times of words). Our function gives them, so the stack runs this function again.
    """
    want = kwargs.get("output_attentions")
    want = getattr(module.config, "output_attentions", False) if want is None else want
    if want and module.config._attn_implementation == "eager":
        module.set_attn_implementation(NAME)
    return args, {**kwargs, CONTEXT: ForwardContext(want_weights=bool(want), gradients=torch.is_grad_enabled())}


@dataclass(frozen=True, eq=False)
class KeepNext:
    """A hook that runs before a stack, and keeps hooks of other attention modules next to their forward.

    Another program may register a hook that changes the input or the output of an attention, before the model was
    patched or after. The input that our hook notes must be the one that the attention reads, and the output that other
    hooks get must be that of the swapped attention. A compiler does not look into the handles.

    Attributes:
        handles: the handles of the hooks of the attention modules; and True for a hook that runs before its module,
            and must be the last to do so, or False for one that runs after it, and must be the first.
    """

    handles: tuple[tuple[RemovableHandle, bool], ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Move each hook to the end, or to the beginning, of its module's hooks, if it is not there."""
        if torch.compiler.is_compiling():
            return
        for handle, before in self.handles:
            hooks = handle.hooks_dict_ref()
            if hooks and next(reversed(hooks) if before else iter(hooks)) != handle.id:
                hooks.move_to_end(handle.id, last=before)


@dataclass(frozen=True, eq=False)
class InOrder:
    """A hook that runs before the part of a model with a list of layers, and compares the list with its wiring.

    Layers that carry scores know their number from when they were wired. A layer that was removed, appended or moved
    since would take the scores of another one.

    Attributes:
        layers: the path of the list, from the module with this hook.
        count: the number of layers in the list.
        cores: by the number of each layer with such swaps, the path of each of its attention modules from the layer,
            and the path in the model that the swap knows.
    """

    layers: str
    count: int
    cores: Mapping[int, Sequence[tuple[str, str]]]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Compare each layer.

        Raises:
            ValueError: the layers are others than when the model was patched, or one module has two places.
        """
        layers = list(module.get_submodule(self.layers).children())
        names = module.get_submodule(self.layers)._modules
        if len(layers) < len(names):  # `children` names each module once
            raise ValueError(
                f"a layer of {type(module).__name__} is in its list of layers twice, so its attention cannot know "
                "whose scores it carries on; put in a copy (copy.deepcopy), or use a variant that carries no scores."
            )
        for number, layer in enumerate(layers):
            known = self.cores.get(number, ())
            if number >= self.count or not all(_is_at(layer, inside, path) for inside, path in known):
                raise ValueError(
                    f"the layers of {type(module).__name__} have changed since the model was patched (layer {number}), "
                    "and its attention carries scores from one layer to the next; call set_strength(model, 1.0), or "
                    "with the strength that you want, which counts the layers again."
                )


def _is_at(layer: nn.Module, inside: str, path: str) -> bool:
    """True if the attention module at `inside` in a layer has the swap that was put at `path` in the model."""
    try:
        swap: Any = functools.reduce(getattr, inside.split("."), layer).attn_swap
    except AttributeError:  # a layer of another kind
        return False
    return swap is not None and swap.wiring is not None and swap.wiring.path == path


def before_encoder(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before the part of a stack that holds all layers: add a `ForwardContext` if `before_stack` did not run.

    A program that calls `model.forward(...)` and not `model(...)`, as sentence-transformers does, passes by the hooks
    of the model.
    """
    if CONTEXT in kwargs:
        return args, kwargs
    return args, {**kwargs, CONTEXT: ForwardContext(gradients=torch.is_grad_enabled())}


def after_encoder(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After the part of a stack that holds all layers: close the `ForwardContext`."""
    kwargs[CONTEXT].closed = True


def after_stack(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After a stack: close the `ForwardContext`. A later call of a shared module computes an unknown layer again.

    Raises:
        ValueError: the caller wants attention weights, but the model does not pass keyword arguments on to its layers.
    """
    context: ForwardContext = kwargs[CONTEXT]
    context.closed = True
    if context.want_weights and not context.arrived:
        raise ValueError(
            f"{type(module).__name__} does not pass keyword arguments on to its layers, so attention weights cannot "
            "be asked for; leave out output_attentions, or use a newer transformers."
        )


def before_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before a block: add the residual stream, and whether the block is under activation checkpointing.

    Raises:
        ValueError: the checkpointing is re-entrant, which would lose gradients of carried scores.
    """
    checkpointed = bool(getattr(module, "gradient_checkpointing", False)) and module.training
    context: ForwardContext | None = kwargs.get(CONTEXT)
    if checkpointed and (torch.is_grad_enabled() if context is None else context.gradients):
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant", True):
            raise ValueError(
                "modern_hopfield under re-entrant activation checkpointing would lose gradients; call "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
    residual = args[0] if args else kwargs.get(arguments(stock_class(module))[0])
    return args, {**kwargs, LAYER: (residual, checkpointed)}


def before_core(module: nn.Module, args: Any, kwargs: dict[str, Any], core: nn.Module | None = None) -> Any:
    """Before an attention module: check the call, and add its `Call` to the keyword arguments.

    Args:
        module: the module that is called.
        args: its arguments by position.
        kwargs: its arguments by name.
        core: the attention module inside, if `module` is a container around it.

    Raises:
        ValueError: the call is cross-attention; or nothing is computed here, and the model has another attention
            implementation now (otherwise `after_call` sees it).
    """
    core = module if core is None else core
    swap = swap_of(core)
    if kwargs.get(STOCK):
        # The stock layer repeats a call of the swapped layer, with the swapped layer's arguments.
        return args, {name: value for name, value in kwargs.items() if name != CALL}
    cache = cache_of(args, kwargs)
    if swap is None or swap.phase == Phase.OFF:
        _check_implementation(core)
        return args, kwargs
    wiring = swap.wiring
    assert wiring is not None, "a swap computes in no model"
    for argument in wiring.others:
        if argument.of(args, kwargs) is not None:
            raise ValueError(
                f"{type(core).__name__}: cross-attention has no values of its own tokens and cannot be swapped; leave "
                "this module out with layers= or modules=."
            )
    context: ForwardContext | None = kwargs.get(CONTEXT)
    if context is None and wiring.first and wiring.last:  # a layer that shares scores with no other needs no stack
        context = ForwardContext(gradients=torch.is_grad_enabled())
    call = Call(x=wiring.states.of(args, kwargs), context=context, last=wiring.last, uniform=wiring.uniform)
    call.residual, call.recomputed = kwargs.get(LAYER, (None, False))
    if swap.carries:
        call.order = swap.place_in(context)
        call.first = swap.is_first(call.order)
        if cache is not None and not wiring.uniform:
            keep_all_keys(cache)
    if cache is not None:
        layer, call.start = _place_in_cache(core, wiring, cache)
        if layer is not None and (swap.replaces or swap.span is not None):
            call.state = _state(core, swap, wiring, cache, layer, context)
    elif wiring.borrows:  # the current tokens are the last ones
        call.start = sys.maxsize
    if wiring.dropout_path:
        call.dropout = module.get_submodule(wiring.dropout_path)
    if swap.training and swap.fresh and torch.is_grad_enabled():
        _warn_frozen(swap)
    if "keys" in swap.changed and wiring.mask is not None and not (context is not None and context.from_first_seen):
        args, kwargs = rotated_from_first_seen(core, wiring.mask.of(args, kwargs), args, kwargs)
    return args, {**kwargs, CALL: call}


def before_core_by_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before an attention module that passes on its mask, but no keyword arguments: pack the `Call` with the mask."""
    swap = swap_of(module)
    if swap is None:
        return args, kwargs
    place = wiring_of(swap).mask
    assert place is not None, "a core that passes on neither keywords nor its mask is refused"
    mask = place.of(args, kwargs)
    if isinstance(mask, MaskWithContext):  # the loss `layers` repeats a call with the arguments of the first call
        mask = mask.mask
    args, kwargs = before_core(module, *place.put(args, kwargs, mask))
    context = {name: kwargs[name] for name in (CALL, CONTEXT, STOCK) if name in kwargs}
    return place.put(args, kwargs, MaskWithContext(mask, context))


def before_bert(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before the container of a BERT-like attention module: add the `Call` of its core."""
    return before_core(module, args, kwargs, module.self)  # type: ignore[arg-type]  # a submodule by that name


def after_core(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """After an attention module whose first output is the output of W_o: let the variants change this output.

    Raises:
        ValueError: as `after_call` says.
    """
    after_call(module, args, kwargs, output)
    call: Call | None = kwargs.get(CALL)
    swap = swap_of(module)
    if call is None or swap is None:
        return output
    x = wiring_of(swap).states.of(args, kwargs)  # a user's own hook may have changed it after `before_core`
    call.x = x.flatten(1, 2) if x.dim() == 4 else x
    if isinstance(output, Tensor):
        return _written(swap, output, call)
    return (_written(swap, output[0], call), *output[1:])


def after_call(container: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After a swapped attention: check that its output is the variant's.

    Raises:
        ValueError: the attention function was not asked with this call's context, because the model has another
            attention implementation now or a program has replaced its forward, or it was asked several times by a
            module whose input the variant reads.
    """
    call: Call | None = kwargs.get(CALL)
    if call is not None and call.used != 1:
        _check_used(container, call)


def _check_implementation(core: nn.Module) -> None:
    """Refuse a model that has another attention implementation than when it was patched.

    Raises:
        ValueError: it has.
    """
    chosen: str | None = core.config._attn_implementation  # type: ignore[assignment,union-attr]  # checked when patching
    if not accepted(chosen):
        raise ValueError(
            f"{type(core).__name__} is swapped, but the model's attention implementation is now "
            f"{chosen!r}; keep {NAME!r}, or call unpatch_model first."
        )


def _check_used(module: nn.Module, call: Call) -> None:
    """Refuse the output of an attention module that did not ask for the attention function once.

    Raises:
        ValueError: as `after_call` says.
    """
    for core in module.modules():
        if "attn_swap" in core._modules:
            _check_implementation(core)
    swaps = [submodule for submodule in module.modules() if isinstance(submodule, Swap)]
    if call.used and not any(swap.reads_input for swap in swaps):
        return  # a module may ask once for each of several packed images, if the variant needs no rows of the input
    paths = [swap.wiring.path for swap in swaps if swap.wiring is not None]
    name = type(module).__name__
    raise ValueError(
        f"{paths[0] if paths else name}: the forward of {name} asked for the attention function {call.used} times "
        "instead of once, so its output is not that of the swapped attention. Another program has probably replaced "
        "the forward by one with an attention of its own: load the model without that program, or call unpatch_model."
    )


def _written(swap: Swap, out: Tensor, call: Call) -> Tensor:
    """The swap's last step on the output (B,L,E), or on a grid of patches (B,height,width,E), row after row."""
    if out.dim() == 4:
        return swap.write(out.flatten(1, 2), call).view_as(out)
    return swap.write(out, call)


def finish(core: nn.Module, out: Tensor, x: Tensor, kwargs: dict[str, Any], dropout: nn.Module) -> Tensor:
    """Let the variants change the output (B,L,E) of W_o and dropout, inside a container that applies LayerNorm next.

    The input `x` (B,L,E) is what the forward was given: a user's own hook may have changed it after `before_core`.

    Raises:
        ValueError: as `after_call` says.
    """
    call: Call | None = kwargs.get(CALL)
    swap = swap_of(core)
    if call is None or swap is None:
        return out
    if call.used != 1:  # `after_call` comes later, and the variants need what the attention function leaves in the call
        _check_used(core, call)
    _check_implementation(core)  # ALBERT's forward is ours, and asks our function under any implementation
    call.dropout, call.x = dropout, x
    return swap.write(out, call)


def wiring_of(swap: Swap) -> Wiring:
    """The place of a swap in its model. Every swap that computes has a place."""
    assert swap.wiring is not None, "a swap computes in no model"
    return swap.wiring


def _place_in_cache(core: nn.Module, wiring: Wiring, cache: Any) -> tuple[int | None, int | Tensor]:
    """The number of this module's layer in a cache, and the number of tokens that this layer holds before this call.

    The number is None if the module works it out in each call, or takes its keys from another layer. The current tokens
    are then the last ones, after any number of others.
    A static cache counts in a tensor, and its update changes this tensor in place, so the tensor is copied here.

    Raises:
        ValueError: this architecture reads no cache, or the cache has places for later tokens and the number of the
            layer is not known.
    """
    if wiring.borrows or (wiring.cache_index is None and wiring.caches):
        if getattr(cache, "is_compileable", False):
            how = "takes its keys from another layer" if wiring.borrows else "works out in each call where its keys are"
            raise ValueError(
                f"{type(core).__name__} {how}, so it cannot be told how much of a static cache they fill; use a "
                "DynamicCache."
            )
        return None, sys.maxsize
    if wiring.cache_index is None:
        raise ValueError(
            f"{type(core).__name__} reads no cache, so keys and values before the text (a cache, or PEFT's prefix "
            "tuning) cannot be given; use another adapter, such as LoRA."
        )
    layer: int = getattr(core, wiring.cache_index)
    length: int | Tensor = cache.get_seq_length(layer)
    return layer, length.clone() if isinstance(length, Tensor) else length


def _state(
    core: nn.Module, swap: Swap, wiring: Wiring, cache: Any, layer: int, context: ForwardContext | None
) -> State | None:
    """What the cache holds of this layer in place of all keys, claimed for this call; None if it holds all keys.

    A new state is started only without gradients, and if the caller wants no attention weights. If the mask then turns
    out to be more than padding and causal order, the state gives its place up again (`compute.attend` and `replaced`).
    """
    if swap.phase != Phase.FULL or compiling():
        return None
    shown = context is not None and context.want_weights
    starts = not shown and not torch.is_grad_enabled() and not wiring.lent  # a state has no keys to lend
    state: State | None
    if swap.replaces:
        state = LinearState.of(cache, layer, start=starts)
    else:
        starts &= swap.keeps_window and kind_of_masks(core.config) in (None, OF_KEYS)  # other masks are of all keys
        state = WindowState.of(cache, layer, start=starts, span=swap.span)
    if state is not None:
        state.claim(core)
    return state


def _warn_frozen(swap: Swap) -> None:
    """Warn if all new parameters of a swap are frozen. The model trains, and no checkpoint gave them their values."""
    parameters = [] if torch.compiler.is_compiling() else swap.new_parameters()
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        warnings.warn(
            f"the new parameters of {'+'.join(swap.names)} are frozen, so they stay at their neutral start; with PEFT, "
            "pass modules_to_save=['attn_swap'].",
            stacklevel=2,
        )
