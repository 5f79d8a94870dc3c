"""Fit a swapped attention's read-out to the one its weights were trained with, head by head, by least squares.

gain: g_h = <A_h, R_h> / <A_h, A_h>; map: [M_h; b_h] = argmin ||A_h M_h + b_h - R_h||^2, A the variant's heads at
strength 1, R the target's, on the same input. Normal equations in fp64; padding is left out.
Every layer reads the original's stream, so that one pass fits them all. Fitting in order, each layer on what the fitted
layers below give, takes a pass per layer and gave MiniLM the same: squared error of its last hidden states 0.463
against 0.445 in one pass (simple_resl), 0.171 against 0.178 (mha), 0.106 against 0.116 (belief).
Ours; the gain is SimpleTRON's missing scale (no paper). Axes: B batch, L token, H head, D head width, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..core.calibration import check_fit
from ..core.call import Call
from ..core.registry import parse, parse_options
from ..patch import build_swap, need_installation, swappable
from ..wiring.install import Installation
from .batches import Batch, as_batches, forward, token_mask
from .moments import Moments
from .report import CalibrationReport, LayerFit
from .target import Target

RIDGE = 1e-4


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    fit: str = "map",
    ridge: float = RIDGE,
    source: str = "softmax",
    progress: bool = True,
    **options: Any,
) -> CalibrationReport:
    """Fit every swapped layer's read-out to the attention its weights come from, in place; nothing is trained.

    In a post-LayerNorm block (BERT, ALBERT) a skip inside the variant (`simple_resl`, `mha`) is undone by fitting to a
    multiple of the target: LayerNorm removes the common factor. In a pre-norm block it stays, and the report says so.
    What suits `simple*` depends on the length: calibrate at the length of use. An earlier calibration is replaced.

    Args:
        model: patched by `patch_model`; its strength may be anything and stays.
        batches: dicts as the model takes them, read once; a few thousand tokens do, a 2-D mask marks the real ones.
        fit: "gain", one number per head, or "map", a D x D matrix and a bias per head.
        ridge: added to the normal equations, as a share of the mean square of the variant's heads.
        source: the attention that the weights were trained with, such as "simple_resl" for a model that was
            converted, fine-tuned and is now patched with "softmax"; it may have no parameters of its own.
        progress: show a progress bar.
        options: of `source`.

    Returns:
        R^2 per layer and head before and after, the fitted gains, and the lengths seen.

    Raises:
        ValueError: the model is not patched or has merged layers, no batch or too few real tokens, an unknown fit or
            source, or activations that are not finite. The model is unchanged then.
    """
    check_fit(fit)
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge!r}.")
    installation = need_installation(model)
    targets = _targets(installation, source, options, constant=fit == "map")
    fittings = {index: _Fitting(target, Moments(target.swap.geometry, fit)) for index, target in targets.items()}
    lengths: list[Tensor] = []
    with _source_in_place(model, installation, targets):
        for batch in tqdm(as_batches(batches), desc="calibrate", unit="batch", disable=not progress):
            with contextlib.ExitStack() as hooked:
                for fitting in fittings.values():
                    fitting.hook(batch, lengths, hooked)
                forward(model, batch)
        solved = {index: fitting.solve(ridge, index) for index, fitting in fittings.items()}
        layers = tuple(fittings[index].apply(*solution, index) for index, solution in solved.items())
    seen, left = torch.cat(lengths).aminmax(), max((target.left for target in targets.values()), key=abs)
    return CalibrationReport(fit=fit, source=source, layers=layers, lengths=(int(seen[0]), int(seen[1])), left=left)


@dataclass
class _Fitting:
    """One layer while it is fitted."""

    target: Target
    moments: Moments

    def hook(self, batch: Batch, lengths: list[Tensor], hooked: contextlib.ExitStack) -> None:
        """Count the layer's tokens in the next forward pass of the source, whose layers stand in the model."""

        def collect(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inputs, call, sdpa, _ = args
            swap = self.target.swap
            own = Call(x=call.x, start=call.start, carried=call.carried, order=swap.place_in(call.carried))
            heads = swap(inputs, own, sdpa, False)[0]
            real = token_mask(batch, heads)
            self.moments.add(heads[real], self.target.wanted(output[0])[real])
            lengths.append(real.sum(1).cpu())

        hooked.callback(self.target.source.register_forward_hook(collect).remove)

    def solve(self, ridge: float, index: int) -> tuple[Tensor, Tensor | None]:
        """The fit, without touching the layer yet."""
        return self.moments.solve(ridge, f"layer {index} ({self.target.site.path})")

    def apply(self, weight: Tensor, bias: Tensor | None, index: int) -> LayerFit:
        """Put the fit into the layer."""
        calibration = self.target.swap.calibrate(self.moments.fit, self.target.like)
        with torch.no_grad():
            calibration.weight.copy_(weight.to(calibration.weight.dtype))  # before it leaves the CPU: see `Moments`
            if bias is not None:
                calibration.bias.copy_(bias.to(calibration.bias.dtype))
        before, after = self.moments.r_squared(weight, bias)
        return LayerFit(
            layer=index,
            module=self.target.site.path,
            before=before,
            after=after,
            gains=tuple(weight.tolist()) if bias is None else None,
            tokens=self.moments.rows,
        )


def _targets(installation: Installation, source: str, options: dict[str, Any], *, constant: bool) -> dict[int, Target]:
    """By layer number, in the order in which they are called."""
    classes = parse(source)
    chosen = parse_options(classes, options)
    usable = swappable(installation.root)
    targets = {}
    for index, swaps in installation.swaps().items():
        site, swap = usable[index], swaps[0]
        if len(swaps) > 1:
            raise ValueError("PEFT holds copies of the swaps (modules_to_save); calibrate before adding adapters.")
        if swap.merged is not None:
            raise ValueError(f"layer {index}: its calibration was merged into the weights; load the unmerged model.")
        original = build_swap(site, classes, chosen, index)
        if original.carries or any(True for _ in original.parameters()):
            raise ValueError(f"source={source!r} has parameters or scores of its own, which this model does not hold.")
        targets[index] = Target(site, swap, original, constant)
    return targets


@contextlib.contextmanager
def _source_in_place(model: nn.Module, installation: Installation, targets: dict[int, Target]) -> Iterator[None]:
    """The model in evaluation with its source's attention; inside, the swaps are at strength 1 and not calibrated.

    Afterwards it is as it was, with the old calibrations if something failed.
    """
    training = [module for module in model.modules() if module.training]
    before = [(target.swap, target.swap.strength, target.swap.calibration) for target in targets.values()]
    try:
        model.eval()
        with installation.temporarily({index: target.source for index, target in targets.items()}):
            for swap, _, _ in before:
                swap.calibration = None
                swap.set_strength(1.0)
            try:
                yield
            finally:
                for swap, strength, _ in before:
                    swap.strength = strength
    except BaseException:
        for swap, _, calibration in before:
            swap.calibration = calibration
        installation.refresh()
        raise
    finally:
        for module in training:
            module.training = True
