"""One call converts a model: what it trains, which layers it chooses, what it leaves, and what its report says."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from hf_attn_swap import describe, patch_model, unpatch_model
from hf_attn_swap.analysis import lost
from hf_attn_swap.conversion import calibrate, config
from hf_attn_swap.conversion.config import Distil, default_distil
from hf_attn_swap.conversion.convert import convert
from hf_attn_swap.conversion.distill import StopWithin
from hf_attn_swap.conversion.report import ConversionReport
from hf_attn_swap.conversion.rows import as_rows
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.text.bar import hidden
from hf_attn_swap.training.stages import Calibrate, FineTune
from tests import zoo
from tests.contract.harness import batch_of, forward, refused, swaps

from .converting import ADAPTERS, BODY, CALM, converted, rows, same, stock, timeless, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT
    pytest.mark.filterwarnings("ignore:The clip cuts away"),  # few tokens, so a published gamma cuts much
]


def names(report: ConversionReport) -> list[str]:
    return [step.name for step in report.steps]


def spent(report: ConversionReport) -> int:
    return sum(step.tokens for step in report.steps)


def flags(model: Any) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def modes(model: Any) -> list[bool]:
    return [each.training for each in model.modules()]


def assert_stock(model: Any, before: dict[str, torch.Tensor], config: Any) -> None:
    assert same(weights(model), before)
    assert not swaps(model)
    assert model.config is config
    assert not hasattr(config, "attn_swap")
    assert not {"attn_swap_installation", "forward", "peft_config"} & set(vars(model))
    assert not any("lora" in type(each).__module__ for each in model.modules())


# -- The budget --------------------------------------------------------------------------------------------------------


def test_a_budget_that_is_met_at_once_trains_nothing() -> None:
    model, before = stock("llama"), weights(stock("llama"))
    report = converted(model, "belief", rows("llama"), max_loss=1.0)
    assert names(report) == ["swap"]  # not even a fit, which would add parameters
    assert not any(swap.calibration for swap in swaps(model))
    assert (report.met, report.layers, report.kept, spent(report)) == (True, (0, 1, 2), {}, 0)
    assert all(torch.equal(weights(model)[name], value) for name, value in before.items())
    assert not any(swap.retrained for swap in swaps(model))
    unpatch_model(model)
    assert same(weights(model), before)


def test_a_budget_that_is_met_after_training_stops_it() -> None:
    whole = converted(stock("bert"), "simpletron_resl", rows("bert", 32), tokens=1200)
    target = (whole.steps[1].lost.degradation + whole.lost.degradation) / 2
    report = converted(
        stock("bert"), "simpletron_resl", rows("bert", 32), tokens=1200, max_loss=target, layers=[0, 1, 2]
    )
    assert whole.lost.degradation < target < whole.steps[1].lost.degradation
    assert names(report)[2:] == ["distil 1"]
    assert report.met
    assert 0 < spent(report) < spent(whole) <= 1200
    assert report.lost.degradation <= target


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("bert", "outeffhop+gated"),
        ("llama", "belief"),
        ("albert", "modern_hopfield"),
        pytest.param("t5", "belief", marks=pytest.mark.slow),
    ],
)
def test_an_impossible_budget_gives_the_stock_model_back(name: str, variant: str) -> None:
    model = stock(name)
    before, config, wanted = weights(model), model.config, forward(model, batch_of(name, torch.float32))
    report = converted(model, variant, rows(name), max_loss=1e-12)
    assert (report.met, report.layers) == (False, ())
    assert report.lost.divergence_or_error == 0
    assert set(report.kept.values()) == {"the loss would be above the budget"}
    assert names(report)[-1] == "last group taken back"
    assert 0 < spent(report) <= 200
    assert f"no layer could run {variant} within the budget" in report.summary
    assert_stock(model, before, config)
    assert torch.equal(forward(model, batch_of(name, torch.float32)), wanted)


@pytest.mark.parametrize("stage", [BODY, ADAPTERS], ids=["weights", "adapters"])
@pytest.mark.parametrize("rate", [1.0, 1e30], ids=["large", "not a number"])
def test_a_distillation_that_diverged_is_taken_back(stage: Distil, rate: float, tmp_path: Path) -> None:
    model, before = stock("bert"), weights(stock("bert"))
    stages = [replace(stage, learning_rate=rate)]
    report = converted(model, "simpletron_resl", rows("bert"), fit="map", stages=stages)
    assert names(report)[-1] == "distillation taken back"
    assert report.lost == report.steps[1].lost  # the fit's
    assert "training hurt and was taken back" in report.summary
    assert not report.trained
    assert not any(swap.retrained for swap in swaps(model))
    unpatch_model(model)
    assert same(weights(model), before)
    path = report.save(tmp_path).with_suffix(".json")
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["trained"] is False


@pytest.mark.parametrize("stage", [BODY, ADAPTERS], ids=["weights", "adapters"])
def test_the_best_measured_weights_are_the_result(stage: Distil, tmp_path: Path) -> None:
    """What loses a little more than no training is taken back; also by a later run."""
    hurts = replace(stage, learning_rate=0.05)
    models, reports = [stock("bert"), stock("bert")], []
    for model in models:
        given = {"stages": [hurts], "tokens": 192, "output_dir": tmp_path}
        reports.append(converted(model, "simpletron_resl", rows("bert"), **given))
    report = reports[0]
    best = min(report.steps, key=lambda step: step.lost.divergence_or_error)
    assert "distillation taken back" in names(report)
    assert report.lost.divergence_or_error == pytest.approx(best.lost.divergence_or_error, rel=1e-4)
    assert not report.trained
    assert "Training hurt" in str(report)
    assert same(weights(models[0]), weights(models[1]))
    assert timeless(reports[0]) == timeless(reports[1])


@pytest.mark.parametrize("tokens", [97, pytest.param(203, marks=pytest.mark.slow)])
def test_the_steps_count_tokens_and_never_more_than_the_budget(tokens: int) -> None:
    report = converted(stock("bert"), "modern_hopfield", rows("bert"), tokens=tokens)
    assert spent(report) == tokens // 6 * 6
    assert report.unit == "tokens"


def test_images_are_counted_in_patches() -> None:
    report = converted(stock("vit"), "modern_hopfield", rows("vit"), tokens=64)
    assert (spent(report), report.unit) == (64, "patches")
    assert "patches" in str(report).splitlines()[1]


def test_a_budget_below_one_step_trains_nothing() -> None:
    assert spent(converted(stock("bert"), "modern_hopfield", rows("bert"), tokens=47)) == 0


# -- The layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant"),
    [("llama", "belief"), ("bert", "modern_hopfield"), pytest.param("gpt2", "modern_hopfield", marks=pytest.mark.slow)],
)
def test_a_share_is_kept_and_the_report_is_of_the_model_that_is_left(name: str, variant: str) -> None:
    """The figures are those of the model as it is afterwards, also where scores are carried through kept layers."""
    model, held = stock(name), rows(name, 8, first=50)
    report = converted(model, variant, rows(name), eval_data=held, keep=0.5)
    assert report.sensitivity is not None
    order = report.sensitivity.order
    assert report.layers == order[:1]
    assert report.kept == dict.fromkeys(sorted(order[1:]), "its swap costs most")
    assert report.held_out == 8
    collated = [{key: torch.stack([row[key] for row in held]) for key in held[0]}]
    found = lost(model, collated, stock=stock(name))
    assert found.divergence == pytest.approx(report.lost.divergence, rel=1e-3, abs=1e-7)
    strengths = [row.strength for row in describe(model).rows]
    away = 0.0 if variant == "modern_hopfield" else None  # a swap that carries scores stays, and passes them on
    assert strengths == [1.0 if index in report.layers else away for index in range(3)]


def test_groups_come_in_the_order_of_what_they_cost() -> None:
    """The budget is what two of three layers cost, so that training decides about the third alone."""
    data = rows("bert")
    whole = converted(stock("bert"), "simpletron_resl", data, max_loss=1e-12, tokens=1)
    assert whole.sensitivity is not None
    order = whole.sensitivity.order
    assert spent(whole) == 0
    target = 1.01 * max(whole.sensitivity.alone[index].degradation for index in order[:2])
    model = stock("bert")
    report = converted(model, "simpletron_resl", data, max_loss=target, tokens=1)
    groups = [step for step in report.steps if step.name.startswith("group ")]
    assert [step.layers for step in groups] == [tuple(sorted(order[: n + 1])) for n in range(len(groups))]
    assert len(groups) >= 2
    assert report.met
    assert report.lost.degradation <= target
    assert {*report.layers} == {*order[: len(report.layers)]}
    assert {*report.kept} == {*order[len(report.layers) :]}
    assert [swap is not None for swap in map(attribute, model.bert.encoder.layer)] == [
        n in report.layers for n in range(3)
    ]


def attribute(layer: Any) -> Any:
    return getattr(layer.attention.self, "attn_swap", None)


@pytest.mark.parametrize("stage", [BODY, ADAPTERS], ids=["weights", "adapters"])
def test_a_later_group_that_fails_leaves_the_weights_of_the_groups_before(stage: Distil) -> None:
    """Nothing was trained for the first group, so the weights are the stock model's again."""
    data, model, before = rows("bert"), stock("bert"), weights(stock("bert"))
    first = converted(stock("bert"), "simpletron_resl", data, max_loss=1e-12, tokens=1).sensitivity
    assert first is not None
    target = 1.01 * first.alone[first.order[0]].degradation
    report = converted(model, "simpletron_resl", data, max_loss=target, tokens=100, stages=[stage])
    assert report.met
    assert names(report)[-1] == "last group taken back", "and no adapters are merged"
    assert not report.trained
    assert report.layers == first.order[:1]
    assert spent(report) > 0
    assert all(torch.equal(weights(model)[name], value) for name, value in before.items())
    assert not any(swap.retrained for swap in swaps(model))
    assert "retrained" not in json.dumps(model.config.attn_swap)


# -- What it leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_modes_and_flags_are_as_before(name: str) -> None:
    model = stock(name)
    model.base_model.train()
    model.get_input_embeddings().eval()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    before = {id(each): each.training for each in model.modules()}, {id(p): p.requires_grad for p in model.parameters()}
    converted(model, "outeffhop+gated", rows(name))
    for each in model.modules():
        assert id(each) not in before[0] or each.training == before[0][id(each)]
    assert all(parameter.requires_grad == before[1].get(id(parameter), True) for parameter in model.parameters())
    assert all(module.training for swap in swaps(model) for module in swap.modules())


def broken_at(call: int, problem: BaseException) -> Callable[..., Any]:
    """`HeldOut.lost`, which fails at some call."""
    real, calls = HeldOut.lost, []

    def fails(self: HeldOut, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise problem
        return real(self, *args, **kwargs)

    return fails


@pytest.mark.parametrize("call", [1, 3, 12])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_after_an_error_the_model_is_stock_to_the_bit(name: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first measurement, in the fit, and after a training."""
    model = stock(name).train()
    next(iter(model.parameters())).requires_grad_(False)
    before, config, wanted = weights(model), model.config, (modes(model), flags(model))
    monkeypatch.setattr(HeldOut, "lost", broken_at(call, KeyboardInterrupt()))
    trained: list[int] = []
    step = StopWithin.on_step_end
    monkeypatch.setattr(StopWithin, "on_step_end", lambda *given, **more: trained.append(1) or step(*given, **more))
    with pytest.raises(KeyboardInterrupt):
        converted(model, "outeffhop+gated", rows(name), max_loss=1e-12)
    assert bool(trained) == (call == 12)
    assert_stock(model, before, config)
    assert (modes(model), flags(model)) == wanted
    patch_model(model, "modern_hopfield")


def test_mixed_precision_leaves_no_wrapper(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none")
    for name in ("bert", "llama"):
        model = stock(name)
        before = {*vars(model)}
        converted(model, "modern_hopfield", rows(name), args=args)
        assert {*vars(model)} - before <= {"attn_swap_installation", "attn_swap_configs"}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert forward(model, batch_of(name, torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_losses_are_measured_without_mixed_precision(name: str, tmp_path: Path) -> None:
    """The last loss of the report is the loss of the model as `convert` hands it over, to the bit."""
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none")
    model, held = stock(name), rows(name, 4, first=50)
    measure = HeldOut(model, as_rows(model, held).batches(4), progress=False)
    report = converted(model, "modern_hopfield", rows(name), eval_data=held, args=args, stages=[CALM])
    assert names(report)[-1] == "distil 1"
    assert report.lost == measure.lost(model)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    converted(stock("llama"), "modern_hopfield", rows("llama"))
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "", "nor printed, without progress"


def test_the_lines_of_a_conversion(capsys: Any) -> None:
    """One when the data are ready, and one after each step; none where no progress is wanted."""
    converted(stock("llama"), "belief", rows("llama"), progress=True)
    first, *others = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"LlamaForCausalLM: \d+ rows to train on, \d+ held out to measure on", first)
    assert others
    assert all(re.match(r".+: 3 layers, perplexity above the stock model's -?\d", line) for line in others)
    with hidden():
        converted(stock("llama"), "belief", rows("llama"), progress=True)
    assert capsys.readouterr().err == ""


# -- The data ----------------------------------------------------------------------------------------------------------


def test_labels_are_not_read() -> None:
    """Nothing of them: not a wrong shape, not NaN, not the text beside them."""
    plain = rows("bert")
    odd = [row | {"labels": math.nan if n % 2 else [1] * n, "text": "x" * n} for n, row in enumerate(plain)]
    models = [stock("bert"), stock("bert")]
    found = [
        timeless(converted(model, "simpletron_resl", data)) for model, data in zip(models, (plain, odd), strict=True)
    ]
    assert found[0] == found[1]
    assert same(weights(models[0]), weights(models[1]))


KINDS: dict[str, Callable[[], Any]] = {
    "regression": lambda: zoo.build("bert", head="classification", num_labels=1),
    "backbone": lambda: zoo.build("bert", head="base"),
    "questions": lambda: zoo.build("bert", head="qa"),
    "tokens": lambda: zoo.build("bert", head="token"),
    "images": lambda: zoo.build("dinov2", patch_size=8),
    "images without head": lambda: zoo.build("clip_vision", patch_size=8),
    "grouped heads": lambda: zoo.build("mistral"),
    "encoder and decoder": lambda: zoo.build("t5"),
    "joined projections": lambda: zoo.build("gpt2"),
    "speech": lambda: zoo.build("whisper"),
}
OF = {"images": "dinov2", "images without head": "clip_vision", "grouped heads": "mistral"}
OF |= {"encoder and decoder": "t5", "joined projections": "gpt2", "speech": "whisper"}
QUICK = ("regression",)


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_kinds_of_models(kind: str) -> None:
    """With the settings chosen for the kind, the report is of the model that is left, trained or as before."""
    model, name = KINDS[kind](), OF.get(kind, "bert")
    original = copy.deepcopy(model)
    held = rows(name, 8, first=50)
    report = convert(
        model,
        "modern_hopfield",
        rows(name, 40),
        eval_data=held,
        tokens=600 if name != "whisper" else 40,
        progress=False,
    )
    assert spent(report) > 0
    assert report.layers == tuple(range(len(swaps(model))))
    assert {swap.retrained for swap in swaps(model)} == {report.trained}
    collated = [{key: torch.stack([row[key] for row in held]) for key in held[0]}]
    found = lost(model, collated, stock=original)
    assert found.degradation == pytest.approx(report.lost.degradation, rel=1e-3, abs=1e-5)
    assert same(weights(unpatch_model(model)), weights(original)) != report.trained


def test_settings_by_kind_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(model: Any, variant: str = "belief") -> tuple[int | None, float, float]:
        how = default_distil(model, variant)
        return how.rank, how.logits, how.hidden

    assert settings(stock("llama")) == (32, 1, 0)
    assert settings(stock("bert")) == (None, 1, 1)
    assert settings(zoo.build("bert", head="base")) == (None, 0, 1)
    assert settings(zoo.build("bert", head="qa")) == (None, 0, 1)
    assert settings(stock("vit")) == (16, 1, 1)
    monkeypatch.setattr(config, "SMALL", 100)
    assert settings(stock("bert")) == (16, 1, 1)


def test_a_language_model_that_becomes_linear_trains_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in ("simpletron", "simpletron_resl"):
        assert default_distil(stock("llama"), variant).rank is None
    assert default_distil(stock("llama"), "belief").rank == 32
    assert default_distil(stock("llama"), "simpletron_resl", low_memory=True).rank == 32
    monkeypatch.setattr(config, "MIDDLE", 100)
    assert default_distil(stock("llama"), "simpletron_resl").rank == 32


def test_weights_in_half_precision_do_not_train() -> None:
    assert default_distil(stock("bert").bfloat16(), "belief").rank == 16
    with pytest.warns(UserWarning, match="the weights are in torch.bfloat16, so adapters train; load .* float32"):
        assert default_distil(stock("llama").bfloat16(), "simpletron_resl").rank == 32


STAGES = {
    "a Trainer reads labels": [FineTune()],
    "fit= names the fit": [Calibrate(), BODY],
    "stages takes one Distil": [BODY, BODY],
    "convert's tokens are the budget": [replace(BODY, tokens=100)],
}


@pytest.mark.parametrize("sentence", STAGES)
def test_stages_that_cannot_be(sentence: str) -> None:
    model = stock("bert")
    before = weights(model)
    with refused(sentence):
        converted(model, "belief", rows("bert"), stages=STAGES[sentence])
    assert same(weights(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["modern_hopfield", "belief", "simpletron_resl"])
def test_low_memory(variant: str) -> None:
    """The steps have the same number of rows, one at a time; adapters train; the loss moves as before."""
    data = rows("llama", 40)
    reports = [converted(stock("llama"), variant, data, tokens=288, low_memory=low) for low in (False, True)]
    assert reports[1].steps[-1].lost.divergence_or_error != reports[1].steps[1].lost.divergence_or_error, (
        "it has trained"
    )
    ends = [report.steps[-1].lost.divergence_or_error for report in reports]
    assert [report.training_steps for report in reports] == [reports[0].training_steps] * 2
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)
    assert default_distil(stock("bert"), "belief", low_memory=True).rank == config.RANK
    with refused("give the Distil stage a rank"):
        converted(stock("bert"), "belief", rows("bert"), low_memory=True)


def test_another_teacher() -> None:
    """Losses are compared with the teacher, whose head and body are its own."""
    teacher, held = zoo.build("llama", hidden_act="relu"), rows("llama", 8, first=50)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1.5)
    before = weights(teacher)
    model = stock("llama")
    report = converted(model, "belief", rows("llama"), eval_data=held, teacher=teacher)
    collated = [{"input_ids": torch.stack([row["input_ids"] for row in held])}]
    assert report.lost.divergence == pytest.approx(lost(model, collated, stock=teacher).divergence, rel=1e-3)
    assert report.steps[0].lost.stock_perplexity == lost(teacher_swapped(), collated, stock=teacher).stock_perplexity
    assert same(weights(teacher), before)


def teacher_swapped() -> Any:
    return patch_model(stock("llama"), "belief")


# -- The report --------------------------------------------------------------------------------------------------------


def test_the_report_as_text_html_and_json(tmp_path: Path) -> None:
    report = converted(stock("llama"), "belief", rows("llama"), keep=0.5, tokens=100)
    lines = str(report).splitlines()
    assert lines[0] == report.summary
    assert lines[0].startswith("LlamaForCausalLM: 1 of 3 layers run belief; perplexity above the stock model's: ")
    below = lines[2 + len(report.steps) :]
    assert [line.split("  ")[0] for line in lines[2 : -len(below)]] == names(report)
    kept = ", ".join(str(index) for index in sorted(report.kept))
    assert below == [f"Layers {kept} kept their own attention: its swap costs most.", *report.advice()]
    page = report.save(tmp_path / "new")
    text = unescape(page.read_text())
    assert all(cell in text for step in report.steps for cell in step.cells())
    assert all(line in text for line in below)
    assert "what each layer alone costs" in text
    data = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert (data["met"], data["layers"], data["loss"]) == (True, list(report.layers), report.lost.degradation)
    assert data["measure"] == "perplexity above the stock model's"


# -- Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_loss": 0}, "max_loss is a share above 0 and at most 1 (0.02 is 2 %), got 0."),
        ({"max_loss": math.nan}, "max_loss is a share above 0"),
        ({"max_loss": 2}, "max_loss is a share above 0 and at most 1 (0.02 is 2 %), got 2."),
        ({"max_loss": "2%"}, "max_loss is a share above 0 and at most 1 (0.02 is 2 %), got '2%'."),
        ({"keep": 1.0}, "keep is the share of layers that stay as they are, from 0 to below 1, got 1.0."),
        ({"keep": -0.1}, "keep is the share"),
        ({"tokens": -1}, "tokens must be a whole number"),
        ({"tokens": "300k"}, "tokens must be a whole number"),
        ({"fit": "none"}, "fit is"),
        ({"layers": [7]}, "7"),
        ({"layers": "first"}, "layers must be whole numbers such as [0, 3] or range(6), got 'first'."),
        ({"layers": []}, "layers must be whole numbers"),
        ({"layers": [7], "data": []}, "7"),  # before the data are looked at
        (
            {"processor": "bert-base-uncased"},
            "processor must be a loaded tokenizer or image processor, got the name 'bert-base-uncased'; pass "
            "AutoTokenizer.from_pretrained('bert-base-uncased'), or AutoImageProcessor for images.",
        ),
        ({"data": []}, "there are no rows to convert on."),
        ({"eval_data": []}, "there are no rows"),
        ({"data": rows("bert", 1)}, "a single row cannot be both trained and measured on; bring more data."),
        ({"variant": "believe"}, "believe"),
        ({"alpha": {1, 2}}, "alpha"),
        ({"teacher": "one"}, "the teacher must be a transformers model, got str."),
        ({"teacher": zoo.build("bert", vocab_size=70)}, "the teacher has vocab_size = 70 and the model has 64"),
    ],
)
def test_refusals_change_nothing(more: dict[str, Any], reason: str) -> None:
    model = stock("bert")
    before, config = weights(model), model.config
    given = {
        "variant": "modern_hopfield",
        "data": rows("bert", 8),
        "tokens": 100,
        "stages": [BODY],
        "progress": False,
    } | more
    with refused(reason):
        convert(model, given.pop("variant"), given.pop("data"), **given)
    assert_stock(model, before, config)


@pytest.mark.parametrize("variant", ["modern_hopfield", "softmax"])
def test_a_converted_model_is_refused(variant: str) -> None:
    """Also softmax with a fit, which computes something else than stock attention."""
    model = patch_model(stock("bert"), variant)
    calibrate(model, [batch_of("bert", torch.float32)], fit="gain", progress=False)
    before = weights(model)
    with refused("already converted"):
        converted(model, "belief", rows("bert"))
    assert same(weights(model), before)


class Packed(torch.Tensor):
    """A tensor type of its own, as a library of rounded weights has."""


@pytest.mark.parametrize("how", ["loaded so", "whole numbers", "a type of its own"])
def test_rounded_weights_are_refused_before_the_work(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("bert")
    module = model.base_model.encoder.layer[0].output.dense
    if how == "loaded so":
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    elif how == "whole numbers":
        module.weight = torch.nn.Parameter(module.weight.detach().to(torch.int8), requires_grad=False)
    else:
        module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Packed))
    monkeypatch.setattr("hf_attn_swap.conversion.convert.split", lambda *_, **__: pytest.fail("it reads the data"))
    with refused("the weights of this BertForMaskedLM are rounded (quantized) already"):
        converted(model, "belief", rows("bert"))
    assert not swaps(model)


def test_the_control_counts_as_a_stock_model() -> None:
    """The recipes save their control with the swap `softmax`; a conversion of it is that of the stock model."""
    models = [stock("bert"), patch_model(stock("bert"), "softmax")]
    reports = [converted(model, "belief", rows("bert")) for model in models]
    assert timeless(reports[0]) == timeless(reports[1])
    assert same(weights(models[0]), weights(models[1]))
    assert models[0].config.attn_swap == models[1].config.attn_swap


@pytest.mark.parametrize("other", ["variant", "weights", "data", "tokens", "bf16"])
def test_a_folder_of_another_conversion_is_refused(other: str, tmp_path: Path) -> None:
    """Another variant, model, data, budget or precision; also as many data, and weights of the same shapes."""
    converted(stock("bert"), "modern_hopfield", rows("bert"), tokens=1, output_dir=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = stock("bert")
    if other == "weights":
        with torch.no_grad():
            model.bert.encoder.layer[2].output.dense.weight.mul_(1.01)
    variant, data = "belief" if other == "variant" else "modern_hopfield", rows("bert", first=4 * (other == "data"))
    args = TrainingArguments(str(tmp_path), bf16=other == "bf16", use_cpu=True, report_to="none")
    with refused("holds another conversion", other):
        converted(model, variant, data, tokens=99 if other == "tokens" else 1, output_dir=tmp_path, args=args)
    assert not swaps(model)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
