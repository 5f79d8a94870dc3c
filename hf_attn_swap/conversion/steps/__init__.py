"""The steps of a conversion, a file each, and their order.

A step is a function of a `State`; `engine.py` takes it. A new step is a file here, and its place in `STEPS`. If users
give it values, `@stage_kind` makes them a stage, and `of_stage` says which step takes a stage of this kind in a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine import Step
from ..stages import Align, Calibrate, Distil
from .absorb import absorb
from .align import aligned
from .choose import choose
from .distil import distil, distilled
from .finish import finish
from .fit import calibrated, fit
from .heads import heads
from .integers import integers
from .qat import qat
from .smooth import smooth
from .stock import stock
from .swap import swap

# What `convert` does, in this order.
STEPS: list[Step] = [stock, swap, absorb, heads, fit, choose, distil, finish, smooth, qat, integers]

# Which step takes a stage of a recipe.
OF_STAGE: dict[type[Any], Callable[[Any, str], Step]] = {Calibrate: calibrated, Align: aligned, Distil: distilled}


def steps_of(stages: Sequence[Any], first: int = 1) -> list[Step]:
    """The steps that take the stages of a recipe; `first` is the number of the first of them.

    Raises:
        ValueError: no step takes a stage.
    """
    if unknown := [stage.name for stage in stages if type(stage) not in OF_STAGE]:
        raise ValueError(f"no step takes the stage {unknown[0]!r} in a recipe.")
    return [OF_STAGE[type(stage)](stage, f"stage-{number}-{stage.name}") for number, stage in enumerate(stages, first)]
