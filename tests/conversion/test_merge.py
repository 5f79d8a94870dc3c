"""A merge keeps the function or is refused with the reason, and the original is gone after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.conversion import calibrate, merge_calibration
from hf_attn_swap.layer.calibration import FITS
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.cells import FAMILY_NAMES, SINGLES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, refused, swaps
from tests.harness.places import turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT
    pytest.mark.filterwarnings("ignore:The clip cuts away"),  # few tokens, so a published gamma cuts much
]
WITHOUT_BIAS = "W_o has no bias to take the map's"


def calibrated(name: str, variant: str, fit: str, dtype: torch.dtype = torch.float64) -> Any:
    model = perturb(patch_model(fresh(name, dtype), variant))
    calibrate(model, [batch_of(name, dtype, seed=seed) for seed in range(12)], fit=fit, progress=False)
    return model


def why_not(model: Any, variant: str, fit: str) -> str | None:
    """The refusal that is due (docs/mathematics.md, section Calibration and merging), or None."""
    if not VARIANTS[variant].keeps_projection:
        return "drops W_o"
    biased = any(
        name.endswith(("o_proj.bias", "c_proj.bias", "out_proj.bias", "dense.bias")) for name in model.state_dict()
    )
    return WITHOUT_BIAS if fit == "map" and not biased else None


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, SINGLES))
@pytest.mark.parametrize("fit", FITS)
def test_merged(name: str, variant: str, fit: str) -> None:
    model, batch = calibrated(name, variant, fit), batch_of(name)
    wanted, reason = forward(model, batch), why_not(model, variant, fit)
    if reason is not None:
        with refused(reason):
            merge_calibration(model)
        assert torch.equal(forward(model, batch), wanted)
        return
    size = sum(p.numel() for p in model.parameters())
    merge_calibration(model)
    assert distance(forward(model, batch), wanted) < 1e-11
    assert sum(p.numel() for p in model.parameters()) < size
    assert not any("calibration" in swap.fitted for swap in swaps(model))
    with refused("no original attention left"):
        calibrate(model, [batch], progress=False)


def test_refused() -> None:
    with refused("not patched"):
        merge_calibration(fresh("bert"))
    with refused("no layer is calibrated"):
        merge_calibration(patch_model(fresh("bert"), "modern_hopfield"))
    model = calibrated("bert", "modern_hopfield", "map")
    with refused("exact at strength 1 alone", "at 0.5"):
        merge_calibration(set_strength(model, 0.5, layers=2))
    assert swaps(model)[0].calibration is not None
    adapted = calibrated("bert", "modern_hopfield", "gain")
    peft.get_peft_model(adapted, peft.LoraConfig(target_modules=r".*attention.output.dense"))
    with refused("holds no plain matrix"):
        merge_calibration(adapted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"calibration": {"fit": "full", "merged": False}}, "fit must be one of"),
        ({"calibration": {"fit": "map", "merged": True}}, "earlier version with a merged calibration"),
        ({"calibration": {"fit": "map", "merged": 1}}, "earlier version with a merged calibration"),
        ({"calibration": {"merged": False}}, "the calibration must have exactly"),
        ({"calibration": {"fit": "map", "merged": False, "more": 1}}, "the calibration must have exactly"),
        ({"calibration": {"fit": "gain", "merged": False}}, "mismatched|ize"),
    ],
)
def test_damaged(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = calibrated("bert", "simpletron_resl", "map", torch.float32)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_swap"]["swaps"][0] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match=reason):
        type(model).from_pretrained(tmp_path)
