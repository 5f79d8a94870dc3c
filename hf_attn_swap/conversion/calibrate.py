"""Fits the heads of a swapped attention to the heads of softmax attention, with which its weights were trained.

A are the variant's heads at strength 1, and R are the heads that it should give on the same input. Each head is fitted
by least squares, in one of two ways:

    gain:  g_h = <A_h, R_h> / <A_h, A_h>
    map:   [M_h; b_h] = argmin ||A_h M_h + b_h - R_h||^2

The normal equations are summed in fp64, and padding is left out. Every layer reads the activations of the original
model, so one pass over the batches fits all layers. To fit the layers in order, each on the output of the fitted layers
below, takes a pass per layer, and it was not better on MiniLM.

What R is. A layer with input x gives c x + m Z, where Z is W_o(heads), or the heads themselves if the variant does not
use W_o. Z' = W_o(Y) is what the weights were trained for, with the heads Y of softmax attention. The wanted Z is f Z':

    pre-LayerNorm:   m Z = Z', so f = 1 / m
    post-LayerNorm:  LN(x + c x + m Z) = LN(x + Z'), so f = (1 + c) / m

Z and Z' both contain the bias b_o. So Z = f Z' holds for the heads R = f Y + (f - 1) W_o^-1 b_o.
W_o^-1 may be damped, see `Target.offset`.

The fit of an exported model is folded into the weights (`merge_calibration`):
(A_h M_h + b_h) W_o,h = A_h (M_h W_o,h) + b_h W_o,h. The matrix M_h W_o,h replaces the rows W_o,h of the head, and
b_h W_o,h is added to b_o. This is exact at strength 1 alone.
The method is this package's own; docs/mathematics.md, section Calibration. The gain supplies the scale that SimpleTRON
leaves out. Axes: B batch, L token, H head, D head width, E model width, I input width of W_o.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.call import Call, DeviceAndDtype, Geometry
from ..families import Site
from ..layer.calibration import FITS, Calibration, check_fit
from ..layer.fitted import HEADS
from ..layer.registry import parse
from ..layer.swap import Phase, Swap
from ..measuring.batches import Batch, as_batches, evaluating, forward, read_by, refuse_other_tokens, token_mask
from ..patch import need_installation, softmax_swaps
from ..text.bar import bar
from ..variants.softmax import Softmax
from ..wiring.device_and_dtype import device_and_dtype
from ..wiring.install import Installation
from ..wiring.layers import Layer
from .rows import TOKENS, Rows
from .run import Run
from .value_scale import scale_values

WELL_CONDITIONED = 1e3  # up to this condition number, W_o is inverted exactly
DAMPING = 0.01  # of the inverse of W_o, as a share of its largest singular value
PROBE = 256.0  # large, so that adding the bias loses few digits of the matrix; a power of two divides exactly
TINY = 0.01  # a skip of less than this share of the input is not worth a sentence
RIDGE = 1e-4
NO_FIT = "no fit"
SCALED = "scaled values"  # without a fit of the heads
ROWS_AT_A_TIME = 8
M = TypeVar("M", bound=nn.Module)


# -- What the heads are fitted to --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The target of one layer.

    Attributes:
        layer: the swapped layer, whose heads are fitted.
        source: softmax attention, with which the weights were trained.
        constant: True if the fit has a bias (a map), False if it has none (a gain).

    Raises:
        ValueError: the variant's output does not contain the heads (m = 0), so there is nothing to fit.
    """

    layer: Layer
    source: Swap
    constant: bool = True

    def __post_init__(self) -> None:
        if _shares(self.swap)[1] == 0:
            raise ValueError(
                f"{'+'.join(self.swap.names)} with these options drops the read-out, so nothing can be calibrated; "
                "choose other options (modern_hopfield: alpha below 1)."
            )

    @property
    def site(self) -> Site:
        """The attention block."""
        return self.layer.site

    @property
    def swap(self) -> Swap:
        """The swapped attention."""
        return self.layer.swap

    @property
    def projection(self) -> nn.Module:
        """The module of W_o."""
        assert self.site.family.output is not None
        return self.site.container.get_submodule(self.site.family.output)

    @property
    def device_and_dtype(self) -> DeviceAndDtype:
        """The device and the dtype of the layer."""
        return device_and_dtype(self.site.container, self.site.core)

    @property
    def factor(self) -> float:
        """f: the multiple of the source's Z' that the swapped layer should give."""
        skip, share = _shares(self.swap)
        return (1 + skip if self.site.family.post_norm else 1.0) / share

    @property
    def left(self) -> float:
        """The multiple of the input that the swap adds and that no fit can undo; 0 in a post-LayerNorm block."""
        return 0.0 if self.site.family.post_norm else _shares(self.swap)[0]

    def wanted(self, heads_BLHD: Tensor) -> Tensor:
        """Return the wanted heads R (B,L,H,D) of the swapped layer, from the heads (B,L,H,D) of the source."""
        flat = heads_BLHD.flatten(2)
        if self.swap.keeps_projection:
            return (self.factor * flat + self.offset).view_as(heads_BLHD)
        through: Tensor = self.projection(flat)
        return (self.factor * through).view_as(heads_BLHD)

    @cached_property
    def offset(self) -> Tensor | float:
        """(f - 1) W_o^-1 b_o, of width H D: the constant part of R; 0 for a gain, which has no constant.

        The inverse is damped where W_o is not well conditioned. W_o of a ViT has directions that are a million times
        weaker than others: a constant that reached b_o through them would be thousands of times larger than the heads,
        and no training could move W_o.
        """
        if not self.constant or self.factor == 1:
            return 0.0
        readable = is_matrix(self.projection)
        weight, bias = output_matrix(self.projection) if readable else self._probed()
        if bias is None:
            return 0.0
        weight = weight.detach().cpu().double().T
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        damping = DAMPING * sizes[0] if sizes[0] > WELL_CONDITIONED * sizes[-1] else 0.0
        damped = sizes / (sizes.square() + damping**2)
        constant = right.T @ (damped * (left.T @ bias.detach().cpu().double()))
        offset: Tensor = (self.factor - 1) * constant.to(bias)
        return offset

    @torch.no_grad()
    def _probed(self) -> tuple[Tensor, Tensor | None]:
        """The matrix (H D, E) and the bias (E,) of an offloaded or quantised W_o: what it gives for an identity."""
        width = self.swap.geometry.heads * self.swap.geometry.head_dim
        rows = partial(torch.zeros, device=self.device_and_dtype.device, dtype=self.device_and_dtype.dtype)
        bias = self.projection(rows(1, width))
        probes = rows(width, width).fill_diagonal_(PROBE)
        return (self.projection(probes) - bias) / PROBE, bias[0]


def is_matrix(projection: nn.Module) -> bool:
    """Return True if the weight can be read as a matrix of floating-point numbers.

    Offloaded weights are on the meta device until their module is called. Weights quantised to 4 bits are bytes.
    """
    weight = projection.weight
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2 and not weight.is_meta


def output_matrix(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a projection as (input width, output width), a view of the parameter, and its bias."""
    weight = projection.weight
    bias = getattr(projection, "bias", None)
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(projection, nn.Linear):
        return weight.T, bias
    return weight, bias  # a Conv1D stores its weight as (input width, output width)


def _shares(swap: Swap) -> tuple[float, float]:
    """Return (c, m) of the layer's output c x + m Z at strength 1."""
    for variant in swap.variants:
        if variant.shares != (0.0, 1.0):
            return variant.shares
    return 0.0, 1.0


# -- The fit -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """The fits of all layers of one calibration.

    Attributes:
        fit: "gain" or "map".
        before, after: by the layer's number, R^2 of each head on the calibration tokens, before and after the fit.
        tokens: how many real tokens a layer was fitted on.
        lengths: the shortest and the longest row of the calibration batches, in real tokens.
        left: the multiple of a layer's input that the swap adds and that no fit can undo; 0 in post-LayerNorm blocks.
    """

    fit: str
    before: dict[int, tuple[float, ...]]
    after: dict[int, tuple[float, ...]]
    tokens: int
    lengths: tuple[int, int]
    left: float = 0.0

    def __str__(self) -> str:
        """Two sentences, and one more for a skip that no fit can undo."""
        shortest, longest = self.lengths
        span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        unexplained = 1 - fmean(value for values in self.after.values() for value in values)
        words = (
            f"{self.fit} fitted to softmax on {self.tokens:,} tokens: {unexplained:.1%} of the read-out stays "
            f"unexplained. Rows had {span} tokens; use the model at such lengths."
        )
        if abs(self.left) < TINY:
            return words
        return (
            f"{words} The swap adds {self.left:g} times the input in every layer, which no fit can undo in a pre-norm "
            "block: choose options without this skip (modern_hopfield: alpha=0), or train the model for long."
        )


class Moments:
    """Sums of products of the variant's heads A and the wanted heads R, in fp64 on the CPU."""

    def __init__(self, geometry: Geometry, fit: str) -> None:
        heads, width = geometry.heads, geometry.head_dim
        self.fit = fit
        self.rows = 0
        self.gram_HFF = torch.zeros(heads, width + 1, width + 1, dtype=torch.float64)
        self.cross_HFD = torch.zeros(heads, width + 1, width, dtype=torch.float64)
        self.square_H = torch.zeros(heads, dtype=torch.float64)

    def add(self, heads_NHD: Tensor, wanted_NHD: Tensor) -> None:
        """Add the heads of N real tokens to the sums."""
        # First to the CPU, then to fp64: some devices (Apple's) have no fp64.
        heads = heads_NHD.detach().cpu().double()
        wanted = wanted_NHD.detach().cpu().double().transpose(0, 1)
        features = torch.nn.functional.pad(heads, (0, 1), value=1.0).transpose(0, 1)
        self.rows += heads_NHD.shape[0]
        self.gram_HFF += features.transpose(1, 2) @ features
        self.cross_HFD += features.transpose(1, 2) @ wanted
        self.square_H += wanted.square().sum((1, 2))

    def solve(self, ridge: float, where: str) -> tuple[Tensor, Tensor | None]:
        """Solve for the gains (H,) and None, or for the maps (H,D,D) and their biases (H,D), in fp64.

        Raises:
            ValueError: there are fewer tokens than unknowns, or the activations are not finite.
        """
        width = self.cross_HFD.shape[2]
        needed = 1 if self.fit == "gain" else width + 1
        if self.rows < needed:
            raise ValueError(f"{where}: {self.rows} real tokens are too few for {needed} unknowns; pass more batches.")
        if not (self.gram_HFF.isfinite().all() and self.cross_HFD.isfinite().all()):
            raise ValueError(f"{where}: activations are not finite; check the model and the batches (fp16 overflows).")
        energy_H = self.gram_HFF.diagonal(dim1=1, dim2=2)[:, :width].sum(1)
        if self.fit == "gain":
            product_H = self.cross_HFD[:, :width].diagonal(dim1=1, dim2=2).sum(1)
            return product_H / (energy_H * (1 + ridge)).clamp_min(torch.finfo(torch.float64).tiny), None
        penalty_HF = (ridge / width * energy_H)[:, None].expand(-1, width + 1).clone()
        penalty_HF[:, width] = 0.0  # no penalty on the constant
        gram = self.gram_HFF + torch.diag_embed(penalty_HF)
        solution = torch.linalg.lstsq(gram, self.cross_HFD, driver="gelsd").solution
        return solution[:, :width], solution[:, width]

    def explained(self, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[float, ...]:
        """R^2 per head of the heads under a fit: maps (H,D,D) and biases (H,D), gains (H,), or nothing."""
        heads, _, width = self.cross_HFD.shape
        identity = torch.eye(width, dtype=torch.float64).expand(heads, -1, -1)
        if weight is None:
            weight = identity
        elif weight.dim() == 1:
            weight = identity * weight[:, None, None]
        bias_HD = torch.zeros(heads, width, dtype=torch.float64) if bias is None else bias
        solution_HFD = torch.cat([weight, bias_HD[:, None]], 1)
        error_H = self.square_H - 2 * (solution_HFD * self.cross_HFD).sum((1, 2))
        error_H = error_H + (solution_HFD * (self.gram_HFF @ solution_HFD)).sum((1, 2))
        mean_HD = self.cross_HFD[:, -1] / self.rows
        total_H = self.square_H - self.rows * mean_HD.square().sum(1)
        return tuple((1 - error_H / total_H.clamp_min(torch.finfo(torch.float64).tiny)).tolist())


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    fit: str = "map",
    ridge: float = RIDGE,
    scale: bool = True,
    progress: bool = True,
) -> CalibrationReport:
    """Fit the heads of every swapped layer to softmax attention, with which the weights were trained, in place.

    Nothing is trained. A new calibration replaces an earlier calibration. docs/mathematics.md, section Calibration.

    `simpletron_resl` and `modern_hopfield` add a multiple of the layer's input to its output (a skip). In a
    post-LayerNorm block (BERT, ALBERT) the fit undoes this skip: the target is multiplied by a factor, and LayerNorm
    removes the factor. In a pre-norm block no fit can undo the skip, and the report says
    what is left. The heads of `simpletron*` grow with the number of tokens, so calibrate at the length at which you use
    the model.

    Args:
        model: a model that `patch_model` has patched, at any strength; the strength does not change.
        batches: dicts of tensors as the model takes them. They are read once. A few thousand tokens are enough. Where
            there is padding, a 2-D attention mask (B,L) marks the real tokens.
        fit: "gain" fits one number per head; "map" fits a (D,D) matrix and a bias (D,) per head.
        ridge: the penalty on large values, as a share of the mean square of the variant's heads.
        scale: first choose the scale of the values of a variant that projects on values (`belief`), as `scale_values`
            does, on the first batches.
        progress: show a progress bar.

    Returns:
        R^2 per layer and head before and after the fit, and the shortest and longest row in tokens.

    Raises:
        ValueError: the model is not patched or was changed by a conversion, there is no batch, there are too few real
            tokens, the fit is unknown, or activations are not finite. The model is unchanged after an error.
    """
    check_fit(fit)
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge!r}.")
    installation = need_installation(model)
    targets = _targets(installation, constant=fit == "map")
    rows = list(as_batches(batches))
    with _undone_after_an_error(installation):
        if scale and any(target.swap.projects for target in targets):
            scale_values(model, rows, progress=progress)
        fittings = [_Fitting(target, Moments(target.swap.geometry, fit)) for target in targets]
        lengths: list[Tensor] = []
        with _softmax_in_place(model, installation, targets):
            cores = [target.site.core for target in targets]
            for batch in bar(rows, desc="calibrate", unit="batch", shown=progress):
                refuse_other_tokens(installation.root, cores, batch)
                with contextlib.ExitStack() as hooked:
                    for fitting in fittings:
                        fitting.hook(batch, lengths, hooked)
                    forward(model, batch)
            solved = [fitting.solve(ridge) for fitting in fittings]
            for fitting, solution in zip(fittings, solved, strict=True):
                fitting.apply(*solution)
    shortest, longest = torch.cat(lengths).aminmax()
    return CalibrationReport(
        fit=fit,
        before={fitting.target.layer.number: fitting.moments.explained() for fitting in fittings},
        after={
            fitting.target.layer.number: fitting.moments.explained(*solution)
            for fitting, solution in zip(fittings, solved, strict=True)
        },
        tokens=fittings[0].moments.rows,
        lengths=(int(shortest), int(longest)),
        left=max((target.left for target in targets), key=abs),
    )


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
    """The fit of one layer: its target, and the sums of products so far."""

    target: Target
    moments: Moments

    def hook(self, batch: Batch, lengths: list[Tensor], hooked: contextlib.ExitStack) -> None:
        """Add the tokens of the next forward pass to the sums. During that pass the source's swap is in the model."""
        batch = read_by(self.target.site.core, batch)

        def collect(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inputs, call, sdpa, _ = args
            swap = self.target.swap
            order = swap.place_in(call.context)
            own = Call(x=call.x, start=call.start, context=call.context, order=order, first=swap.is_first(order))
            heads = swap(inputs, own, sdpa, False)[0]
            real = token_mask(batch, heads)
            self.moments.add(heads[real], self.target.wanted(output[0])[real])
            lengths.append(real.sum(1).cpu())

        hooked.callback(self.target.source.register_forward_hook(collect).remove)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of the fit. The layer does not change."""
        layer = self.target.layer
        return self.moments.solve(ridge, f"layer {layer.number} ({layer.path})")

    def apply(self, weight: Tensor, bias: Tensor | None) -> None:
        """Put the fit into the layer."""
        calibration = Calibration(self.moments.fit, self.target.swap.geometry)
        calibration.placed_like(self.target.device_and_dtype)
        with torch.no_grad():
            calibration.weight.copy_(weight.to(calibration.weight.dtype))  # round on the CPU: some devices have no fp64
            if bias is not None:
                calibration.bias.copy_(bias.to(calibration.bias.dtype))
        self.target.swap.put(calibration)


def _targets(installation: Installation, *, constant: bool) -> list[Target]:
    """Build the target of every swapped layer, in the order of the calls."""
    for layer in installation.layers():
        if len(layer.copies) > 1:
            raise ValueError(
                "PEFT holds copies of the swaps (modules_to_save); call calibrate before you add the adapters."
            )
        if layer.swap.retrained:
            raise ValueError(
                f"layer {layer.number}: an earlier conversion changed its weights for {'+'.join(layer.swap.names)}, so "
                "there is no original attention left to fit to; calibrate before the training."
            )
    return [Target(layer, swap, constant) for layer, swap in softmax_swaps(installation).items()]


@contextlib.contextmanager
def _softmax_in_place(model: nn.Module, installation: Installation, targets: Sequence[Target]) -> Iterator[None]:
    """Inside, the model runs in evaluation mode with softmax attention in place of the swaps.

    The swaps compute at full strength and have no calibration inside, so that hooks can call them. Afterwards the
    training mode and the phases are as before. After an error `_undone_after_an_error` brings the calibrations back.
    """
    with evaluating(model), installation.temporarily({target.layer: target.source for target in targets}):
        for target in targets:
            target.swap.drop(Calibration.name)
            target.swap.phase = Phase.FULL
        yield


# -- The step of a conversion ------------------------------------------------------------------------------------------


def fit_heads(run: Run) -> None:
    """Fit the swap as `fit` names it, or by what loses least: no fit, scaled values, a gain or a map per head.

    Nothing is fitted if the swap alone is within the budget, or is stock attention, or no fit was asked for.
    """
    config = run.config
    if config.fit is None or (config.fit not in FITS and (run.within or parse(config.variant) == (Softmax,))):
        return
    batches = first_batches(run.rows, _calibration_rows(run.rows), 1 if config.low_memory else ROWS_AT_A_TIME)
    if config.fit in FITS:
        run.apply(f"fit: {config.fit}", partial(calibrate, run.model, batches, fit=config.fit, progress=run.progress))
        return
    candidates: dict[str, Callable[[], object]] = {}
    projects = any(swap.projects for copies in run.swaps.values() for swap in copies)
    if projects:
        candidates[SCALED] = partial(scale_values, run.model, batches, progress=run.progress)
    for fit in FITS:  # the same batches would give the same scales again
        candidates[fit] = partial(calibrate, run.model, batches, fit=fit, scale=not projects, progress=run.progress)
    run.best_of("fit", candidates, unchanged=NO_FIT)


def first_batches(rows: Rows, count: int, size: int) -> list[Batch]:
    """The first rows, in batches of like length."""
    return list(rows.some(range(min(len(rows), count))).batches(size))


def _calibration_rows(rows: Rows) -> int:
    """Some 16,000 tokens, or 256 rows of another kind."""
    return max(8, round(16_384 / rows.length)) if rows.unit == TOKENS else 256


# -- A fit folded into the weights -------------------------------------------------------------------------------------


@torch.no_grad()
def merge_calibration(model: M, /) -> M:
    """Fold every calibration into W_o and b_o, in place.

    So is every other fit of the heads that is a linear map of each head (`Fitted.linear`). The model's output stays the
    same up to rounding, and the fits are gone. As after a distillation, strength 0 is no longer the original model, and
    config.json says so (`retrained`). Adapters belong to the model from before the merge, or are trained after it.
    docs/mathematics.md, section Calibration.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched or not calibrated; a strength is below 1; a variant drops W_o; an adapter
            sits on W_o; a map has a bias but W_o has none; or a fit of the heads is no linear map. The model is then
            unchanged.
    """
    installation = need_installation(model)
    merges = [
        (layer.site, swap, fit, *fit.linear())
        for layer in installation.layers()
        for swap in layer.copies
        for fit in reversed(swap.fitted.values())  # the last fit meets W_o first
        if fit.place == HEADS
    ]
    if not merges:
        raise ValueError("no layer is calibrated; call calibrate on the model first.")
    projections = [_projection(site, swap, bias is not None) for site, swap, _, _, bias in merges]
    for projection, (_, swap, fit, weight, bias) in zip(projections, merges, strict=True):
        _fold(projection, weight, bias)
        swap.drop(fit.name)
        swap.retrained = True
    installation.refresh()
    return model


def _projection(site: Site, swap: Swap, biased: bool) -> nn.Module:
    """The module of W_o, if a fit can be merged into it.

    Raises:
        ValueError: it cannot be.
    """
    if swap.strength != 1.0:
        raise ValueError(
            f"{site.path}: a merge is exact at strength 1 alone, this layer is at {swap.strength:g}; "
            "call set_strength(model, 1.0) first."
        )
    if site.family.output is None or not swap.keeps_projection:
        raise ValueError(
            f"{site.path}: {'+'.join(swap.names)} drops W_o, or the package does not know which module holds it, so "
            "nothing can be merged; keep the calibration unmerged."
        )
    module = site.container.get_submodule(site.family.output)
    if not isinstance(module, (nn.Linear, Conv1D)) or hasattr(module, "base_layer") or not is_matrix(module):
        raise ValueError(
            f"{site.path}: {type(module).__name__} holds no plain matrix here (an adapter, or offloaded or quantised "
            "weights); load the model without them to merge, or keep the calibration unmerged."
        )
    if biased and getattr(module, "bias", None) is None:
        raise ValueError(
            f"{site.path}: W_o has no bias to take the map's bias; keep the calibration unmerged, or calibrate "
            "with fit='gain'."
        )
    return module


def _fold(projection: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Write M W_o and b_o + b W_o into a projection."""
    weight_IE, bias_E = output_matrix(projection)
    fitted = _wide(weight)
    wide_HDE = _wide(weight_IE).reshape(len(fitted), -1, weight_IE.shape[1])
    if bias is not None:
        assert bias_E is not None
        _put(bias_E, _wide(bias_E) + torch.einsum("hd,hde->e", _wide(bias), wide_HDE))
    # The weight comes last: for an fp64 weight on the CPU `wide_HDE` is a view of it.
    merged_HDE = wide_HDE * fitted[:, None, None] if fitted.dim() == 1 else fitted @ wide_HDE
    _put(weight_IE, merged_HDE.flatten(0, 1))


def _wide(parameter: Tensor) -> Tensor:
    """Return the numbers in fp64, on the CPU: some devices (Apple's) have no fp64."""
    return parameter.detach().cpu().double()


def _put(parameter: Tensor, values: Tensor) -> None:
    """Write new values into a parameter. The values are rounded to its dtype on the CPU, where fp64 exists."""
    parameter.copy_(values.to(parameter.dtype))
