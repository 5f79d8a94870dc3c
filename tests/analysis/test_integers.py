"""Real integers compute what the formula says, are saved and loaded again, and refuse what they cannot round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.quantization import Int8Linear, input_ranges, int8_loaded, int8_static, linear
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, padding_side, perturb
from tests.harness.places import turns

LINEAR = [name for name in FAMILY_NAMES if name != "gpt2"]
KINDS = [torch.uint8, torch.int8, None]
LOADS = "compressed-tensors is not installed (extra quant)"


def by_hand(x: Tensor, weight: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """PyTorch's own fake quantisation, in fp64 where it multiplies."""
    step = (high - low) / 255
    rounded = torch.fake_quantize_per_tensor_affine(x, step, round(-low / step), 0, 255)
    steps = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(steps), dtype=torch.int32)
    rows = torch.fake_quantize_per_channel_affine(weight, steps, zeros, 0, -127, 127)
    return F.linear(rounded.double(), rows.double(), bias.double())


def quantised(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    return int8_static(model, input_ranges(model, [batch]), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (2, 3), (2, 40)])
def test_equals_fake_quantisation(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], kind: Any) -> None:
    monkeypatch.setattr(linear, "integers", lambda: kind)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*shape, 24), torch.randn(7, 24), torch.randn(7)
    low, high = -0.9, 2.2  # some inputs are cut off
    got = Int8Linear.rounded(weight, bias, (low, high))(x)
    wanted = by_hand(x, weight, bias, low, high)
    assert got.dtype == x.dtype
    assert (got.double() - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_way_gives_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, symmetric: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    made = Int8Linear.rounded(weight, None, (-4.0, 5.0), symmetric=symmetric)
    results = []
    for kind in KINDS:
        monkeypatch.setattr(linear, "integers", lambda kind=kind: kind)
        results.append(made(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    stock = F.linear(x.float(), weight.float())
    assert (results[0].float() - stock).norm() < 0.05 * stock.norm()


def test_an_inexact_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch._int_mm

    def saturates(a: Tensor, b: Tensor) -> Tensor:
        """Adds pairs of products in 16 bits, as processors without VNNI do."""
        if a.dtype != torch.uint8:
            return exact(a, b)
        pairs = a.int()[:, :, None] * b.int()[None]
        return (pairs[:, ::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32)

    quickest = [torch.uint8, torch.int8, None]
    monkeypatch.setattr(linear, "_seconds", quickest.index)
    monkeypatch.setattr(torch, "_int_mm", saturates)
    assert linear.integers.__wrapped__() == torch.int8

    def missing(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert linear.integers.__wrapped__() is None


@pytest.mark.parametrize("autocast", [False, True])
def test_floating_point_gives_the_sums_of_integers(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    """Sums above 2^24, which fp32 would round, and products that autocast would round to bf16."""
    torch.manual_seed(0)
    x, weight = torch.rand(5, 1700) + 0.5, torch.rand(7, 1700) + 0.5
    made = Int8Linear.rounded(weight, None, (0.0, 1.5))
    outputs = []
    for kind in (torch.int8, None):
        monkeypatch.setattr(linear, "integers", lambda kind=kind: kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs.append(made(x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("name", "variant"), turns(LINEAR, [None, "outeffhop"]))
def test_model_stays_close(name: str, variant: str | None) -> None:
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32, padded=padding_side(name))
    if variant is not None:
        perturb(patch_model(model, variant))
    wanted = forward(model, batch)
    got = forward(quantised(model, batch), batch)
    assert 0 < (got - wanted).norm() < 0.2 * wanted.norm()


def test_ranges_are_running_means_of_passes() -> None:
    model = fresh("albert", torch.float32)  # its one block runs in every layer
    batches = [batch_of("albert", torch.float32, seed=seed) for seed in (0, 1)]
    ends: dict[str, list[float]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, path=path: ends.setdefault(path, []).extend(map(float, (args[0].min(), args[0].max())))
            )
    result = input_ranges(model, batches)
    assert result
    assert any(len(ends[path]) > 4 for path in result)
    for path, (low, high) in result.items():
        half = len(ends[path]) // 2
        first, second = ends[path][:half], ends[path][half:]
        assert low == pytest.approx(0.9 * min(0.0, *first) + 0.1 * min(0.0, *second), rel=1e-6)
        assert high == pytest.approx(0.9 * max(0.0, *first) + 0.1 * max(0.0, *second), rel=1e-6)


def test_unreached_and_unnamed_modules_stay() -> None:
    model, batch = fresh("llama", torch.float32), batch_of("llama", torch.float32)
    ranges = input_ranges(model, [batch])
    kept = sorted(ranges)[0]
    del ranges[kept]
    int8_static(model, ranges)
    assert type(model.get_submodule(kept)) is nn.Linear
    assert all(isinstance(model.get_submodule(path), Int8Linear) for path in ranges)
    assert kept in model.config.quantization_config["ignore"]
    assert "lm_head" in model.config.quantization_config["ignore"]


def loaded(folder: Path, dtype: torch.dtype, swapped: bool) -> Any:
    """The model of a folder, running integers."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values())
    return (model if swapped else int8_loaded(model)).eval()


@pytest.mark.parametrize(
    ("variant", "dtype"),
    turns([None, "gated", "simpletron_resl", "modern_hopfield+belief"], [torch.float32, torch.bfloat16]),
)
def test_loads_again(tmp_path: Path, variant: str | None, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors", reason=LOADS)
    fresh("llama", dtype).save_pretrained(tmp_path / "stock")  # loaded, rotary frequencies are in fp32, as they will be
    model, batch = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=dtype), batch_of("llama", dtype)
    if variant is not None:
        perturb(patch_model(model, variant))
    got = forward(quantised(model.eval(), batch), batch)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        model = loaded(folder, dtype, variant is not None)
        assert any(isinstance(module, Int8Linear) for module in model.modules())
        assert torch.equal(forward(model, batch), got)


def test_other_programs_compute_the_same_rounding(tmp_path: Path) -> None:
    """compressed-tensors' own forward pass, in floating point."""
    pytest.importorskip("compressed_tensors", reason=LOADS)
    model, batch = fresh("llama", torch.float32), batch_of("llama", torch.float32)
    got = forward(quantised(model, batch), batch)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (forward(plain, batch) - got).norm() < 1e-5 * got.norm()
    with pytest.raises(ValueError, match="before the model runs"):
        int8_loaded(plain)


def test_a_symmetric_scheme_has_no_zero_points(tmp_path: Path) -> None:
    """An engine stops at tensors that the scheme in the config does not have."""
    pytest.importorskip("compressed_tensors", reason=LOADS)
    model, batch = fresh("llama", torch.float32), batch_of("llama", torch.float32)
    got = forward(quantised(model, batch, symmetric=True), batch)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        assert not any("zero_point" in name for name in load_file(folder / "model.safetensors"))
        model = loaded(folder, torch.float32, swapped=False)
        assert torch.equal(forward(model, batch), got)


def refused(name: str) -> tuple[Any, Any, str]:
    """A model, ranges, and what the error says."""
    model, batch = fresh("llama", torch.float32), batch_of("llama", torch.float32)
    ranges = input_ranges(model, [batch])
    path = sorted(ranges)[0]
    module: Any = model.get_submodule(path)
    if name == "none":
        return model, {}, "no ranges"
    if name == "head":
        return model, ranges | {"lm_head": (-1.0, 1.0)}, "'lm_head' is no projection"
    if name == "range":
        return model, ranges | {path: (1.0, 2.0)}, "finite numbers around 0"
    if name == "twice":
        return int8_static(model, ranges), ranges, "rounded weights already"
    if name == "hooks":
        module.register_forward_hook(lambda *args: None)
        return model, ranges, "has hooks"
    if name == "offloaded":
        module.to("meta")
        return model, ranges, "offloaded"
    if name == "not finite":
        module.weight.data[0, 0] = torch.nan
        return model, ranges, "not finite"
    if name == "tied":
        others = [path for path in ranges if path.endswith("q_proj")]
        model.get_submodule(others[1]).weight = model.get_submodule(others[0]).weight
        return model, ranges, "shares its weights"
    assert name == "adapters"
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    return adapted, ranges, "merge_and_unload"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
@pytest.mark.parametrize(
    "name", ["none", "head", "range", "twice", "hooks", "offloaded", "not finite", "tied", "adapters"]
)
def test_refused_and_unchanged(name: str) -> None:
    model, ranges, says = refused(name)
    before = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(ValueError, match=says):
        int8_static(model, ranges)
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_ranges_need_evaluation_and_finite_inputs() -> None:
    model, batch = fresh("llama", torch.float32), batch_of("llama", torch.float32)
    with pytest.raises(ValueError, match=r"model\.eval"):
        input_ranges(model.train(), [batch])
    model.eval().get_input_embeddings().weight.data[:] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        input_ranges(model, [batch])
