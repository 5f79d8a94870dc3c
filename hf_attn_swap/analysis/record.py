"""Records diagnostics while a model runs, in bounded memory, without a change to the model's output.

Hooks on modules read the activations. Attention weights are computed beside the model's own attention, from the same
inputs, by the readable formulas. The recording keeps numbers per sample, layer and head, and no activations.
Axes: B batch, T token, E feature, H head, Q query, K key.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import ForwardContext
from ..families import Site, sites
from ..layer.swap import Swap
from ..measuring.batches import MASKS
from ..measuring.instrumented import instrumented
from ..wiring.layers import layers_at
from ..wiring.placed import layer_of
from . import metrics
from .recording import Activation, Layer, Recording

# The modules that OutEffHop's figures read, by family. For a family that is not named here: every linear map and norm
# of the layers.
OUTLIERS = {
    "bert": r"encoder\.layer\.\d+\..*output\.(dense|LayerNorm)$",
    "opt": r"(final_layer_norm|self_attn_layer_norm|fc2|out_proj|decoder\.layers\.\d+)$",
    "vit": r"^(?!.*(dropout|attention\.attention$)).+",
}
KINDS = ("Linear", "Conv1D", "Norm")


@contextlib.contextmanager
def record(model: nn.Module, *, sink_ids: Collection[int] = (), modules: str | None = None) -> Iterator[Recording]:
    """Record every call of a transformers model, swapped or stock, inside the `with` block; calls of `generate` too.

    Args:
        model: a `PreTrainedModel`, or a wrapper that holds one.
        sink_ids: ids of tokens that count as sinks besides the first real token, such as separators.
        modules: regular expression of the paths of the modules whose kurtosis and maximum are recorded; None takes the
            modules of `OUTLIERS` for this family.

    Yields:
        The recording, which grows with every call.

    Raises:
        ValueError: `model` is not a transformers model, nothing in the model can be recorded, or an activation is not
            finite.
    """
    recording = Recording()
    with instrumented(model) as root, contextlib.ExitStack() as hooks:
        Recorder(root, recording, sink_ids).hook(hooks, modules)
        yield recording


class Recorder:
    """The hooks of one recording. The state of a pass is kept here, and not on the model's modules.

    Args:
        root: the transformers model.
        recording: what grows.
        sink_ids: as in `record`.
        finite: refuse activations that are not finite.
    """

    def __init__(self, root: Any, recording: Recording, sink_ids: Collection[int] = (), *, finite: bool = True) -> None:
        self.root, self.recording, self.sink_ids, self.finite = root, recording, tuple(sink_ids), finite
        self.mask: Tensor | None = None
        self.ids: Tensor | None = None
        self.calls: dict[str, int] = {}
        self.inputs: dict[str, Tensor] = {}

    def hook_activations(self, hooks: contextlib.ExitStack, modules: str | None) -> None:
        """Place the hooks that record kurtosis and maximum."""
        hooks.callback(self.root.register_forward_pre_hook(self._start, with_kwargs=True).remove)
        for path in self._outliers([layer.site for layer in layers_at(sites(self.root))], modules):
            hooks.callback(self.root.get_submodule(path).register_forward_hook(self._activation(path)).remove)

    def hook(self, hooks: contextlib.ExitStack, modules: str | None) -> None:
        """Place every hook."""
        self.hook_activations(hooks, modules)
        for layer in layers_at(sites(self.root)):
            site = layer.site
            name = "" if site.family.shared else str(layer.number)
            for swap in layer.copies:  # PEFT runs one of them
                hooks.callback(swap.register_forward_pre_hook(self._weights(name)).remove)
            block = layer_of(self.root, site.path)
            hooks.callback(block.register_forward_hook(self._states(name)).remove)
            self._hook_update(site, name, hooks)

    def _outliers(self, usable: list[Site], modules: str | None) -> list[str]:
        pattern = modules if modules is not None else OUTLIERS.get(usable[0].family.name)
        named = [(path, module) for path, module in self.root.named_modules() if path and "attn_swap" not in path]
        if pattern is not None:
            paths = [path for path, _ in named if re.search(pattern, path)]
        else:
            blocks = tuple({site.path.rpartition(".")[0] for site in usable})
            paths = [p for p, m in named if p.startswith(blocks) or type(m).__name__.endswith(KINDS)]
        if not paths:
            raise ValueError(f"no module of {type(self.root).__name__} matches {pattern!r}; nothing would be recorded.")
        return paths

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks = (kwargs.get(name) for name in MASKS)
        self.mask = next((mask for mask in masks if isinstance(mask, Tensor) and mask.dim() == 2), None)
        self.ids = kwargs.get("input_ids", args[0] if args and isinstance(args[0], Tensor) else None)
        self.calls.clear()

    def _layer(self, kind: str, name: str) -> Layer:
        """A layer by its place in the pass: its number, or the number of earlier calls of a shared module."""
        if not name:
            self.calls[kind] = self.calls.get(kind, -1) + 1
        return self.recording.layers.setdefault(int(name or self.calls[kind]), Layer())

    def _real(self, tokens_BT: Tensor) -> Tensor:
        """True for real tokens, (B,T). With a cache, the current tokens are the last ones of the mask."""
        batch, length = tokens_BT.shape[:2]
        if self.mask is None or self.mask.shape[0] != batch or self.mask.shape[1] < length:
            return torch.ones(batch, length, dtype=torch.bool, device=tokens_BT.device)
        return self.mask[:, -length:].to(tokens_BT.device).bool()

    def _activation(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not isinstance(value, Tensor) or value.dim() != 3:
                return
            if self.finite:
                _finite(value, path)
            rows = self._real(value)
            kept = rows.any(1)
            activation = self.recording.activations.setdefault(path, Activation())
            activation.kurtosis += metrics.kurtosis(value[kept].detach(), rows[kept]).tolist()
            activation.max_inf_norm += metrics.max_inf_norm(value[kept].detach(), rows[kept]).tolist()

        return hook

    def _states(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if states.dim() == 4:  # a model of time series gives (B,C,T,E): each channel counts as a sample
                states = states.flatten(0, 1)
            _finite(states, type(module).__name__)
            layer, real = self._layer("states", name), self._real(states)
            several = real.sum(1) > 1
            if name in ("0", "") and self.calls.get("states", 0) == 0:
                self.recording.samples += len(states)
            ids = None if self.root.config.is_encoder_decoder else self.ids
            layer.largest = layer.largest.or_larger(states, real, ids)
            if several.any():
                chosen = states[several].detach()
                layer.similarity += metrics.token_similarity(chosen, real[several]).tolist()
                for cosines in metrics.pair_cosines(chosen, real[several]):
                    layer.pairs.add(cosines)
                layer.residual += metrics.residual_ratio(chosen, real[several]).tolist()

        return hook

    def _weights(self, name: str) -> Any:
        @torch.no_grad()
        def hook(swap: Swap, args: tuple[Any, ...]) -> None:
            inputs, call, sdpa, _ = args
            if call.state is not None and call.state.get_seq_length() > 0:
                return  # linear attention has not kept the earlier keys, and its products are not probabilities
            second = copy.copy(call)  # the model's own attention reads the first one
            second.kept, second.state = None, None
            if call.context is not None:
                scores = {order: value.clone() for order, value in call.context.scores.items()}
                second.context = ForwardContext(scores=scores, raw=dict(call.context.raw))
            weights = swap.forward(inputs, second, sdpa, True)[1]
            layer = self._layer("weights", name)
            if weights is None:
                return
            real = self._real(call.x)
            entropy = metrics.attention_entropy(weights)
            if swap.replaces:
                # The weights of linear attention are products and not probabilities.
                entropy = torch.full_like(entropy, float("nan"))
            layer.entropy.add(entropy.transpose(1, 2)[real])
            layer.entropies.add(entropy.transpose(1, 2)[real])
            layer.sinks.add(metrics.sink_mass(weights, self._sinks(weights)).transpose(1, 2)[real])

        return hook

    def _sinks(self, weights_BHQK: Tensor) -> Tensor:
        """True for sinks, (B,K): the first real key, and separators."""
        batch, keys = weights_BHQK.shape[0], weights_BHQK.shape[3]
        sinks = torch.zeros(batch, keys, dtype=torch.bool, device=weights_BHQK.device)
        if self.mask is not None and self.mask.shape == sinks.shape:
            first = self.mask.to(sinks.device).int().argmax(1)
            sinks[torch.arange(batch, device=sinks.device), first] = True
        else:
            sinks[:, 0] = True
        if self.ids is not None and self.ids.shape == sinks.shape and self.sink_ids:
            sinks |= torch.isin(self.ids, torch.tensor(self.sink_ids, device=self.ids.device)).to(sinks.device)
        return sinks

    def _hook_update(self, site: Site, name: str, hooks: contextlib.ExitStack) -> None:
        if site.family.output is None:
            return

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.inputs[site.path] = site.input(args, kwargs).detach()

        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            layer = self._layer("update", name)
            norm, angle = metrics.update_geometry(self.inputs[site.path], output.detach(), self._real(output))
            layer.update_norm.add(norm)
            layer.update_angle.add(angle)

        hooks.callback(site.container.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(site.container.get_submodule(site.family.output).register_forward_hook(after).remove)


def _finite(value: Tensor, where: str) -> None:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{where}: activations are not finite; check the weights, the inputs and the dtype (fp16).")
