"""Fit a swapped attention's read-out to the one its weights were trained with, layer by layer, by least squares.

gain: g_h = <A_h, R_h> / <A_h, A_h>; map: [M_h; b_h] = argmin ||A_h M_h + b_h - R_h||^2, A the variant's heads at
strength 1, R the target's, on the same input. Normal equations in fp64; padding is left out.
Ours; the gain is SimpleTRON's missing scale (no paper). Axes: B batch, L token, H head, D head width, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..calibration import check_fit
from ..install import Installation
from ..patch import build_swap, need_installation, swappable
from ..registry import parse, parse_options
from .batches import Batch, as_batches, forward, token_mask
from .moments import Moments
from .report import CalibrationReport, LayerFit
from .target import Target

RIDGE = 1e-4


class _Enough(Exception):  # noqa: N818  # not an error: it ends a forward pass whose rest nobody needs
    """The layer that is being fitted has been read."""


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

    Layers are fitted in order, each on what the layers below, swapped and fitted, hand it. In a post-LayerNorm block
    (BERT, ALBERT) a skip inside the variant (`simple_resl`, `mha`) is undone by fitting to a multiple of the target:
    LayerNorm removes the common factor. Calibrate on text of the length of use: gains of `simple*` depend on it.

    Args:
        model: patched by `patch_model`; the strength may be anything and stays.
        batches: dicts as the model takes them (a `DataLoader`, a list), a few hundred tokens or more; a 2-D
            `attention_mask` marks the real tokens. They are read once per layer.
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
    read = as_batches(batches)
    installation = need_installation(model)
    targets = _targets(installation, source, options)
    fits, lengths = [], list[Tensor]()
    with (
        _ready(model, installation),
        tqdm(total=len(targets) * len(read), desc="calibrate", unit="batch", disable=not progress) as bar,
    ):
        for index, target in targets.items():
            fits.append(_fit_layer(model, read, target, index, (fit, ridge), lengths, bar))
    seen = torch.cat(lengths)
    return CalibrationReport(fit=fit, source=source, layers=tuple(fits), lengths=(int(seen.min()), int(seen.max())))


def _fit_layer(
    model: nn.Module,
    batches: list[Batch],
    target: Target,
    index: int,
    how: tuple[str, float],
    lengths: list[Tensor],
    bar: Any,
) -> LayerFit:
    swap, shared = target.swap, target.site.family.shared
    moments = Moments(swap.geometry, how[0])
    swap.calibration = None
    for batch in batches:

        def collect(module: nn.Module, args: tuple[Any, ...], output: Any, batch: Batch = batch) -> Any:
            inputs, call, sdpa, _ = args
            ordinary, wanted = target(inputs, call, sdpa)
            real = token_mask(batch, output[0])
            lengths.append(real.sum(1).cpu())
            moments.add(output[0][real], wanted[real])
            if not shared:
                raise _Enough
            call.ordinary = True  # later calls of the same module must not read what is not fitted yet
            return ordinary, output[1]

        handle = swap.register_forward_hook(collect)
        try:
            forward(model, batch)
        except _Enough:
            pass
        finally:
            handle.remove()
        bar.update()
    weight, bias = moments.solve(how[1], f"layer {index} ({target.site.path})")
    calibration = swap.calibrate(how[0], target.like)
    with torch.no_grad():
        calibration.weight.copy_(weight)
        if bias is not None:
            calibration.bias.copy_(bias)
    before, after = moments.r_squared(weight, bias)
    gains = tuple(weight.tolist()) if bias is None else None
    return LayerFit(layer=index, module=target.site.path, before=before, after=after, gains=gains, tokens=moments.rows)


def _targets(installation: Installation, source: str, options: dict[str, Any]) -> dict[int, Target]:
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
        targets[index] = Target(site, swap, original)
    return targets


@contextlib.contextmanager
def _ready(model: nn.Module, installation: Installation) -> Iterator[None]:
    """In evaluation and at strength 1; afterwards as it was, with the old calibrations if something failed."""
    training = [module for module in model.modules() if module.training]
    swaps = [swap for group in installation.swaps().values() for swap in group]
    before = [(swap, swap.strength, swap.calibration) for swap in swaps]
    try:
        model.eval()
        for swap in swaps:
            swap.strength = 1.0
        installation.refresh()
        yield
    except BaseException:
        for swap, _, calibration in before:
            swap.calibration = calibration
        raise
    finally:
        for swap, strength, _ in before:
            swap.strength = strength
        installation.refresh()
        for module in training:
            module.training = True
