"""Fake 8 bits: by hand on plain numbers, on every family with every variant, and nothing left behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    Qwen2MoeConfig,
)

from hf_attn_swap import patch_model
from hf_attn_swap.quantization import (
    Int8Linear,
    Point,
    fake_w8a8,
    input_ranges,
    int8_dynamic,
    int8_loaded,
    int8_static,
    machine_w8a8,
    points,
)
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, distance, forward, fresh, padding_side, perturb
from tests.harness.places import one_per_place, turns

CELLS = [*((name, None) for name in FAMILY_NAMES), *(("llama", variant) for variant in one_per_place())]


def point(low: float, high: float) -> Point:
    return Point("x", low=low, high=high, seen=True)


def test_rounding_by_hand() -> None:
    tensor = torch.tensor([-1.0, -0.013, 0.0, 0.007, 0.013, 1.55, 9.0])
    wanted = [-1.0, -0.01, 0.0, 0.01, 0.01, 1.55, 1.55]  # step 0.01, zero point 100, the last one clipped
    assert point(-1.0, 1.55).apply(tensor).tolist() == pytest.approx(wanted, abs=1e-6)
    assert point(0.0, 0.0).apply(torch.zeros(3)).tolist() == [0.0] * 3


def test_range_is_a_running_mean_that_holds_zero() -> None:
    seen = Point("x")
    for batch in ([2.0, 4.0], [-1.0, 14.0]):
        seen.observe(torch.tensor(batch), 0.9)
    assert (seen.low, seen.high) == pytest.approx((0.9 * 0 + 0.1 * -1, 0.9 * 4 + 0.1 * 14))


@pytest.mark.parametrize(("name", "variant"), CELLS)
def test_close_while_inside_and_gone_afterwards(name: str, variant: str | None) -> None:
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32, padded=padding_side(name))
    if variant is not None:
        perturb(patch_model(model, variant))
    wanted = forward(model, batch)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with fake_w8a8(model, [batch, batch]) as tensors:
        inside = forward(model, batch)
    assert not torch.equal(inside, wanted)
    linear = variant is not None and variant.startswith("simpletron")
    kinds = {point.name.rpartition(".")[2] for point in tensors}
    assert {"weight", "output", "input", "context"} <= kinds
    assert ({"scores", "probabilities"} <= kinds) != linear
    assert "normalized" not in kinds, "the weights are rounded once, as they multiply the values"
    assert {"query", "key"} <= kinds or name != "llama"
    assert all(math.isfinite(point.step) and point.low <= 0 <= point.high for point in tensors)
    assert torch.equal(forward(model, batch), wanted)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_everything_lies_on_its_grid(name: str) -> None:
    """What leaves a projection, and what goes down the residual stream, has at most 256 values."""
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32)
    seen: dict[str, torch.Tensor] = {}
    with fake_w8a8(model, [batch]):
        handles = []
        for path, module in model.base_model.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm) and "attn_swap" not in path:

                def keep(
                    _: Any,
                    args: Any,
                    output: torch.Tensor,
                    path: str = path,
                    norm: bool = isinstance(module, nn.LayerNorm),
                ) -> None:
                    seen[path] = output
                    if norm:
                        seen[f"{path}.input"] = args[0]

                handles.append(module.register_forward_hook(keep))
            if isinstance(module, nn.Linear):
                steps = (module.weight / (module.weight.abs().max() / 127)).detach()
                assert torch.allclose(steps, steps.round(), atol=1e-3)
        forward(model, batch)
        for handle in handles:
            handle.remove()
    assert seen
    assert all(len(value.unique()) <= 256 for value in seen.values())


# ---- What machines run: inputs and weights of linear maps.


@pytest.mark.parametrize(("name", "variant"), CELLS)
def test_as_machines_run_it(name: str, variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close while inside, next to nothing with many levels in fp64, and gone afterwards."""
    model, batch = fresh(name, torch.float64), batch_of(name, torch.float64, padded=padding_side(name))
    if variant is not None:
        perturb(patch_model(model, variant))
    wanted, weights = forward(model, batch), {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with machine_w8a8(model, [batch, batch]) as tensors:
        inside = forward(model, batch)
    assert not torch.equal(inside, wanted)
    assert {point.name.rpartition(".")[2].partition(",")[0] for point in tensors} == {"weight", "input"}
    monkeypatch.setattr(points, "LEVELS", 2**20 - 1)
    monkeypatch.setattr(points, "HALF", 2**20 - 1)
    with machine_w8a8(model, [batch]):
        assert (forward(model, batch) - wanted).norm() < 1e-3 * wanted.norm()
    assert torch.equal(forward(model, batch), wanted)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_machine_reads_256_values_and_rows_with_a_step_each(name: str) -> None:
    """The ranges hold all that the batches gave, outputs are wide, and the task head is as it was."""
    model, batches = fresh(name, torch.float32), [batch_of(name, torch.float32, seed=seed) for seed in (0, 1)]
    base = {id(module) for module in model.base_model.modules()}
    inside, outside = [], []
    with machine_w8a8(model, batches) as tensors:
        handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                seen = inside if id(module) in base else outside
                handles.append(
                    module.register_forward_hook(lambda m, args, out, seen=seen: seen.append((m, args[0], out)))
                )
        forward(model, batches[1])
        for handle in handles:
            handle.remove()
        for module, x, out in inside:
            assert len(x.unique()) <= 256 < len(out.unique()) or out.numel() < 600
            rows = module.weight if isinstance(module, nn.Linear) else module.weight.T
            steps = rows / (rows.abs().amax(1, keepdim=True) / 127)
            assert torch.allclose(steps, steps.round(), atol=1e-3)
            assert not isinstance(module, nn.Linear) or not torch.allclose(
                *((rows.abs().amax(1)[:2] / 127).split(1)), rtol=1e-6
            )
    assert inside
    assert outside
    kept = dict(fresh(name, torch.float32).named_parameters())
    assert all(torch.equal(parameter, kept[key]) for key, parameter in model.named_parameters())
    assert all(point.low < 0 < point.high for point in tensors if point.name.endswith("weight"))


def test_rows_by_hand() -> None:
    weight = torch.tensor([[127.0, 0.4, -3.6], [0.0, 0.0, 0.0], [1.27, 0.014, -0.5]])
    wanted = torch.tensor([[127.0, 0.0, -4.0], [0.0, 0.0, 0.0], [1.27, 0.01, -0.5]])
    assert torch.allclose(points.rounded_rows(weight, 0), wanted, atol=1e-6)
    assert torch.allclose(points.rounded_rows(weight.T, 1), wanted.T, atol=1e-6)


@pytest.mark.parametrize(("variant", "own"), [("belief_star", 3), ("gated", 0), ("modern_hopfield+gated", 0)])
def test_the_head_and_gates_stay_as_they_are(variant: str, own: int) -> None:
    """A second output projection is quantised in each of three layers, a gate and a tied head are not."""
    model, batch = fresh("bert", torch.float32, head="lm"), batch_of("bert", torch.float32)
    gates = {"gated": {"kind": "all_features"}} if "+" in variant else {}
    perturb(patch_model(model, variant, **gates))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with fake_w8a8(model, [batch]) as tensors:
        names = [point.name for point in tensors]
        assert not torch.equal(head.weight, embedding.weight)
    assert head.weight is embedding.weight
    assert len([name for name in names if ".attn_swap." in name and name.endswith("w_s.weight")]) == own
    assert not [name for name in names if "gate" in name or name.startswith("cls")]


def test_refusals() -> None:
    model, batch = fresh("bert", torch.float32), batch_of("bert", torch.float32)
    with pytest.raises(ValueError, match="no batch"), fake_w8a8(model, []):
        pass
    with pytest.raises(ValueError, match=r"model\.eval\(\)"), fake_w8a8(model.train(), [batch]):
        pass
    model.eval()
    with fake_w8a8(model, [batch]), pytest.raises(ValueError, match="no_grad"):
        model(**batch)
    with torch.no_grad():
        next(model.base_model.encoder.parameters()).fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"), fake_w8a8(model, [batch]):
        pass


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "gpt2"])
def test_integers_with_a_range_per_token(name: str) -> None:
    """They give what fake quantisation with a range per token gives, and nearly what the model gives."""
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32)
    patch_model(model, "outeffhop")
    wanted = forward(model, batch)
    with machine_w8a8(model, [], dynamic=True):
        fake = forward(model, batch)
    got = forward(int8_dynamic(model), batch)
    assert distance(got, fake) < 1e-5
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < 0.2


def test_a_large_token_makes_no_other_token_coarse() -> None:
    """One range for all tokens would round 1 beside 10,000 to 0."""
    x = torch.tensor([[1.0, -0.5, 0.25, 0.125], [1e4, 1.0, 1.0, 1.0]])
    linear = torch.nn.Linear(4, 4, bias=False)
    made = Int8Linear.rounded(linear.weight, None, None)
    with torch.no_grad():
        assert torch.equal(made(x)[:1], made(x[:1]))
        assert distance(made(x)[:1], linear(x[:1])) < 0.02


@pytest.mark.parametrize("variant", [None, "gated"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_dynamic_integers_are_saved(name: str, variant: str | None, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra quant)")
    model, batch = zoo.build(name, head="lm").eval(), batch_of(name, torch.float32)
    other = type(model)(model.config)
    if variant is not None:
        perturb(patch_model(model, variant))
    got = forward(int8_dynamic(model), batch)
    model.save_pretrained(tmp_path)
    assert not hasattr(other.config, "quantization_config")
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert scheme["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(forward(loaded if variant else int8_loaded(loaded), batch), got)


SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 1,
}
TOKENS = {"input_ids": torch.arange(5, 25)[None]}


def made_static(model: Any, batches: Any) -> None:
    int8_static(model, input_ranges(model, batches))


def within(protocol: Any) -> Any:
    def run(model: Any, batches: Any) -> None:
        with protocol(model, batches):
            forward(model, *batches)

    return run


ROUNDS = [within(fake_w8a8), within(machine_w8a8), made_static]
EXPERTS = [
    MixtralConfig(**SMALL, num_local_experts=4),
    Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    Llama4TextConfig(**SMALL, intermediate_size_mlp=96, num_local_experts=4, head_dim=16),
]


@pytest.mark.parametrize(
    ("config", "rounds"), turns(EXPERTS, ROUNDS), ids=lambda value: getattr(value, "model_type", "")
)
def test_stacked_experts_are_refused(config: Any, rounds: Any) -> None:
    """Their weights would stay wide, and a checkpoint beside 8-bit integers could not be loaded."""
    model = AutoModelForCausalLM.from_config(config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="experts"):
        rounds(model, [TOKENS])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model.config, "quantization_config")
