"""Convert a trained model with little loss: neutral start, calibration, a schedule of strengths, transfer, distillation."""

from .calibrate import calibrate
from .merge import merge_calibration
from .neutral import neutral_start
from .schedule import StrengthSchedule
from .transfer import AttentionTransferTrainer

__all__ = ["AttentionTransferTrainer", "StrengthSchedule", "calibrate", "merge_calibration", "neutral_start"]
