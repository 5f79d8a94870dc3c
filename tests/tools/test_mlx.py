"""MLX computes attention by itself and chooses a model by `model_type`: it refuses a converted checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages


@pytest.mark.parametrize(("trust", "message"), [(False, "attn_swap.py"), (True, "only transformers with hf-attn-swap")])
def test_refused(trust: bool, message: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises((ValueError, AttributeError), match=message):
        utils.load_model(checkpoint("llama", "outeffhop"), trust_remote_code=trust)


def test_stock_attention_without_the_name_of_the_file(checkpoint: Callable[..., Path]) -> None:
    """What MLX does with a checkpoint that does not name the shim: the reason for naming it."""
    folder = checkpoint("llama", "outeffhop")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    del config["model_file"]
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = utils.load_model(folder)
    assert type(model).__module__ == "mlx_lm.models.llama"
