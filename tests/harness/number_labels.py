"""The labels of a classification model that are numbers and not a class."""

from __future__ import annotations

from typing import Any

NUMBERS: dict[str, dict[str, Any]] = {
    "one number": {"num_labels": 1},
    "regression": {"num_labels": 3, "problem_type": "regression"},
    "several labels at once": {"num_labels": 3, "problem_type": "multi_label_classification"},
}
