"""Static W8A8 as the outlier papers run it: fake quantisation, fitted after training.

Weights: symmetric per tensor, step max|w| / 127. Activations: asymmetric per tensor, 8 bits over a range that holds 0,
a running mean of each batch's minimum and maximum with momentum 0.9. Quantised: weights and outputs of projections,
norms and embeddings, residual sums (what a norm reads), scores before the mask, probabilities, heads. Not quantised:
biases, masks, task heads, gates. Bondarenko et al. (2023); OutEffHop (Hu et al., 2024), section 4;
docs/mathematics.md, section Quantisation to 8 bits.
Axes: B batch, H head, Q query, K key, D head width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..analysis.watched import watched
from ..conversion.batches import as_batches, forward
from ..core.swap import Phase, Swap
from ..families import sites
from .places import is_matmul, is_norm, quantizable
from .points import Point, Quantized


@contextlib.contextmanager
def fake_w8a8(model: nn.Module, batches: Iterable[Mapping[str, Any]], *, momentum: float = 0.9) -> Iterator[Quantized]:
    """Inside, the model computes with 8-bit weights and activations in fake quantisation; afterwards it is as before.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in evaluation; only the part without its task head is quantised.
        batches: of training data; labels are ignored.
        momentum: of the running ranges.

    Yields:
        The ranges, and the share of matmul FLOPs covered.

    Raises:
        ValueError: no batch, a model in training, gradients, or activations that are not finite.
    """
    if model.training:
        raise ValueError("8-bit ranges are fitted in evaluation; call model.eval() first.")
    with watched(model) as root, contextlib.ExitStack() as stack:
        quantizer = _Quantizer(root, momentum)
        quantizer.place(stack)
        for batch in tqdm(as_batches(batches), desc="8-bit ranges", unit="batch", leave=False):
            forward(root, batch)
        quantizer.fitting = False
        yield Quantized(tuple(quantizer.points.values()), quantizer.covered())


class _Quantizer:
    """The hooks of one quantised model, their ranges, and the FLOPs they saw."""

    def __init__(self, root: Any, momentum: float) -> None:
        self.root, self.momentum, self.fitting = root, momentum, True
        self.points: dict[str, Point] = {}
        self.calls: dict[str, int] = {}  # of this pass: a module that serves several layers has a range in each
        self.flops = {"covered": 0.0, "rest": 0.0}

    def place(self, stack: contextlib.ExitStack) -> None:
        """Put rounded weights and all hooks in place; the stack takes them out."""
        chosen = dict(quantizable(self.root))
        stack.callback(self.root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for path, module in chosen.items():
            self._weight(path, module, stack)
            if is_norm(module):
                stack.callback(module.register_forward_pre_hook(self._input(path)).remove)
            stack.callback(module.register_forward_hook(self._output(path)).remove)
        for path, module in self.root.named_modules():
            if is_matmul(module) and path not in chosen:
                stack.callback(module.register_forward_hook(self._uncovered).remove)
        for site in (site for site in sites(self.root) if site.usable):
            rotary = getattr(getattr(site.core, "config", None), "rope_parameters", None) is not None
            for swap in (module for module in site.core.modules() if isinstance(module, Swap)):  # PEFT keeps two
                stack.callback(swap.register_forward_pre_hook(self._attention(site.path, rotary)).remove)

    def covered(self) -> float:
        """Share of the matmul FLOPs."""
        return self.flops["covered"] / (self.flops["covered"] + self.flops["rest"])

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.calls.clear()
        own = kwargs.get("inputs_embeds")  # the first norm may read these, and what it reads is rounded in place
        return args, kwargs if own is None else {**kwargs, "inputs_embeds": own.clone()}

    def _round(self, name: str, tensor: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("a model in fake 8 bits is for evaluation; call it under torch.no_grad().")
        self.calls[name] = self.calls.get(name, 0) + 1
        name = name if self.calls[name] == 1 else f"{name}, call {self.calls[name]}"
        point = self.points.setdefault(name, Point(name))
        if self.fitting:
            point.observe(tensor, self.momentum)
        elif not point.seen:
            raise ValueError(f"{name} has no 8-bit range: no batch reached it; call the model as the batches did.")
        rounded = point.apply(tensor)
        if self.fitting:
            point.compare(tensor, rounded)
        return rounded

    def _weight(self, path: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        weight = module.weight
        if not isinstance(weight, nn.Parameter):
            return  # a norm without parameters
        with torch.no_grad():
            end = float(weight.abs().max())
            if not math.isfinite(end):
                raise ValueError(f"{path}.weight is not finite; check the checkpoint.")
            point = Point(f"{path}.weight", low=-128 / 127 * end, high=end, seen=True)
            rounded = point.apply(weight)
            point.compare(weight, rounded)
        self.points[point.name] = point
        module.weight = nn.Parameter(rounded, requires_grad=False)  # a tied head keeps its own
        stack.callback(setattr, module, "weight", weight)

    def _input(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].copy_(self._round(f"{path}.input", args[0]))  # the residual stream goes on with the rounded sum

        return hook

    def _output(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self._count("covered", module, output)
            return self._round(f"{path}.output", output)

        return hook

    def _uncovered(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._count("rest", module, output)

    def _count(self, which: str, module: nn.Module, output: Tensor) -> None:
        if self.fitting and is_matmul(module):
            assert isinstance(module.weight, Tensor)
            per_row = module.weight.numel() / (1 if isinstance(module, nn.Conv2d) else output.shape[-1])
            rows = output.numel() / (output.shape[1] if isinstance(module, nn.Conv2d) else 1)
            self.flops[which] += 2 * per_row * rows

    def _attention(self, path: str, rotary: bool) -> Any:
        def hook(swap: Swap, args: tuple[Any, ...]) -> None:
            inputs, call = args[:2]
            if rotary:
                inputs.query = self._round(f"{path}.query", inputs.query)
                inputs.key = self._round(f"{path}.key", inputs.key)
            call.tap = lambda name, tensor: self._round(f"{path}.{name}", tensor)
            if self.fitting:
                self._count_attention(swap, inputs.query.shape, inputs.key.shape[2])

        return hook

    def _count_attention(self, swap: Swap, query_BHQD: torch.Size, keys: int) -> None:
        """Scores and heads; of a linear attention q (k^T v), whose k^T v has 8-bit factors but is itself none."""
        batch, heads, queries, width = query_BHQD
        linear = swap.places().replacement is not None
        product = 2 * batch * heads * queries * width
        self.flops["covered"] += product * (width if linear else 2 * keys)
        if linear:
            self.flops["rest"] += product * width
        if linear and swap.phase != Phase.FULL:  # the ordinary attention beside it runs fused, in full precision
            self.flops["rest"] += 2 * product * keys
