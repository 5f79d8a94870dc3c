"""Convert a trained model with little loss, step by step; `hf_attn_swap.convert` takes all steps by one call.

The steps are absorbed sinks, smoothed channels, scaled values, calibration, the choice of layers, and distillation.
"""

from .calibrate import calibrate, merge_calibration
from .losses import Losses
from .sensitivity import head_sensitivity
from .sink import absorb_sink
from .smooth import smooth
from .trainer import DistillationTrainer
from .value_scale import scale_values

__all__ = [
    "DistillationTrainer",
    "Losses",
    "absorb_sink",
    "calibrate",
    "head_sensitivity",
    "merge_calibration",
    "scale_values",
    "smooth",
]
