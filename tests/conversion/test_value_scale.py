"""Scaled values are the same model with other weights of W_v and W_o, and the projection takes less with them."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import convert, describe, patch_model, set_strength
from hf_attn_swap.conversion import calibrate, scale_values, value_scale
from hf_attn_swap.families import sites
from hf_attn_swap.functional import belief_projection
from hf_attn_swap.layer.registry import parse
from hf_attn_swap.layer.value_scale import ValueScale
from tests.contract.cells import FAMILY_NAMES, SINGLES
from tests.contract.harness import (
    batch_of,
    distance,
    forward,
    fresh,
    padding_side,
    real,
    refused,
    swaps,
)
from tests.harness.places import in_turn
from tests.slow import slow_belief_projection

from .batches import padded_batches

# PEFT reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-12  # docs/mathematics.md, section Strength and exactness


def projects(name: str) -> bool:
    return any(cls.projects for cls in parse(name))


PROJECTING = [name for name in SINGLES if projects(name)]


def drawn(like: Tensor, seed: int) -> Tensor:
    """Scales S (G,D): powers of two from 1/8 to 8."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-3, 4, like.shape, generator=generator)


def put(model: Any) -> Any:
    """A patched model whose layers have drawn scales."""
    for seed, swap in enumerate(swaps(model)):
        scale = ValueScale(swap.geometry)
        scale.squares.copy_(drawn(scale.squares, seed).square())
        swap.put(scale)
    return set_strength(model, swaps(model)[0].strength)  # writes the config anew


def in_config(model: Any) -> list[bool]:
    """Whether the config's block says that the values are scaled, layer by layer."""
    found = {i: entry.get("value_scale", False) for entry in model.config.attn_swap["swaps"] for i in entry["layers"]}
    return [found[index] for index in sorted(found)]


def squares(model: Any) -> list[Tensor | None]:
    return [None if swap.value_scale is None else swap.value_scale.squares for swap in swaps(model)]


def by_hand(model: Any) -> Any:
    """Multiply the rows of W_v of a stock model by the drawn scales, and divide the columns of W_o by them."""
    for seed, site in enumerate(sites(model)):
        family, sizes = site.family, site.family.geometry(site.core)
        scale = drawn(torch.empty(sizes.kv_heads, sizes.head_dim), seed)
        value = site.core.get_submodule(family.value)
        rows = scale.flatten()
        if family.query == family.value:  # one matrix holds query, key and value side by side
            rows = torch.cat([torch.ones(2 * len(rows)), rows])
        columns = scale.repeat_interleave(sizes.heads // sizes.kv_heads, 0).flatten()
        output = site.container.get_submodule(family.output)
        with torch.no_grad():
            value.weight.mul_(rows[:, None] if isinstance(value, nn.Linear) else rows)
            if value.bias is not None:
                value.bias.mul_(rows)
            output.weight.div_(columns if isinstance(output, nn.Linear) else columns[:, None])
    return model


# ---- The same function as other weights


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("variant", PROJECTING)
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_same_model_with_scaled_weights(name: str, variant: str, strength: float) -> None:
    """The scaled weights alone leave the stock model as it is, to the bit."""
    batch = batch_of(name, padded=padding_side(name))
    other = by_hand(fresh(name))
    assert torch.equal(forward(other, batch), forward(fresh(name), batch))
    wanted = forward(patch_model(other, variant, strength=strength), batch)
    model = patch_model(fresh(name), variant, strength=strength)
    plain = forward(model, batch)
    assert distance(forward(put(model), batch), wanted) <= TOLERANCE
    assert distance(plain, wanted) > 1e-6


@pytest.mark.parametrize("per_head", [False, True])
def test_the_formula(per_head: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    y, v = (torch.randn(2, 5, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = drawn(torch.empty(4, 8), 7).double()
    got = belief_projection(y, v, per_head=per_head, squares=scale.square())
    wanted = slow_belief_projection(y * scale, v * scale, per_head=per_head) / scale
    assert distance(got, wanted) <= TOLERANCE
    assert torch.equal(
        belief_projection(y, v, per_head=per_head, squares=torch.ones(4, 8)), belief_projection(y, v, per_head=per_head)
    )


# ---- What is chosen


@in_turn(["bert", "llama"], PROJECTING)
def test_the_projection_takes_less(name: str, variant: str) -> None:
    """In every layer, by powers of two that fp16 holds; and a second call finds the same."""
    batches = padded_batches(name)
    model = patch_model(fresh(name), variant)
    report = scale_values(model, batches, progress=False)
    assert list(report.before) == list(report.after) == list(range(len(swaps(model))))
    assert all(report.after[index] < report.before[index] for index in report.before)
    assert in_config(model) == [True] * len(swaps(model))
    for each in squares(model):
        assert each is not None
        exponents = each.log2() / 2
        assert torch.equal(exponents, exponents.round())
        assert exponents.abs().max() <= 7
        assert torch.equal(each.half().float(), each.float())
    assert f"The values of {len(swaps(model))} layers are scaled" in str(report)
    assert "values scaled for the projection" in str(describe(model))
    again = copy.deepcopy(squares(model))
    scale_values(model, batches, progress=False)
    assert all(torch.equal(*pair) for pair in zip(again, squares(model), strict=True))


def outputs(model: Any, batch: dict[str, Any]) -> Tensor:
    """What W_o of the first layer gives the real tokens, without the bias: (N,E)."""
    site, found = sites(model)[0], list[Tensor]()
    projection = site.container.get_submodule(site.family.output)
    handle = projection.register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        zero = projection(torch.zeros_like(found[0][..., : projection.weight.shape[0]]))
    return real(found[0] - zero, batch).flatten(0, -2)


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "albert"])  # its layers share one module
@pytest.mark.parametrize("scaled", [False, True])
def test_the_report_is_what_the_first_layer_loses(name: str, scaled: bool) -> None:
    batch = batch_of(name, padded=padding_side(name))
    stock = outputs(fresh(name), batch)
    model = patch_model(fresh(name), PROJECTING[0], layers=[0])
    report = scale_values(model, batch, progress=False)
    if not scaled:
        model = patch_model(fresh(name), PROJECTING[0], layers=[0])
    lost = (outputs(model, batch) - stock).square().sum(-1) / stock.square().sum(-1)
    assert math.isclose(float(lost.mean()), (report.after if scaled else report.before)[0], rel_tol=1e-4)


def test_padding_does_not_count() -> None:
    """Rows with other numbers at padded places give the same scales."""
    found = []
    for fill in (3, 7):
        batch = batch_of("bert", padded="right")
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, fill)
        model = patch_model(fresh("bert"), "belief")
        scale_values(model, batch, progress=False)
        found.append(squares(model))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_scales_that_do_not_help_are_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_scale, "STEPS", 0)
    model = patch_model(fresh("bert"), "belief")
    report = scale_values(model, batch_of("bert"), progress=False)
    assert report.before == report.after
    assert all(torch.equal(each, torch.ones_like(each)) for each in squares(model) if each is not None)


# ---- Strength 0, forms, caches, saving


# ---- In calibrate and convert


@pytest.mark.parametrize("scale", [True, False])
def test_calibrate_scales_first(scale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(fresh("llama"), PROJECTING[0])
    batches = padded_batches("llama")
    monkeypatch.setattr(value_scale, "TOKENS", batches[0]["input_ids"].numel() + 1)  # the scales read two batches
    report = calibrate(model, batches, fit="gain", scale=scale, progress=False)
    assert in_config(model) == [scale] * len(swaps(model))
    real_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert report.tokens == real_tokens, "the fit reads every batch"
    other = patch_model(fresh("llama"), PROJECTING[0])
    scale_values(other, batches, progress=False)
    if scale:
        assert all(torch.equal(*pair) for pair in zip(squares(model), squares(other), strict=True))


def test_a_calibration_that_fails_leaves_no_scales() -> None:
    model = patch_model(fresh("llama"), PROJECTING[0])
    with refused("real tokens are too few"):
        calibrate(model, [{"input_ids": torch.ones(1, 2, dtype=torch.long)}], progress=False)
    assert squares(model) == [None] * len(swaps(model))


def test_convert_takes_scales_without_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fit of the heads loses more than the scales alone, the scales stay."""
    monkeypatch.setattr(importlib.import_module("hf_attn_swap.conversion.calibrate"), "FITS", ())
    model = fresh("gpt2", torch.float32)
    rows = [{"input_ids": row} for each in padded_batches("gpt2", torch.float32) for row in each["input_ids"]]
    report = convert(model, PROJECTING[0], rows, tokens=64, progress=False)
    assert [step.name for step in report.steps][:2] == ["swap", "fit: scaled values"]
    assert report.steps[1].lost.divergence < report.steps[0].lost.divergence
    assert in_config(model) == [True] * len(swaps(model))


def test_copies_of_peft_are_scaled_too() -> None:
    """PEFT computes with its copy of a swap, and keeps the original beside the copy."""
    model = patch_model(fresh("bert"), PROJECTING[0])
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["attn_swap"]))
    scale_values(model, batch_of("bert"), progress=False)
    found = squares(model)
    assert len(found) > len(sites(model))
    assert all(each is not None for each in found)


# ---- Refused


def test_weights_that_fit_their_scales() -> None:
    model = patch_model(fresh("bert"), PROJECTING[0])
    swaps(model)[1].retrained = True
    with refused("before the training"):
        scale_values(model, batch_of("bert"), progress=False)
    assert squares(model) == [None] * len(swaps(model))


def test_bad_input() -> None:
    with refused("patch_model"):
        scale_values(fresh("bert"), batch_of("bert"), progress=False)
    model = patch_model(fresh("bert"), PROJECTING[0])
    with refused("there are no batches"):
        scale_values(model, [], progress=False)
    with refused("no real token"):
        scale_values(
            model,
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3, dtype=torch.long)},
            progress=False,
        )
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    with refused("not finite"):
        scale_values(model, batch_of("bert"), progress=False)
    assert squares(model) == [None] * len(swaps(model))
