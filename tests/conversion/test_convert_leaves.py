"""What `convert` leaves beside the converted weights, and which models and rows it refuses at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import TrainingArguments

from hf_attn_swap import convert
from hf_attn_swap.conversion.distill import StopWithin
from hf_attn_swap.conversion.run import Run
from hf_attn_swap.conversion.trainer import DistillationTrainer
from tests import zoo
from tests.contract.harness import batch_of, forward, refused, swaps
from tests.harness.adapters import lora

from .converting import HOW, converted, rows, same, stock, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT


def checkpointed(model: Any) -> bool:
    return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fills up with an entry for each training step: whether activation checkpointing was on."""
    found: list[bool] = []
    step = DistillationTrainer.training_step

    def watched(self: Any, model: Any, *args: Any, **more: Any) -> Any:
        found.append(checkpointed(model))
        return step(self, model, *args, **more)

    monkeypatch.setattr(DistillationTrainer, "training_step", watched)
    return found


@pytest.mark.slow
def test_low_memory_computes_activations_again(seen: list[bool]) -> None:
    model = stock("llama")
    converted(model, "belief", rows("llama"), low_memory=True)
    assert seen
    assert all(seen)
    assert not checkpointed(model)


def test_checkpointing_of_the_user_ends_with_the_training(seen: list[bool], tmp_path: Path) -> None:
    name = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else None
    more: dict[str, Any] = {name or "gradient_checkpointing": True}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **more)
    model = stock("bert")
    converted(model, "belief", rows("bert"), args=args)
    assert seen
    assert all(seen)
    assert not checkpointed(model)
    model.requires_grad_(False)
    assert not model(**batch_of("bert", torch.float32)).logits.requires_grad


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_interrupted_training_leaves_no_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*args: Any, **more: Any) -> None:
        assert any(parameter.grad is not None for parameter in model.parameters())
        raise KeyboardInterrupt

    model = stock(name)
    monkeypatch.setattr(StopWithin, "on_pre_optimizer_step", stops, raising=False)
    with pytest.raises(KeyboardInterrupt):
        converted(model, "belief", rows(name))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interruption_after_the_merge_leaves_the_converted_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are no longer those of the stock model, so the swap has to stay."""
    model, whole = stock("llama"), stock("llama")
    converted(whole, "belief", rows("llama"))
    measure = Run.lost

    def stops(self: Run) -> Any:
        if self.final:
            raise KeyboardInterrupt
        return measure(self)

    monkeypatch.setattr(Run, "lost", stops)
    with pytest.raises(KeyboardInterrupt):
        converted(model, "belief", rows("llama"))
    assert same(weights(model), weights(whole))
    assert swaps(model)
    assert torch.equal(forward(model, batch_of("llama")), forward(whole, batch_of("llama")))


@pytest.mark.parametrize("wrapped", [True, False])
def test_adapters_of_the_user_are_refused(wrapped: bool) -> None:
    model = stock("bert")
    if wrapped:
        model = peft.get_peft_model(model, lora("bert"))
    else:
        peft.inject_adapter_in_model(lora("bert"), model)  # transformers' add_adapter may ask for a later PEFT
    before = weights(model)
    with refused("the model has adapters of PEFT, which a conversion would lose; merge them"):
        converted(model, "outeffhop", rows("bert"))
    assert same(weights(model), before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # llama's rotary positions would run on without an error
def test_rows_longer_than_the_model(family: str) -> None:
    model = stock(family)
    before = weights(model)
    data = [{"input_ids": torch.full((70,), 3)} for _ in range(8)]
    with refused("a row has 70 tokens, and the model has 64 positions; take length=64 or less"):
        converted(model, "belief", data)
    assert same(weights(model), before)
    assert not swaps(model)


def test_rows_of_another_tokenizer() -> None:
    model = stock("llama")
    known = model.config.vocab_size
    data = [{"input_ids": torch.full((8,), known + 3)} for _ in range(8)]
    with refused(f"the token {known + 3}", f"knows {known} tokens", "the tokenizer of this model"):
        converted(model, "belief", data)


def test_rows_without_inputs_that_the_model_needs() -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows("t5", 8)]
    with refused("T5ForConditionalGeneration cannot read a row with input_ids: You "):
        converted(stock("t5"), "belief", data)


def test_questions_with_labels() -> None:
    """The positions of an answer are labels: with them, the first output of the model would be its own loss."""
    model, plain = zoo.build("bert", head="qa"), zoo.build("bert", head="qa")
    labels = {"start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}
    data = rows("bert")
    reports = [
        converted(model, "belief", [row | labels for row in data], stages=None),
        converted(plain, "belief", data, stages=None),
    ]
    assert reports[0].lost == reports[1].lost
    assert same(weights(model), weights(plain))


def test_arguments_that_the_conversion_sets_itself(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-5},
        eval_on_start=True,
    )
    model, plain = stock("bert"), stock("bert")
    converted(model, "belief", rows("bert"), args=args)
    converted(plain, "belief", rows("bert"))
    assert same(weights(model), weights(plain))


@pytest.mark.slow
class Embedder(torch.nn.Sequential):
    """As a SentenceTransformer, its forward takes one dict."""

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        hidden: torch.Tensor = self[0](**features)[0]
        return hidden.mean(1)


def test_what_is_around_a_model_stays() -> None:
    alone, inside = zoo.build("bert"), Embedder(zoo.build("bert"))
    for model in (alone, inside):
        convert(model, "belief", rows("bert"), tokens=200, progress=False, stages=[HOW["bert"]])
    assert same(weights(inside[0]), weights(alone))
    assert inside({"input_ids": batch_of("bert")["input_ids"]}).shape[0] == len(batch_of("bert")["input_ids"])


@pytest.mark.slow
def test_a_compiled_model() -> None:
    """It runs the converted model afterwards, although it was compiled for the stock model."""
    model, plain = stock("bert"), stock("bert")
    compiled, batch = torch.compile(model, backend="eager"), batch_of("bert")
    before = forward(compiled, batch)
    report = converted(compiled, "belief", rows("bert"))
    assert not torch.equal(forward(compiled, batch), before)
    torch.testing.assert_close(forward(compiled, batch), forward(model, batch))
    assert report.lost.divergence_or_error == pytest.approx(
        converted(plain, "belief", rows("bert")).lost.divergence_or_error, rel=1e-4
    )
