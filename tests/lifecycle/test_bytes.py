"""Weights quantised to 4 bits are bytes: an attention module without one floating-point parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.conversion.calibrate import merge_calibration
from hf_attn_swap.families import sites
from tests.contract.cells import DEEP
from tests.contract.harness import batch_of, distance, forward, fresh, padding_side, perturb, refused, swaps
from tests.harness.places import turns

pytestmark = pytest.mark.filterwarnings("ignore:The clip cuts away")  # few tokens, so a published gamma cuts much
TOLERANCE = 1e-12


class Bytes(nn.Linear):
    """A Linear as bitsandbytes keeps one: two 4-bit steps in a byte, in a column, and a scale that is no parameter."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__(1, 1, bias=False)
        weight = stock.weight.detach()
        self.in_features, self.out_features = stock.in_features, stock.out_features
        self.scale = float(weight.abs().max()) / 7
        steps = ((weight / self.scale).round().clamp(-7, 7) + 7).to(torch.uint8).flatten()
        self.weight = nn.Parameter((steps[::2] * 16 + steps[1::2])[:, None], requires_grad=False)
        self.bias = stock.bias  # as bitsandbytes: a bias is not quantised

    def dense(self, dtype: torch.dtype) -> Tensor:
        steps = torch.stack([self.weight[:, 0] // 16, self.weight[:, 0] % 16], 1).flatten()
        return ((steps.to(dtype) - 7) * self.scale).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dense(x.dtype), self.bias)


def models(family: str, dtype: torch.dtype = torch.float64, *, biases: bool = True) -> tuple[Any, Any]:
    """A model with bytes in its attention, and one with the same numbers in floating point."""
    pair = []
    for quantised in (True, False):
        model = fresh(family, dtype)
        model.config.dtype = dtype  # as `from_pretrained` leaves it
        for site in sites(model):
            for name, module in list(site.container.named_modules()):
                if isinstance(module, nn.Linear):
                    module.bias = module.bias if biases else None
                    made = Bytes(module)
                    if not quantised:
                        module.weight = nn.Parameter(made.dense(dtype))
                    site.container.set_submodule(name, made if quantised else module)
        pair.append(model)
    return pair[0], pair[1]


FITS = [(family, fit, biases) for family in DEEP for fit, biases in (("gain", False), ("map", True))]


@pytest.mark.parametrize(
    ("family", "fit", "biases", "variant"),
    [(*row, variant) for row, variant in turns(FITS, ["belief_star", "simpletron_resl"])],
)
def test_patched_and_calibrated(family: str, variant: str, fit: str, biases: bool) -> None:
    batch = batch_of(family, padded=padding_side(family))
    results = []
    for model in models(family, biases=biases):
        stock = forward(model, batch)
        perturb(patch_model(model, variant))
        before = forward(model, batch)
        report = calibrate(model, [batch], fit=fit, ridge=1e-2, progress=False)
        results.append((before, forward(model, batch), report))
        assert torch.equal(forward(unpatch_model(model), batch), stock)
    for got, wanted in zip(results[0][:2], results[1][:2], strict=True):
        assert distance(got, wanted) <= TOLERANCE * 1e3  # least squares on few tokens
    for number, explained in results[0][2].after.items():
        assert explained == pytest.approx(results[1][2].after[number], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swap_has_the_dtype_and_the_device_of_the_model(family: str, dtype: torch.dtype) -> None:
    model = models(family, dtype, biases=False)[0]
    llama_like = [parameter for site in sites(model) for parameter in site.core.parameters()]
    assert llama_like
    assert not any(parameter.is_floating_point() for parameter in llama_like)
    patch_model(model, "gated")
    assert {parameter.dtype for swap in swaps(model) for parameter in swap.parameters()} == {dtype}
    unpatch_model(model)
    for site in sites(model):
        site.container.to("meta")
    patch_model(model, "gated")
    assert all(parameter.is_meta for swap in swaps(model) for parameter in swap.parameters())


@pytest.mark.parametrize("family", DEEP)
def test_bytes_are_not_merged(family: str) -> None:
    model = perturb(patch_model(models(family)[0], "belief"))
    calibrate(model, [batch_of(family)], fit="gain", progress=False)
    with refused("holds no plain matrix"):
        merge_calibration(model)
