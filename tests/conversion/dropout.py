"""Every dropout of a family, switched on."""

from __future__ import annotations

from tests.contract.harness import fresh


def dropping(name: str) -> dict[str, float]:
    """Every dropout of a family's config at 0.5; layer-drop, which skips layers, is another thing."""
    config = fresh(name).config.to_dict()
    rates = {key: 0.5 for key, value in config.items() if "drop" in key and isinstance(value, float)}
    rates.pop("layerdrop", None)
    assert rates
    return rates
