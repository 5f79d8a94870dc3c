"""Calibration, for families and variants from the registries: exact where it must be, and equal to least squares."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.conversion.calibrate import Target
from hf_attn_swap.layer.calibration import FITS
from hf_attn_swap.layer.registry import parse, tiny_options
from hf_attn_swap.patch import build_swap, need_installation
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.cells import FAMILY_NAMES, SINGLES
from tests.contract.harness import (
    TEXT_FAMILIES,
    assert_identical,
    batch_of,
    distance,
    forward,
    fresh,
    neutral,
    perturb,
    refused,
    run,
    swaps,
)

from ..harness.places import in_turn
from .batches import batches


def fit(model: Any, name: str, **arguments: Any) -> Any:
    return calibrate(model, batches(name), progress=False, **arguments)


@in_turn(FAMILY_NAMES, SINGLES, times=2)
def test_every_variant(name: str, variant: str) -> None:
    """The map explains at least as much as the gain, and that as much as nothing; strength 0 stays the stock model."""
    stock, batch = fresh(name), batch_of(name)
    wanted = run(stock, batch)
    model = perturb(patch_model(fresh(name), variant, strength=0.3, **tiny_options(variant)))
    reports = {kind: fit(model, name, fit=kind, ridge=0.0) for kind in FITS}
    gain, mapped = (reports[kind] for kind in FITS)
    for layer, befores in gain.before.items():
        for before, scaled, full in zip(befores, gain.after[layer], mapped.after[layer], strict=True):
            assert before - 1e-9 <= scaled <= full + 1e-9 <= 1 + 2e-9
    assert all(row.strength in (None, 0.3) for row in describe(model).rows)
    assert all("calibrated (map)" in row.runs for row in describe(model).rows if row.strength is not None)
    between = forward(model, batch)
    assert distance(between, forward(set_strength(model, 1.0), batch)) > 1e-9 or neutral(model)
    assert_identical(run(set_strength(model, 0.0), batch), wanted)
    assert_identical(run(unpatch_model(model), batch), wanted)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_softmax_needs_nothing(name: str) -> None:
    model = patch_model(fresh(name), "softmax")
    wanted = forward(model, batch_of(name))
    fit(model, name, fit="gain", ridge=0.0)
    assert all((swap.calibration.weight - 1).abs().max() < 1e-12 for swap in swaps(model))
    assert distance(forward(model, batch_of(name)), wanted) < 1e-12
    fit(model, name, fit="map", ridge=0.0)
    for swap in swaps(model):
        assert (swap.calibration.weight - torch.eye(swap.geometry.head_dim)).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["albert", "bert"])
@pytest.mark.parametrize("alpha", [0.25, 0.5])
def test_a_skip_is_undone_behind_layer_norm(name: str, alpha: float) -> None:
    """alpha' = 0 reads what the stock model reads; LayerNorm takes the factor out, the map's bias that of b_o."""
    stock = fresh(name)
    for module in stock.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.normal_(module.bias, std=0.3, generator=torch.Generator().manual_seed(1))
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.0  # it would see the factor
    wanted = forward(stock, batch_of(name))
    model = patch_model(stock, "modern_hopfield", alpha=alpha, alpha_prime=0.0)
    assert distance(forward(model, batch_of(name)), wanted) > 1e-3
    fit(model, name, ridge=0.0)
    assert distance(forward(model, batch_of(name)), wanted) < 1e-6


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "opt", "vit"])
@pytest.mark.parametrize("variant", ["outeffhop", "belief", "gated", "entmax15"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_is_least_squares(name: str, variant: str, ridge: float) -> None:
    """The last layer's map against numpy, from heads that this test records by itself on the stock model's stream.

    A ridge of r is r / D times the square of the head's features, on the matrix and not on the constant.
    """
    model = patch_model(fresh(name), variant, **tiny_options(variant))
    recorded = _record(model, name)
    fit(model, name, ridge=ridge, scale=False)
    last = swaps(model)[-1]
    width = last.geometry.head_dim
    for head in range(last.geometry.heads):
        features, wanted = (each[:, head] for each in recorded)
        root = (ridge / width * np.square(features).sum()) ** 0.5
        features = np.concatenate([features, np.ones((len(features), 1))], 1)
        penalty = root * np.eye(width, width + 1)  # rows that pull the matrix, and not the constant, to 0
        both = np.concatenate([features, penalty]), np.concatenate([wanted, np.zeros((width, width))])
        solution = np.linalg.lstsq(*both, rcond=None)[0]
        got = torch.cat([last.calibration.weight[head], last.calibration.bias[head][None]]).detach().numpy()
        assert np.abs(features @ (got - solution)).max() < 1e-7


def _record(model: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The variant's and the ordinary heads of the last layer, (N,H,D), every layer handing the ordinary ones on."""
    ours, theirs = [], []

    def collect(module: Any, args: Any, output: Any) -> Any:
        inputs, _, sdpa, _ = args
        mask, causal = inputs.masks.dense()
        ordinary = sdpa((inputs.query, inputs.key, inputs.value), mask, causal)
        if module is swaps(model)[-1]:
            ours.append(output[0].flatten(0, 1))
            theirs.append(ordinary.flatten(0, 1))
        return ordinary, output[1]

    handles = [swap.register_forward_hook(collect) for swap in swaps(model)]
    for batch in batches(name):
        forward(model, batch)
    for handle in handles:
        handle.remove()
    return torch.cat(ours).numpy(), torch.cat(theirs).numpy()


@in_turn(TEXT_FAMILIES, ["simpletron_resl", "modern_hopfield", "belief"])
def test_padding_is_left_out(name: str, variant: str) -> None:
    padded = batches(name, padded="right")  # on the left, GPT-2 would count other positions
    single = [
        {key: value[row : row + 1][:, batch["attention_mask"][row].bool()] for key, value in batch.items()}
        for batch in padded
        for row in range(len(batch["attention_mask"]))
    ]
    found = []
    for each in (padded, single):
        model = patch_model(fresh(name), variant, **tiny_options(variant))
        calibrate(model, iter(each), fit="gain", progress=False)
        found.append(torch.cat([swap.calibration.weight for swap in swaps(model)]))
    assert (found[0] - found[1]).abs().max() < 1e-7


def first_heads(model: Any) -> torch.Tensor:
    """What the first swapped layer hands to W_o: (B,L,H,D)."""
    seen: list[torch.Tensor] = []
    handle = swaps(model)[0].register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    forward(model, batch_of("bert"))
    handle.remove()
    return seen[0]


READ_OUT = [  # without W_o the heads in between are the ordinary ones, and the variant's wait beside them
    (name, strength) for name in SINGLES for strength in (1.0, 0.5) if strength == 1 or VARIANTS[name].keeps_projection
]


@pytest.mark.parametrize(("variant", "strength"), READ_OUT)
def test_a_fit_is_applied_head_by_head(variant: str, strength: float) -> None:
    """(1 - s) A + s g A for gains, in between too; of a variant without scores, A is its own part of the heads."""
    ordinary = first_heads(patch_model(fresh("bert"), "softmax"))
    model = perturb(patch_model(fresh("bert"), variant, **tiny_options(variant)))
    whole = first_heads(model)
    plain = first_heads(set_strength(model, strength))
    own = whole if VARIANTS[variant].replaces else plain
    if VARIANTS[variant].replaces:
        assert distance(plain, (1 - strength) * ordinary + strength * whole) < 1e-7  # the strength is held in fp32
    fit(model, "bert", fit="gain", scale=False)
    gains = torch.tensor([0.5, 1.5, -2.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        swaps(model)[0].calibration.weight.copy_(gains)
    wanted = plain + strength * (gains[:, None] - 1) * own
    assert distance(first_heads(model), wanted) < 1e-11


def test_labels_are_not_read_and_modes_stay() -> None:
    model = patch_model(fresh("bert"), "modern_hopfield").train()
    model.bert.encoder.layer[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    report = calibrate(model, [{**batch, "labels": "none of yours"} for batch in batches("bert")], progress=False)
    assert modes.items() <= {name: module.training for name, module in model.named_modules()}.items()
    assert report.lengths == (6, 6)
    assert "map fitted to softmax on 144 tokens" in str(report)


def test_refused() -> None:
    model = patch_model(fresh("bert"), "simpletron_resl")
    with refused("not patched"):
        fit(fresh("bert"), "bert")
    with refused("there are no batches"):
        calibrate(model, [], progress=False)
    with refused("a batch is a dict of tensors", "got Tensor"):
        calibrate(model, [torch.ones(2, 3)], progress=False)
    with refused("2 real tokens are too few"):
        calibrate(model, [{"input_ids": torch.ones(1, 2, dtype=torch.long)}], progress=False)
    with refused("fit must be one of 'gain', 'map'"):
        fit(model, "bert", fit="full")
    with refused("ridge must be at least 0"):
        fit(model, "bert", ridge=-1.0)
    with refused("drops the read-out"):
        fit(patch_model(fresh("bert"), "modern_hopfield", alpha=1.0), "bert")
    square = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    with refused("does not say which of (2, 6) tokens are real"):
        calibrate(model, [{**batch_of("bert"), "attention_mask": square}], progress=False)
    assert all(swap.calibration is None and swap.strength == 1 for swap in swaps(model))


def test_activations_that_are_not_finite() -> None:
    """The model keeps the calibration it had."""
    model = perturb(patch_model(fresh("bert"), "simpletron_resl"))
    fit(model, "bert")
    kept = swaps(model)[0].calibration
    torch.nn.init.constant_(model.bert.encoder.layer[0].attention.self.value.weight, float("nan"))
    with refused("activations are not finite"):
        fit(model, "bert")
    assert swaps(model)[0].calibration is kept


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_skip_that_stays_is_said(name: str) -> None:
    """A fit undoes the skip where LayerNorm follows, and says where it cannot."""
    stays = name not in ("albert", "bert")
    for options, left in (({}, 0.5 if stays else 0.0), ({"alpha": 0.0}, 0.0)):
        model = patch_model(fresh(name), "modern_hopfield", **options)
        report = calibrate(model, [batch_of(name)], progress=False)
        assert report.left == left
        assert ("no fit can undo" in str(report)) == (left == 0.5)


@pytest.mark.parametrize("weakest", [1e-1, 1e-6])
def test_the_constant_stays_moderate(weakest: float) -> None:
    """A well conditioned W_o is inverted exactly. An ill conditioned W_o would give a constant of 10^5 times b_o."""
    model = patch_model(fresh("vit", torch.float32), "modern_hopfield")
    layer = need_installation(model).layers()[0]
    site = layer.site
    projection = site.container.get_submodule(site.family.output)
    left, _, right = torch.linalg.svd(projection.weight.detach().double())
    sizes = torch.logspace(0, math.log10(weakest), left.shape[0], dtype=torch.float64)
    with torch.no_grad():
        projection.weight.copy_(left @ torch.diag(sizes) @ right)
        projection.bias.copy_(left.sum(1))  # as much of b_o in every direction
    target = Target(layer, build_swap(layer, parse("softmax"), {"softmax": {}}))
    bias = projection.bias.detach().double()
    constant = target.offset.double() / (target.factor - 1)
    assert target.factor != 1
    if weakest == 1e-1:
        assert torch.allclose(constant @ projection.weight.double().T, bias, atol=1e-4)
    else:
        assert constant.norm() < 100 * bias.norm()
        reached, strong = (constant @ projection.weight.double().T) @ left, sizes > 0.1
        assert torch.allclose(reached[strong], (bias @ left)[strong], rtol=0.02)
