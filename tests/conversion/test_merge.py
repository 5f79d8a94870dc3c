"""A merge keeps the function or is refused with the reason, and it cannot be undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate, merge_calibration
from hf_attn_swap.layer.calibration import FITS
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.cells import FAMILY_NAMES, SINGLES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, refused, swaps

from .batches import batches

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
    """The refusal that is due (docs/mathematics.md, section Calibration and transfer), or None."""
    geometry, keeps = swaps(model)[0].geometry, VARIANTS[variant].keeps_projection
    if not keeps:
        grouped = geometry.kv_heads != geometry.heads
        return "nothing can take a map's bias" if fit == "map" else "W_v serves groups of heads" if grouped else None
    biased = any(
        name.endswith(("o_proj.bias", "c_proj.bias", "out_proj.bias", "dense.bias")) for name in model.state_dict()
    )
    return WITHOUT_BIAS if fit == "map" and not biased else None


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("variant", SINGLES)
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
    assert all(f"calibrated ({fit}, merged)" in row.runs for row in describe(model).rows if row.strength is not None)


def test_no_way_back() -> None:
    model, batch = merge_calibration(calibrated("bert", "simpletron_resl", "map")), batch_of("bert")
    wanted = forward(set_strength(model, 1.0), batch)
    for action in (
        lambda: set_strength(model, 0.5),
        lambda: set_strength(model, 0.0, layers=1),
        lambda: unpatch_model(model),
        lambda: patch_model(model, "belief"),
        lambda: patch_model(model, "belief", layers=[0]),
        lambda: calibrate(model, batches("bert"), progress=False),
    ):
        with refused("merged into"):
            action()
    assert torch.equal(forward(model, batch), wanted)


@pytest.mark.parametrize(("variant", "target"), [("simpletron_resl", "output.dense"), ("simpletron", "value")])
def test_no_adapter_on_a_merged_matrix(variant: str, target: str) -> None:
    model = merge_calibration(calibrated("bert", variant, "gain"))
    config = peft.LoraConfig(target_modules=rf".*attention.*{target}")
    adapted = peft.get_peft_model(model, config)
    with refused("an adapter sits on", "into which a calibration was merged"):
        forward(adapted, batch_of("bert"))
    other = peft.get_peft_model(
        merge_calibration(calibrated("bert", variant, "gain")), peft.LoraConfig(target_modules=["query"])
    )
    forward(other, batch_of("bert"))


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
    with refused("is no plain matrix"):
        merge_calibration(adapted)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("merged", [False, True])
def test_saved_and_loaded(name: str, fit: str, merged: bool, tmp_path: Path) -> None:
    model, batch = calibrated(name, "modern_hopfield", fit, torch.float32), batch_of(name, torch.float32)
    if merged and why_not(model, "modern_hopfield", fit) is None:
        merge_calibration(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    assert str(describe(loaded)) == str(describe(model))
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(forward(again, batch), forward(model, batch))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"calibration": {"fit": "full", "merged": False}}, "fit must be one of"),
        ({"calibration": {"fit": "map", "merged": 1}}, "merged must be true or false"),
        ({"calibration": {"fit": "map"}}, "the calibration must have exactly"),
        ({"calibration": {"fit": "map", "merged": False, "more": 1}}, "the calibration must have exactly"),
        ({"calibration": {"fit": "map", "merged": True}, "strength": 0.5}, "a merged calibration needs strength 1"),
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
