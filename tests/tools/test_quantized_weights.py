"""Weights that bitsandbytes or torchao rounded: patched afterwards, or a converted checkpoint rounded on loading.

torchao's `Int4WeightOnlyConfig` needs a GPU package; `IntxWeightOnlyConfig` with int4 weights is its form for a CPU.
On a CPU, the first pass of bitsandbytes' 4-bit projections packs their weights in another order, and only that pass
knows the order. The tests therefore read and save such weights before the first pass.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BitsAndBytesConfig, TorchAoConfig

from hf_attn_swap import describe, list_variants, set_strength, unpatch_model
from tests import zoo
from tests.contract.cells import DEEP, OPTION_CELLS, Cell, label, swap_in
from tests.contract.harness import distance, forward, padding_side, perturb, swaps
from tests.harness.one_swap import one_swap

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
WIDER = dict(hidden_size=64, intermediate_size=128)  # bitsandbytes rounds 64 numbers at a time
AUTO = {"bert": AutoModelForMaskedLM, "llama": AutoModelForCausalLM}
REASON = "{} is not installed (the extra `tools`)"


def config(tool: str) -> Any:
    """How to round the weights. A test skips if the tool is missing."""
    name, bits = tool.split()
    pytest.importorskip(name, reason=REASON.format(name))
    if name == "bitsandbytes":
        return BitsAndBytesConfig(
            load_in_8bit=bits == "int8", load_in_4bit=bits == "int4", bnb_4bit_compute_dtype=torch.float32
        )
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if bits == "int8" else IntxWeightOnlyConfig(weight_dtype=torch.int4))


TOOLS = ("bitsandbytes int8", "bitsandbytes int4", "torchao int8", "torchao int4")
tools = pytest.mark.parametrize("tool", TOOLS)
families = pytest.mark.parametrize("family", DEEP)
WITH_MATRICES = [cell for cell in OPTION_CELLS if any(isinstance(each, nn.Linear) for each in one_swap(cell).modules())]
CELLS: list[Cell] = [(name, {}) for name in list_variants()] + [each for each in WITH_MATRICES if each[1]]
cells = pytest.mark.parametrize("cell", CELLS, ids=map(label, CELLS))


def rounded(folder: Path, family: str, tool: str) -> Any:
    """A checkpoint, rounded on loading."""
    return AUTO[family].from_pretrained(folder, quantization_config=config(tool), device_map="cpu").eval()


def batch_of(family: str) -> dict[str, Tensor]:
    return zoo.inputs(family, padded=padding_side(family))


def floats(module: nn.Module) -> Tensor:
    """The weight of a rounded projection as the numbers that it stands for."""
    weight: Any = module.weight
    kind = type(module).__name__
    if kind == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        made: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return made
    if kind == "Linear8bitLt":  # one scale per row, for the whole numbers from -127 to 127
        return weight.data.float() * weight.SCB[:, None] / 127
    return weight.dequantize() if hasattr(weight, "tensor_data_names") else weight


def in_floats(model: Any, family: str) -> Any:
    """The stock model with the numbers that the rounded weights stand for."""
    plain = zoo.build(family, **WIDER)
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(modules.get(name), nn.Linear):
                modules[name].weight.copy_(floats(module))
    return plain


@tools
@families
@cells
def test_patched_after_loading(tool: str, family: str, cell: Cell, tmp_path: Path) -> None:
    """At strength 0 the rounded stock model bit for bit; at strength 1 the variant on the rounded weights."""
    zoo.build(family, **WIDER).save_pretrained(tmp_path)
    model, batch = rounded(tmp_path, family, tool), batch_of(family)
    plain = in_floats(model, family)
    stock = forward(model, batch)
    swap_in(model, cell[0], **cell[1], strength=0.0)
    assert torch.equal(forward(model, batch), stock)
    found = forward(set_strength(perturb(model), 1.0), batch)
    unpatched = forward(unpatch_model(copy.deepcopy(model)), batch)
    assert torch.equal(unpatched, stock)
    wanted = forward(perturb(swap_in(plain, cell[0], **cell[1])), batch)
    if tool.startswith("torchao"):
        assert distance(found, wanted) <= 1e-4
    elif cell[0] != "softmax":  # bitsandbytes rounds activations too: to int8, or to bf16
        assert distance(found, wanted) < 0.5 * distance(found, stock)
    assert (cell[0] == "softmax") == (distance(found, stock) <= 1e-4)


@tools
@families
@cells
def test_converted_checkpoint(tool: str, family: str, cell: Cell, tmp_path: Path) -> None:
    """Rounding a converted checkpoint gives what patching the rounded stock checkpoint gives."""
    batch = batch_of(family)
    zoo.build(family, **WIDER).save_pretrained(tmp_path / "stock")
    wanted = forward(perturb(swap_in(rounded(tmp_path / "stock", family, tool), cell[0], **cell[1])), batch)
    perturb(swap_in(zoo.build(family, **WIDER), cell[0], **cell[1])).save_pretrained(tmp_path / "converted")
    model = rounded(tmp_path / "converted", family, tool)
    assert len(swaps(model)) == zoo.LAYERS
    swapped_matrices = [each for swap in swaps(model) for each in swap.modules() if isinstance(each, nn.Linear)]
    if not swapped_matrices:
        assert torch.equal(forward(model, batch), wanted)
    else:  # the tool rounds the matrices of the swap too
        assert distance(forward(model, batch), wanted) < 0.5 * distance(
            forward(set_strength(model, 0.0), batch), wanted
        )


@tools
@families
@cells
def test_saved_and_loaded(tool: str, family: str, cell: Cell, tmp_path: Path) -> None:
    batch = batch_of(family)
    perturb(swap_in(zoo.build(family, **WIDER), cell[0], **cell[1])).save_pretrained(tmp_path / "converted")
    model = rounded(tmp_path / "converted", family, tool)
    model.save_pretrained(tmp_path / "rounded")
    again = AUTO[family].from_pretrained(tmp_path / "rounded", device_map="cpu").eval()
    assert str(describe(again)) == str(describe(model))
    assert torch.equal(forward(again, batch), forward(model, batch))
