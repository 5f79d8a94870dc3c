"""`quantize`: a sink and smoothed channels where they lose less in 8 bits, then integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import quantize
from hf_attn_swap.conversion import quantize as module
from hf_attn_swap.quantization import Int8Linear
from tests.contract.harness import batch_of, forward, fresh, refused, swaps

from .converting import CALM, HOW, names, rows, stock, timeless, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT


def quantized(model: Any, name: str = "llama", **more: Any) -> Any:
    how = HOW.get(model.config.model_type)
    usual = {"progress": False, "stages": None if how is None else [how]}
    return quantize(model, rows(name), **(usual | more))


def llama() -> Any:
    """A model with one large channel in what its norms give, as smoothing is made for."""
    model = fresh("llama", torch.float32, head="lm")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 64
            for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                reader.weight[:, 3] /= 64
    return model


@pytest.mark.parametrize("training", [False, True])
def test_the_steps_and_what_they_leave(training: bool) -> None:
    report = quantized(model := llama().train(training))
    assert model.training == training
    assert names(report) == ["stock model in 8 bits", "in 8 bits, smoothed", "8-bit integers"]
    loss = {row.name: row.lost.divergence_or_error for row in report.steps}
    assert loss["in 8 bits, smoothed"] < loss["stock model in 8 bits"] / 2
    assert loss["8-bit integers"] == pytest.approx(loss["in 8 bits, smoothed"], rel=0.1)
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 7 * len(model.model.layers)
    assert any("smoothed" in line.lower() for line in report.notes())
    assert forward(model, batch_of("llama", torch.float32)).isfinite().all()


def test_without_a_sink_the_result_is_a_stock_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smoothed weights stay as they are, and so does every number."""
    leaves, before = module._leave_stock, []

    def noted(state: Any) -> None:
        assert any(swap.fitted for swap in swaps(state.model))
        before.append(forward(state.model, batch))
        leaves(state)

    batch = batch_of("llama", torch.float32)
    monkeypatch.setattr(module, "_leave_stock", noted)
    report = quantized(model := llama(), absorb=False)
    assert len(report.layers) > 0
    assert not swaps(model)
    assert getattr(model.config, "attn_swap", None) is None
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    assert torch.equal(forward(model, batch), *before)


def test_smoothing_that_loses_more_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = module.lost_in_8_bits, []

    def worse(state: Any) -> Any:
        found = measured(state)
        seen.append(any(swap.fitted for swap in swaps(state.model)))
        return found if not seen[-1] else type(found)(**{**vars(found), "perplexity": 1e9})

    monkeypatch.setattr(module, "lost_in_8_bits", worse)
    before = weights(model := llama())
    monkeypatch.setattr(module, "int8_static", lambda *_: None)
    report = quantized(model)
    assert seen == [False, True]
    assert names(report)[-2] == "in 8 bits, smoothed, taken back"
    assert "lost more in 8 bits" in str(report)
    assert all(torch.equal(one, before[name]) for name, one in weights(model).items())


def test_a_model_without_free_channels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("no place has channels whose scale is free.")

    monkeypatch.setattr(module, "smooth_channels", refuses)
    report = quantized(stock("bert"), name="bert")
    assert "in 8 bits, smoothed, taken back" in names(report)
    assert any(line.startswith("No channel was smoothed") for line in report.notes())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("variant", [None, "belief"])
def test_an_error_gives_the_stock_model_back(
    variant: str | None, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smoothed weights, weights that a training changed, and those that a training with rounding changed."""
    model = llama()
    before = {name: value.clone() for name, value in weights(model).items()}
    real = module.train

    def fails(*given: Any) -> None:
        if trained:
            real(*given)
        raise RuntimeError("the end")

    monkeypatch.setattr(module, "train" if trained else "input_ranges", fails)
    with pytest.raises(RuntimeError, match="the end"):
        quantized(model, variant=variant, tokens=400, stages=[CALM])
    after = weights(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("tokens", [0, 300])
def test_a_killed_conversion_ends_in_the_same_integers(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the smoothing, and after a training with rounding on smoothed channels, which is not run again."""
    whole = llama()
    told = quantized(whole, tokens=tokens, output_dir=tmp_path / "whole")
    with monkeypatch.context() as killed:
        killed.setattr(module, "int8_static", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantized(llama(), tokens=tokens, output_dir=tmp_path / "killed")
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("trained again"))
    again = quantized(model := llama(), tokens=tokens, output_dir=tmp_path / "killed")
    assert timeless(again) == timeless(told)
    assert any(name.startswith("distilled in 8 bits") for name in names(again)) is (tokens > 0)
    batch = batch_of("llama", torch.float32)
    assert torch.equal(forward(model, batch), forward(whole, batch))


def taught(model: Any, **more: Any) -> Any:
    """Trained with rounding, and measured on the rows of the training: random tokens have nothing in common."""
    given = {"name": "bert", "tokens": 1500, "eval_data": rows("bert"), "stages": [CALM]}
    return quantized(model, **(given | more))


def test_the_model_in_full_precision_teaches_the_rounded_model() -> None:
    report = taught(model := stock("bert"))
    loss = {row.name: row.lost.divergence for row in report.steps}
    assert names(report)[-2:] == ["distilled in 8 bits", "8-bit integers"]
    assert loss["distilled in 8 bits"] < loss["in 8 bits, smoothed"] / 1.2
    assert loss["8-bit integers"] < loss["in 8 bits, smoothed"] / 1.2
    assert report.steps[-2].tokens > 1400
    assert not any("parametrizations" in name for name, _ in model.named_modules())


def test_a_variant_gets_half_of_the_tokens() -> None:
    report = taught(stock("bert"), variant="belief", tokens=400)
    tokens = {row.name: row.tokens for row in report.steps if row.tokens}
    assert list(tokens) == ["distil 1", "distilled in 8 bits"]
    assert 100 < tokens["distil 1"] <= 200
    assert 100 < tokens["distilled in 8 bits"] <= 240


@pytest.mark.parametrize("half", [True, False])
def test_no_training_with_rounding(half: bool) -> None:
    """In half precision, and where the loss is within the budget already."""
    model = stock("bert").to(torch.bfloat16 if half else torch.float32)
    assert "distilled in 8 bits" not in names(taught(model, tokens=200, max_loss=None if half else 0.5))


def test_a_training_that_does_not_help_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    untrained, model = stock("bert"), stock("bert")
    taught(untrained, tokens=0)
    monkeypatch.setattr(module, "LEARNING_RATE", 1.0)
    assert names(taught(model, tokens=200))[-2] == "distilled in 8 bits, taken back"
    batch = batch_of("bert", torch.float32)
    assert torch.equal(forward(model, batch), forward(untrained, batch))


def test_a_model_that_integers_cannot_hold_is_refused_before_the_work() -> None:
    with refused("Conv1D"):
        quantized(fresh("gpt2", torch.float32, head="lm"), name="gpt2")
