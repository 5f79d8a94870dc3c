"""A device without float64 (Apple's): every tensor that is summed in float64 moves to the CPU first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import patch_model
from hf_attn_swap.analysis import record
from hf_attn_swap.conversion import Losses, calibrate, merge_calibration
from hf_attn_swap.quantization import fake_w8a8
from tests.contract.cells import DEEP
from tests.contract.harness import batch_of, distance, forward, fresh, padding_side, perturb
from tests.conversion.distilling import distiller, loss_of
from tests.harness.places import one_per_place, turns

pytestmark = pytest.mark.filterwarnings("ignore:The clip cuts away")  # few tokens, so a published gamma cuts much
OFF_THE_DEVICE = (Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.__float__)


class NoFloat64Error(RuntimeError):
    """What torch says on such a device."""


class Narrow(Tensor):
    """A tensor on a device without float64: what is computed from it is on the device too, until `.cpu()`."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, kinds, args, kwargs or {})
        if func in OFF_THE_DEVICE or (func is Tensor.to and "cpu" in args):
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        if isinstance(result, Narrow) and result.dtype in (torch.float64, torch.complex128):
            raise NoFloat64Error(f"{func}: this device has no float64")
        return result


def narrow(model: Any) -> Any:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().as_subclass(Narrow)))
    return model


def pair(family: str, variant: str) -> tuple[Any, Any]:
    """The same swapped model on such a device and on the CPU."""
    made = [perturb(patch_model(fresh(family, torch.float32), variant)) for _ in range(2)]
    return narrow(made[0]), made[1]


def close(got: Any, wanted: Any) -> bool:
    return bool(distance(torch.as_tensor(got), torch.as_tensor(wanted)) <= 1e-4)


def test_the_device_is_strict() -> None:
    there = torch.ones(2).as_subclass(Narrow)
    for widened in (Tensor.double, lambda x: x.to(torch.float64), lambda x: x * torch.ones(2, dtype=torch.float64)):
        with pytest.raises(NoFloat64Error, match="no float64"):
            widened(there * 2)
    assert (there * 2).cpu().double().dtype == torch.float64


@pytest.mark.parametrize(
    ("variant", "family", "fit"),
    [(variant, *way) for variant, way in turns(one_per_place(), list(zip(DEEP, ["map", "gain"], strict=True)))],
)
def test_calibration_and_merge(family: str, variant: str, fit: str) -> None:
    batch = batch_of(family, torch.float32, padded=padding_side(family))
    outputs, reasons = [], []
    for model in pair(family, variant):
        calibrate(model, [batch], fit=fit, ridge=0.1, progress=False)
        outputs.append(forward(model, batch).as_subclass(Tensor))
        try:
            merge_calibration(model)
            outputs.append(forward(model, batch).as_subclass(Tensor))
        except ValueError as problem:
            reasons.append(str(problem))
    half = len(outputs) // 2
    assert all(close(got, wanted) for got, wanted in zip(outputs[:half], outputs[half:], strict=True))
    assert len(set(reasons)) == len(reasons) / 2


def fake_bits(model: Any, batch: dict[str, Any]) -> list[float]:
    with fake_w8a8(model, [batch]) as quantized:
        out = forward(model, batch)
    assert math.isfinite(float(out.sum()))
    return [point.step for point in quantized]


def diagnostics(model: Any, batch: dict[str, Any]) -> dict[str, float]:
    with record(model) as recording:
        forward(model, batch)
    return {name: value for name, value in recording.summary().items() if value is not None}


@pytest.mark.parametrize(("family", "watch"), list(zip(DEEP, (fake_bits, diagnostics), strict=True)))
@pytest.mark.parametrize("variant", ["belief", "modern_hopfield", "simpletron_resl"])
def test_watching(family: str, variant: str, watch: Callable[..., Any]) -> None:
    batch = batch_of(family, torch.float32, padded=padding_side(family))
    got, wanted = (watch(model, batch) for model in pair(family, variant))
    assert got == pytest.approx(wanted, rel=0.05, nan_ok=True)


@pytest.mark.parametrize("family", DEEP)
def test_the_loss_of_layers(family: str, tmp_path: Path) -> None:
    batch = batch_of(family, torch.float32, padded=padding_side(family))
    how = {"losses": Losses(logits=0.0, layers=1.0), "trainable": "body"}
    losses = [loss_of(distiller(model, tmp_path, family, **how), batch) for model in pair(family, "belief")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
