"""The class of vLLM that runs converted language models: the modules of transformers, with vLLM's attention and cache.

vLLM's own class for models of transformers builds the model by `AutoModel.from_config`, which rebuilds the swaps, and
asks for the attention function "vllm". A swapped layer gets its heads from vLLM, and changes them as it does in
transformers. What acts before the heads is done by vLLM's attention layer, where it can: a window in all heads of a
layer, and keys of a constant score and of value zero (softmax_1, sinks of kind "score"). Everything else is refused
when the model is built. docs/mathematics.md, section Sinks. Axes: H head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.swap import Swap
from ..variants.outeffhop import OutEffHop
from ..variants.sink import Sink
from ..variants.stock_form import StockForm
from ..variants.window import Window
from ..wiring import seam
from .vllm import TESTED, version

try:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    if not hasattr(TransformersForCausalLM, "recursive_replace"):
        raise AttributeError("its class for models of transformers has no method recursive_replace")
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"hf-attn-swap cannot serve by {version()}, which changed: {missing}. Install a vLLM that it was tested with "
        f'({TESTED}), or run the model by "hf-attn-swap run transformers serve FOLDER".'
    ) from missing

OWN = ".attn_swap."
ELSEWHERE = 'run the model by "hf-attn-swap run transformers serve FOLDER"'


def check(path: str, swap: Swap) -> None:
    """Refuse a swap that vLLM's attention layers cannot compute.

    Args:
        path: the path of the attention module.
        swap: its swap.

    Raises:
        ValueError: always for such a swap. The message says what to do.
    """
    if swap.strength > 0 and (problem := _problem(swap)) is not None:
        raise ValueError(f"{path}: vLLM does not run {'+'.join(swap.names)}: {problem}; or {ELSEWHERE}.")


def _problem(swap: Swap) -> str | None:
    """Why vLLM's attention layers cannot compute a swap, and what to convert to; None if they can."""
    keys, mask, normalizer = swap.at("keys"), swap.at("mask"), swap.at("normalizer")
    other = "convert to belief, belief_star, gated, outeffhop, or their compositions"
    if swap.replaces:
        return f"linear attention keeps a state, and vLLM's cache keeps keys; {other}"
    if swap.carries:
        return f"its scores go from layer to layer, and vLLM's kernels give none; {other}"
    steps = swap.at("scores"), swap.at("weights")
    if any(step is not None for step in steps) or not isinstance(normalizer, OutEffHop | None):
        return f"it needs the scores of all keys, and vLLM's kernels give none; {other}"
    if keys is not None and not (isinstance(keys, Sink) and keys.options.kind == "score"):
        return 'its pairs have keys, and vLLM has one score per head for all queries; convert to a sink of kind="score"'
    if mask is not None:
        if not isinstance(mask, Window) or mask.options.sinks or mask.options.full_heads:
            return (
                "vLLM has one window for all heads of a layer, and no first tokens; convert whole layers, with sinks=0"
            )
        if swap.strength < 1:
            return "a window of a strength below 1 needs the scores of all keys; set the strength to 1"
    return None


seam.add_engine("vllm", check)


class SwappedForCausalLM(TransformersForCausalLM):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's class for causal models of transformers, with swaps.

    Raises:
        ValueError: vLLM cannot run this model right, or not with these options. The message says what to do.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        _refuse(vllm_config)
        config = vllm_config.model_config.hf_config
        names = config.architectures
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config.architectures = names  # the model took the names of transformers, by which vLLM knows its stock classes
        self.sinks: dict[str, Tensor] = {}
        for path, core in self._swapped():
            swap = core.attn_swap
            swap.to_empty(device=vllm_config.device_config.device)  # it was built without numbers
            self._serve(path, core, swap)

    def _swapped(self) -> Iterator[tuple[str, Any]]:
        """The swapped attention modules, with their paths in this module."""
        for path, module in self.named_modules():
            if isinstance(getattr(module, "attn_swap", None), Swap):
                yield path, module

    def recursive_replace(self) -> None:
        """Replace modules by those of vLLM, but not inside of swaps, which compute in a dtype of their own."""
        swaps = [(core, core._modules.pop("attn_swap")) for _, core in self._swapped()]
        super().recursive_replace()
        for core, swap in swaps:
            core.attn_swap = swap

    def _serve(self, path: str, core: nn.Module, swap: Swap) -> None:
        """Give an attention module a layer of vLLM that computes its heads.

        Raises:
            ValueError: vLLM's layers cannot do this here.
        """
        served = [(name, child) for name, child in core.named_children() if isinstance(child, Attention)]
        if len(served) != 1 or type(served[0][1]) is not Attention:
            raise ValueError(f"{path}: {version()} has no attention layer of the kind that swaps need; {ELSEWHERE}.")
        if swap.strength == 0:
            return
        name, old = served[0]
        sink = "normalizer" in swap.changed or "keys" in swap.changed
        window = swap.at("mask")
        if not sink and window is None:
            return
        if (cap := getattr(self.text_config, "attn_logit_softcapping", None)) is not None:
            raise ValueError(
                f"{path}: vLLM does not run {'+'.join(swap.names)} with a soft cap of scores ({cap}); {ELSEWHERE}."
            )
        windows = [old.sliding_window, *([window.options.window] if isinstance(window, Window) else [])]
        given: dict[str, Any] = {}
        if sink:
            self.sinks[path] = given["sinks"] = torch.zeros(old.num_heads)
        del self.compilation_config.static_forward_context[old.layer_name]
        try:
            layer = Attention(
                num_heads=old.num_heads,
                head_size=old.head_size,
                scale=old.impl.scale * swap.sharpness,
                num_kv_heads=old.num_kv_heads,
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                per_layer_sliding_window=min((size for size in windows if size is not None), default=None),
                prefix=old.layer_name,
                **given,
            )
        except (ValueError, TypeError, NotImplementedError, AssertionError) as problem:
            raise ValueError(
                f"{path}: no attention of {version()} on this device runs {'+'.join(swap.names)} ({problem}); a stock "
                'model that computes the same is written by "hf-attn-swap export FOLDER OUT".'
            ) from problem
        setattr(core, name, layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of a checkpoint, and exactly those of its swaps.

        Raises:
            ValueError: weights of swaps are missing, left over or of another shape.
        """
        own: dict[str, dict[str, Tensor]] = {}
        loaded: set[str] = super().load_weights(_others(weights, own))
        for path, core in self._swapped():
            swap = core.attn_swap
            inside = path.removeprefix("model")  # a checkpoint has the model's own name there, or none
            saved = [name for name in own if f".{name}".endswith(inside)]
            state = own.pop(saved[0]) if len(saved) == 1 else {}
            try:
                swap.load_state_dict(state)
            except RuntimeError as problem:
                raise ValueError(f"{path}: the weights of its swap cannot be loaded: {problem}") from problem
            swap.fresh = False
            swap.refill()
            if path in self.sinks:
                self.sinks[path].copy_(constant_score(swap))
            loaded |= {f"{path}{OWN}{name}" for name, _ in swap.named_parameters()}
        if own:
            raise ValueError(f"weights of swaps that the config does not describe: {', '.join(sorted(own))}.")
        return loaded


def constant_score(swap: Swap) -> Tensor:
    """The score (H,) of a key of value zero that stands for a swap's normalizer and sink."""
    sinks = [variant for variant in swap.variants if not {"keys", "normalizer"}.isdisjoint(variant.changes)]
    score = reduce(StockForm.with_sink_of, (variant.stock_form(swap.strength) for variant in sinks)).score
    assert score is not None, "such variants have a score"
    return score


def _others(weights: Iterable[tuple[str, Tensor]], own: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights that belong to no swap. Those of swaps go into `own`, by the path of the attention module."""
    for name, weight in weights:
        path, own_part, rest = name.partition(OWN)
        if own_part:
            own.setdefault(path, {})[rest] = weight
        else:
            yield name, weight


def _refuse(vllm_config: Any) -> None:
    """Refuse options of vLLM under which a swap would be wrong.

    Raises:
        ValueError: there is such an option.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "a swap needs all heads and layers in one process; serve a converted model without tensor and pipeline "
            "parallelism (--data-parallel-size splits the requests)."
        )
    if model.is_moe:
        raise ValueError(f"vLLM does not run a converted model with a mixture of experts; {ELSEWHERE}.")
    if vllm_config.quant_config is not None:
        raise ValueError(f"vLLM does not run a converted model with weights in 8 bits; {ELSEWHERE}.")
