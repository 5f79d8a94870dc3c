"""Makes numbers fit for JSON, which has neither NaN nor infinity."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, in lists and dicts too: JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
