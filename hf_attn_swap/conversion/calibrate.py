"""Fits the heads of a swapped attention to the heads of the attention that its weights were trained with.

A are the variant's heads at strength 1, and R are the target's heads on the same input. Each head is fitted by least
squares, in one of two ways:

    gain:  g_h = <A_h, R_h> / <A_h, A_h>
    map:   [M_h; b_h] = argmin ||A_h M_h + b_h - R_h||^2

The normal equations are summed in fp64, and padding is left out. Every layer reads the activations of the original
model, so one pass over the batches fits all layers. The alternative is to fit the layers in order, each on the output
of the fitted layers below. That takes a pass per layer, and it was not better on MiniLM. The squared error of the last
hidden states, in order and in one pass: 0.463 and 0.445 (simpletron_resl), 0.171 and 0.178 (modern_hopfield), 0.106 and
0.116 (belief).
The method is this package's own; docs/mathematics.md, section Calibration. The gain supplies the scale that SimpleTRON
leaves out. Axes: B batch, L token, H head, D head width, E model width.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import NORMALIZED, Call
from ..layer.calibration import Calibration, check_fit
from ..layer.registry import parse, parse_options
from ..layer.swap import Phase
from ..measuring.batches import Batch, as_batches, forward, read_by, refuse_other_tokens, token_mask
from ..patch import build_swap, need_installation
from ..text.bar import bar
from ..wiring.install import Installation
from .cut import Share
from .heads import first_rows, match_heads
from .moments import Moments
from .neutral import neutral_start
from .report import CalibrationReport, LayerFit
from .target import Target
from .value_scale import scale_values

RIDGE = 1e-4
LARGEST_CUT = 0.1  # of a layer's attention; a warning follows above


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    fit: str = "map",
    ridge: float = RIDGE,
    source: str = "softmax",
    neutral: bool = True,
    match: bool = True,
    scale: bool = True,
    progress: bool = True,
    **options: Any,
) -> CalibrationReport:
    """Fit the heads of every swapped layer to the attention that the weights were trained with, in place.

    Nothing is trained. A new calibration replaces an earlier calibration. docs/mathematics.md, section Calibration.

    `simpletron_resl` and `modern_hopfield` add a multiple of the layer's input to its output (a skip). In a
    post-LayerNorm block (BERT, ALBERT) the fit undoes this skip: the target is multiplied by a factor, and LayerNorm
    removes the factor. In a pre-norm block no fit can undo the skip, so a neutral start comes first; the report says
    what it left. The heads of `simpletron*` grow with the number of tokens, so calibrate at the length at which you use
    the model.

    Args:
        model: a model that `patch_model` has patched, at any strength; the strength does not change.
        batches: dicts of tensors as the model takes them. They are read once. A few thousand tokens are enough. Where
            there is padding, a 2-D attention mask (B,L) marks the real tokens.
        fit: "gain" fits one number per head; "map" fits a (D,D) matrix and a bias (D,) per head.
        ridge: the penalty on large values, as a share of the mean square of the variant's heads.
        source: the attention that the weights were trained with. It is "simpletron_resl", for example, for a model that
            was fine-tuned with "simpletron_resl" and is now patched with "softmax". The source must have no parameters.
        neutral: let the skip of pre-norm layers start at almost nothing first, as `neutral_start` does. Layers whose
            norm has no free scale are left alone, and so are all layers if the source has a skip too.
        match: let the heads of a variant that carries scores (`modern_hopfield`) first meet the carried scores that
            are most like their own, as `match_heads` does, on the first batches. If the source is not "softmax", they
            stay as they are, and so does every head with `match=False`.
        scale: first choose the scale of the values of a variant that projects on values (`belief`), as `scale_values`
            does, on the first batches. If the source is not "softmax", the scales stay as they are.
        progress: show a progress bar.
        options: the options of `source`.

    Returns:
        R^2 per layer and head before and after the fit, the fitted gains, the share of the attention that a variant
        such as `clipped_softmax` cuts away, and the shortest and longest row in tokens. A warning says so if this share
        is above a tenth in a layer.

    Raises:
        ValueError: the model is not patched or has merged layers, there is no batch, there are too few real tokens, the
            fit or the source is unknown, or activations are not finite. The model is unchanged after an error.
        ImportError: heads are to be matched, and SciPy is missing.
    """
    check_fit(fit)
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge!r}.")
    installation = need_installation(model)
    targets = _targets(installation, source, options, constant=fit == "map")
    found = as_batches(batches)
    with _undone_after_an_error(installation):
        if neutral and _new_skip(targets):
            first = next(found)
            found = itertools.chain([first], found)
            neutral_start(model, first)
        if match and source == "softmax" and any(target.swap.carries for target in targets):
            some = list(first_rows(found))
            found = itertools.chain(some, found)
            match_heads(model, some, progress=False)
        if scale and source == "softmax" and any(target.swap.projects for target in targets):
            read: list[Batch] = []
            scale_values(model, _noted(found, read), progress=progress)
            found = itertools.chain(read, found)
        return _fit(model, installation, targets, found, fit=fit, ridge=ridge, source=source, progress=progress)


def _fit(
    model: nn.Module,
    installation: Installation,
    targets: Sequence[Target],
    batches: Iterator[Batch],
    *,
    fit: str,
    ridge: float,
    source: str,
    progress: bool,
) -> CalibrationReport:
    """Fit every layer to its target, as `calibrate` does."""
    fittings = [_Fitting(target, Moments(target.swap.geometry, fit)) for target in targets]
    lengths: list[Tensor] = []
    with _source_in_place(model, installation, targets):
        cores = [target.site.core for target in targets]
        for batch in bar(batches, desc="calibrate", unit="batch", shown=progress):
            refuse_other_tokens(installation.root, cores, batch)
            with contextlib.ExitStack() as hooked:
                for fitting in fittings:
                    fitting.hook(batch, lengths, hooked)
                forward(model, batch)
        solved = [fitting.solve(ridge) for fitting in fittings]
        layers = tuple(fitting.apply(*solution) for fitting, solution in zip(fittings, solved, strict=True))
    shortest, longest = torch.cat(lengths).aminmax()
    left = max((target.left for target in targets), key=abs)
    report = CalibrationReport(
        fit=fit,
        source=source,
        layers=layers,
        lengths=(int(shortest), int(longest)),
        left=left,
    )
    if max(layer.cut or 0.0 for layer in report.layers) > LARGEST_CUT:
        warnings.warn(
            f"{report.cut_words} The heads lose what these weights read; patch the model with a gamma closer to 0, "
            "such as hf_attn_swap.conversion.choose_gamma finds for these batches.",
            stacklevel=2,
        )
    return report


def _noted(batches: Iterator[Batch], read: list[Batch]) -> Iterator[Batch]:
    """The same batches; those that were read are added to a list."""
    for batch in batches:
        read.append(batch)
        yield batch


def _new_skip(targets: Sequence[Target]) -> bool:
    """True if a layer adds its input, and the attention that the weights were trained with did not."""
    return any(target.swap.adds_input and not target.source.adds_input for target in targets)


@contextlib.contextmanager
def _undone_after_an_error(installation: Installation) -> Iterator[None]:
    """If an error is raised inside, every layer has the fits of before."""
    before = [(swap, swap.fitted) for layer in installation.layers() for swap in layer.copies]
    try:
        yield
    except BaseException:
        for swap, fitted in before:
            swap.restore(fitted)
        installation.refresh()
        raise


@dataclass
class _Fitting:
    """The fit of one layer: its target, the sums of products so far, and what the variant cuts of the attention."""

    target: Target
    moments: Moments
    cut: Share = field(default_factory=Share)

    def hook(self, batch: Batch, lengths: list[Tensor], hooked: contextlib.ExitStack) -> None:
        """Add the tokens of the next forward pass to the sums. During that pass the source's swap is in the model."""
        batch = read_by(self.target.site.core, batch)

        def collect(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inputs, call, sdpa, _ = args
            swap = self.target.swap
            order = swap.place_in(call.context)
            own = Call(x=call.x, start=call.start, context=call.context, order=order, first=swap.is_first(order))
            own.probe = self._tap(own, batch)
            heads = swap(inputs, own, sdpa, False)[0]
            real = token_mask(batch, heads)
            self.moments.add(heads[real], self.target.wanted(output[0])[real])
            lengths.append(real.sum(1).cpu())

        hooked.callback(self.target.source.register_forward_hook(collect).remove)

    def _tap(self, call: Call, batch: Batch) -> Any:
        """A tap that measures what the variant of the place "weights" cuts away; None without such a variant."""
        adjuster = self.target.swap.at("weights")
        if adjuster is None or adjuster.replaces:
            return None

        def see(place: str, tensor: Tensor) -> Tensor:
            if place == NORMALIZED:
                lost = tensor - adjuster.adjust(tensor, call)
                self.cut.add(lost.clamp_min(0), tensor, batch)
            return tensor

        return see

    def solve(self, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of the fit. The layer does not change."""
        layer = self.target.layer
        return self.moments.solve(ridge, f"layer {layer.number} ({layer.path})")

    def apply(self, weight: Tensor, bias: Tensor | None) -> LayerFit:
        """Put the fit into the layer."""
        calibration = Calibration(self.moments.fit, self.target.swap.geometry)
        calibration.placed_like(self.target.device_and_dtype)
        with torch.no_grad():
            calibration.weight.copy_(weight.to(calibration.weight.dtype))  # round on the CPU: some devices have no fp64
            if bias is not None:
                calibration.bias.copy_(bias.to(calibration.bias.dtype))
        self.target.swap.put(calibration)
        before, after = self.moments.r_squared(weight, bias)
        return LayerFit(
            layer=self.target.layer.number,
            module=self.target.layer.path,
            before=before,
            after=after,
            gains=tuple(weight.tolist()) if bias is None else None,
            tokens=self.moments.rows,
            cut=self.cut.value if self.cut.whole else None,
        )


def _targets(installation: Installation, source: str, options: dict[str, Any], *, constant: bool) -> list[Target]:
    """Build the target of every swapped layer, in the order of the calls."""
    classes = parse(source)
    chosen = parse_options(classes, options)
    targets = []
    for layer in installation.layers():
        index, swap = layer.number, layer.swap
        if len(layer.copies) > 1:
            raise ValueError(
                "PEFT holds copies of the swaps (modules_to_save); call calibrate before you add the adapters."
            )
        if swap.merged is not None:
            raise ValueError(
                f"layer {index}: an earlier calibration was merged into the weights; load the unmerged model."
            )
        if swap.retrained:
            raise ValueError(
                f"layer {index}: an earlier conversion trained its weights for {'+'.join(swap.names)}, so there is no "
                "original attention left to fit to; calibrate before the training."
            )
        original = build_swap(layer, classes, chosen)
        if original.carries or any(True for _ in original.parameters()):
            raise ValueError(
                f"source={source!r} has parameters or scores of its own, which this model does not hold; choose a "
                "source without parameters, such as 'softmax'."
            )
        targets.append(Target(layer, original, constant))
    return targets


@contextlib.contextmanager
def _source_in_place(model: nn.Module, installation: Installation, targets: Sequence[Target]) -> Iterator[None]:
    """Inside, the model runs in evaluation mode with the source's attention in place of the swaps.

    The swaps compute at full strength and have no calibration inside, so that hooks can call them. Afterwards the
    training mode and the phases are as before. After an error `_undone_after_an_error` brings the calibrations back.
    """
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with installation.temporarily({target.layer: target.source for target in targets}):
            for target in targets:
                target.swap.drop(Calibration.name)
                target.swap.phase = Phase.FULL
            yield
    finally:
        for module in training:
            module.training = True
