"""Weights that wait on the CPU or on disk (accelerate): every module with parameters is called, so they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.conversion.calibrate import merge_calibration
from tests.contract.cells import DEEP, DEFAULT_CELLS, Cell, label, swap_in
from tests.contract.harness import batch_of, distance, forward, fresh, padding_side, perturb, refused, swaps
from tests.harness.one_swap import has_parameters
from tests.harness.places import turns

pytestmark = pytest.mark.filterwarnings("ignore:The clip cuts away")  # few tokens, so a published gamma cuts much
TOLERANCE = 1e-12
Offload = Callable[[nn.Module, Path], nn.Module]


def _half(model: nn.Module, folder: Path) -> nn.Module:
    """A device map as `device_map="auto"` makes it: half of the layers stay, the others wait on disk."""
    leaves = {name: "cpu" for name, module in model.named_children() if any(True for _ in module.parameters())}
    stack = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    places: dict[str, str] = {}
    for name in leaves:
        _split(model, name, stack, places)
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def _split(model: nn.Module, name: str, stack: str, places: dict[str, str]) -> None:
    if name == stack:
        for index in range(len(model.get_submodule(stack))):
            places[f"{stack}.{index}"] = "disk" if index % 2 else "cpu"
    elif stack.startswith(f"{name}."):
        for child, _ in model.get_submodule(name).named_children():
            _split(model, f"{name}.{child}", stack, places)
    else:
        places[name] = "cpu"


OFFLOADS: dict[str, Offload] = {
    "cpu": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, str(folder), torch.device("cpu")),
    "map": _half,
}


CELLS = [cell for cell in DEFAULT_CELLS if has_parameters(cell)]
WAYS = [(family, offload) for family in DEEP for offload in OFFLOADS]
# Every option on a family and a way to wait, and every way on two options.
cells = pytest.mark.parametrize(
    ("family", "offload", "cell"),
    [(family, OFFLOADS[offload], cell) for (family, offload), cell in turns(WAYS, CELLS)],
    ids=[f"{family}-{offload}-{label(cell)}" for (family, offload), cell in turns(WAYS, CELLS)],
)


@cells
def test_patched_then_offloaded(family: str, cell: Cell, offload: Offload, tmp_path: Path) -> None:
    model, batch = perturb(swap_in(fresh(family), cell[0], **cell[1])), batch_of(family, padded=padding_side(family))
    wanted = forward(model, batch)
    keys = set(model.state_dict())
    offload(model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert distance(forward(model, batch), wanted) <= TOLERANCE
    assert set(model.state_dict()) == keys
    stock = forward(fresh(family), batch)
    assert distance(forward(unpatch_model(model), batch), stock) <= TOLERANCE
    remove_hook_from_module(model, recurse=True)


@cells
def test_offloaded_then_patched(family: str, cell: Cell, offload: Offload, tmp_path: Path) -> None:
    """The swap's parameters start on the device on which the layer computes, not where its weights wait."""
    batch = batch_of(family, padded=padding_side(family))
    wanted = forward(perturb(swap_in(fresh(family), cell[0], **cell[1])), batch)
    model = offload(fresh(family), tmp_path)
    try:
        swap_in(model, cell[0], **cell[1])
    except ValueError as problem:
        assert "patch the model before" in str(problem)  # noqa: PT017  # a block whose forward accelerate has wrapped
        return
    assert not any(parameter.is_meta for swap in swaps(model) for parameter in swap.parameters())
    assert distance(forward(perturb(model), batch), wanted) <= TOLERANCE
    unpatch_model(model)


FITS = [(family, fit) for family in DEEP for fit in ("gain", "map")]


@pytest.mark.parametrize(
    ("family", "fit", "name"), [(*row, name) for row, name in turns(FITS, ["belief_star", "simpletron_resl"])]
)
def test_calibrated(family: str, name: str, fit: str, tmp_path: Path) -> None:
    offload = OFFLOADS["cpu"] if fit == "gain" else _half
    batch = batch_of(family, padded=padding_side(family))
    models = [perturb(patch_model(fresh(family), name)) for _ in range(2)]
    offload(models[1], tmp_path)
    reports = [calibrate(model, [batch], fit=fit, ridge=1e-2, progress=False) for model in models]
    for layer, explained in reports[0].after.items():
        assert reports[1].after[layer] == pytest.approx(explained, rel=1e-9, abs=1e-9)
    assert distance(forward(models[1], batch), forward(models[0], batch)) <= 1e-9  # least squares on few tokens


@pytest.mark.parametrize("family", DEEP)
def test_weights_that_wait_are_not_merged(family: str) -> None:
    model = perturb(patch_model(fresh(family), "belief"))
    cpu_offload(model, torch.device("cpu"))
    calibrate(model, [batch_of(family)], fit="gain", progress=False)
    with refused("holds no plain matrix"):
        merge_calibration(model)
