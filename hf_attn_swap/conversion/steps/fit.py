"""Step 5: the fit that a stage names, or the one that loses least: none, scaled values, a gain or a map per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...layer.calibration import FITS
from ...layer.fitted import CALL, sentences
from ...layer.registry import parse
from ...measuring.batches import Batch
from ...variants.softmax import Softmax
from ..calibrate import calibrate
from ..engine import Found, Part, Step
from ..report import CalibrationReport
from ..rows import TOKENS, Rows
from ..stages import Calibrate
from ..state import State
from ..value_scale import scale_values

NO_FIT = "no fit"
SCALED = "scaled values"  # without a fit of the heads
ROWS_AT_A_TIME = 8


def fit(state: State) -> Iterator[Part]:
    """Fit the swap, unless the swap alone is within the budget, or is stock attention, or no fit was asked for."""
    config = state.config
    wanted = config.plan.calibrate is not None or config.fit in FITS
    if wanted or (config.fit is not None and not (state.within or parse(config.variant) == (Softmax,))):
        yield Part("fit", _fit)


def calibrated(stage: Calibrate, name: str) -> Step:
    """The step that takes a `Calibrate` of a recipe."""

    def run(state: State) -> None:
        batches = _batches(state.rows, stage.rows, state.args.train_batch_size)
        report = _calibrate(state, batches, stage.fit, stage, scale=True, progress=state.progress)
        state.say(f"Calibrated: {report.summary()}{_starts(state)}")

    run.__name__ = name
    return run


def _fit(state: State) -> Found:
    wanted = state.config.plan.calibrate
    count = _calibration_rows(state.rows) if wanted is None else wanted.rows
    batches = _batches(state.rows, count, 1 if state.config.low_memory else ROWS_AT_A_TIME)
    way = state.config.fit if wanted is None else wanted.fit
    if way not in FITS:
        return _best_fit(state, batches)
    _calibrate(state, batches, way, wanted or Calibrate(), scale=True, progress=state.progress)
    return Found(f"fit: {way}", state.lost())


def _best_fit(state: State, batches: Sequence[Batch]) -> Found:
    """Fit the swap by the way that loses least."""
    chosen, best, fitted = NO_FIT, state.record[-1].lost, state.snapshot()
    projects = any(swap.projects for group in state.swaps.values() for swap in group)
    for way in (SCALED, *FITS) if projects else FITS:
        if way == SCALED:
            scale_values(state.model, batches, progress=state.progress)
        else:  # the same batches would give the same scales again
            _calibrate(state, batches, way, Calibrate(), scale=not projects, progress=state.progress)
        lost = state.lost()
        if lost.divergence_or_error < best.divergence_or_error:
            chosen, best, fitted = way, lost, state.snapshot()
    state.restore(fitted)
    return Found(f"fit: {chosen}", best)


def _calibrate(
    state: State, batches: Sequence[Batch], way: str, how: Calibrate, *, scale: bool, progress: bool
) -> CalibrationReport:
    return calibrate(
        state.model,
        batches,
        fit=way,
        source=how.source,
        scale=scale,
        progress=progress,
    )


def _batches(rows: Rows, count: int, size: int) -> list[Batch]:
    """The first rows, in batches of like length."""
    return list(rows.some(range(min(len(rows), count))).batches(size))


def _calibration_rows(rows: Rows) -> int:
    """Some 16,000 tokens, or 256 rows of another kind."""
    return max(8, round(16_384 / rows.length)) if rows.unit == TOKENS else 256


def _starts(state: State) -> str:
    """What a calibration chose before the fit, in words, such as the scales of the values."""
    first = [group[0] for group in state.swaps.values()]
    words = sentences(fit for swap in first for fit in swap.fitted.values() if fit.place == CALL)
    return f" {words}" if words else ""
