"""Convert a trained model with little loss: by calibration, a schedule of strengths, or attention transfer."""

from .calibrate import calibrate
from .merge import merge_calibration
from .schedule import StrengthSchedule
from .transfer import AttentionTransferTrainer

__all__ = ["AttentionTransferTrainer", "StrengthSchedule", "calibrate", "merge_calibration"]
