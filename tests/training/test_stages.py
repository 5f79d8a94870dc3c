"""The stages of a conversion, from YAML and from options; and a run that converts its fine-tuned control."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.training import parse
from hf_attn_swap.training.arguments import ConversionArguments
from hf_attn_swap.training.stages import Calibrate, FineTune, read_stages
from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

from .conftest import options

# PEFT reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
DISTIL = {"stage": "distil", "tokens": 300000, "rank": 32, "learning_rate": 5e-4, "hidden": 0.5}


def conversion(*words: str) -> ConversionArguments:
    (result,) = parse((ConversionArguments,), words)
    assert isinstance(result, ConversionArguments)
    return result


def refused(words: tuple[str, ...], capsys: Any) -> str:
    """The one line with which the command line ends."""
    with pytest.raises(SystemExit) as ended:
        conversion(*words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return str(line)


def test_values_of_a_stage() -> None:
    (stage,) = read_stages([json.dumps(DISTIL)])
    wanted = {"tokens": 300000, "rank": 32, "learning_rate": 5e-4, "hidden": 0.5}
    assert stage == Distil(**wanted)
    for given, names in (("value", ("value",)), (["query", "key"], ("query", "key"))):
        (stage,) = read_stages([json.dumps({"stage": "distil", "trainable": given})])
        assert stage == Distil(trainable=names)
    (stage,) = read_stages(['{"stage": "calibrate", "fit": "gain"}'])
    assert stage == Calibrate(fit="gain")


def test_from_yaml(tmp_path: Path) -> None:
    """The list of the documentation, and an option that replaces the file's list."""
    file = tmp_path / "stages.yaml"
    file.write_text(
        "stages:\n"
        "  - {stage: calibrate, fit: gain}\n"
        "  - {stage: distil, tokens: 300000, learning_rate: 5.0e-4, trainable: [query, value]}\n"
        "  - fine_tune\n"
    )
    result = conversion(str(file))
    last = Distil(tokens=300000, learning_rate=5e-4, trainable=("query", "value"))
    assert result.plan == (Calibrate(fit="gain"), last, FineTune())
    assert result.steps == ("gain", "distil")
    result = conversion(str(file), "--stages", "fine_tune", '{"stage": "distil"}')
    assert result.plan == (FineTune(), Distil())
    assert result.steps == ("fine_tune", "distil")


@pytest.mark.parametrize(
    ("words", "plan", "steps"),
    [
        ((), (FineTune(),), ()),
        (("--stages", "fine_tune"), (FineTune(),), ()),
        (("--stages", "calibrate", "fine_tune"), (Calibrate(), FineTune()), ("map",)),
        (
            ("--stages", "calibrate", '{"stage": "distil", "rank": 4}', "fine_tune"),
            (Calibrate(), Distil(rank=4), FineTune()),
            ("map", "distil"),
        ),
        (
            ("--stages", "fine_tune", "calibrate", '{"stage": "distil", "tokens": 9}'),
            (FineTune(), Calibrate(), Distil(tokens=9)),
            ("fine_tune", "map", "distil"),
        ),
    ],
)
def test_from_options(words: tuple[str, ...], plan: tuple[Any, ...], steps: tuple[str, ...]) -> None:
    result = conversion(*words)
    assert result.plan == plan
    assert result.steps == steps


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("[1]", "a stage must name one of calibrate, distil, fine_tune, got '[1]'"),
        ("{", "a stage must be one of calibrate, distil, fine_tune, or a JSON object, got '{'"),
        ('{"stage": "prune"}', "a stage must name one of calibrate, distil, fine_tune"),
        ('{"stage": "fine_tune", "epochs": 3}', "the stage fine_tune has no option epochs"),
        ('{"stage": "distil", "epochs": "two"}', "the stage distil cannot have these values"),
        ('{"stage": "distil", "tokens": -5}', "distil: tokens must be above 0, got -5"),
        ('{"stage": "distil", "logits": 0}', "one must be above 0"),
        ('{"stage": "calibrate", "fit": "full"}', "fit must be one of 'gain', 'map'"),
    ],
)
def test_a_stage_refused(stage: str, reason: str, capsys: Any) -> None:
    assert reason in refused(("--stages", stage), capsys)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForSequenceClassification.from_pretrained(folder / "seed-0" / "model").state_dict())


@needs_recipes
def test_the_fine_tuned_control_is_converted(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The run starts from the control's weights and says so, stops without fine-tuning, and needs the control."""
    first = ("--variant", "belief", "--stages", "fine_tune")
    still = ('{"stage": "distil", "learning_rate": 1e-30}', "--label", "still")
    moving = ('{"stage": "distil", "learning_rate": 1e-2, "rank": 2}', "--label", "moving")
    recipe("text_classification.py", options(tiny, tmp_path, *first, *still, *NO_SAVING), monkeypatch)
    control, same = weights(tmp_path / "softmax"), weights(tmp_path / "still")
    untrained = AutoModelForSequenceClassification.from_pretrained(tiny / "model").state_dict()
    for key, value in control.items():
        assert torch.allclose(same[key], value, atol=1e-12, rtol=0), key
    assert any(not torch.equal(value, untrained[key]) for key, value in control.items() if "attention" in key)
    result = RunResult.load(tmp_path / "still" / "results.json")
    assert result.steps == ("fine_tune", "distil")
    assert "Started from the fine-tuned softmax control of the same seed" in result.conversion[0]
    assert "Attention replaced by belief, weights kept" in result.conversion[1]
    assert "Distilled without labels from the original model: 1 epochs on 48 training rows" in result.conversion[2]
    assert len(result.conversion) == 3
    outcome = json.loads((tmp_path / "still" / "seed-0" / "outcome.json").read_text())
    assert outcome["steps"] == 0, "no fine-tuning followed"
    assert "belief" in (tmp_path / "still" / "README.md").read_text()

    recipe("text_classification.py", options(tiny, tmp_path, *first, *moving, *NO_SAVING), monkeypatch)
    moved = weights(tmp_path / "moving")
    assert set(moved) == set(control), "the adapters are merged"
    assert not torch.allclose(*(each["bert.encoder.layer.0.attention.self.query.weight"] for each in (moved, control)))
    assert torch.equal(*(each["bert.embeddings.word_embeddings.weight"] for each in (moved, control)))
    assert "LoRA of rank 2, merged" in RunResult.load(tmp_path / "moving" / "results.json").conversion[2]

    shutil.rmtree(tmp_path / "softmax" / "seed-0" / "model")
    capsys.readouterr()
    again = options(tiny, tmp_path, *first, "distil", "--label", "again", *NO_SAVING)
    with pytest.raises(SystemExit, match="holds no fine-tuned control; run the variant softmax with this seed first"):
        recipe("text_classification.py", again, monkeypatch)


@needs_recipes
def test_all_stages_in_one_run(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Calibrate, distil twice and fine-tune, by a file; each leaves a sentence, and no stage's folder stays."""
    file = tmp_path / "stages.yaml"
    file.write_text(
        "stages:\n"
        "  - {stage: calibrate, fit: map}\n"
        "  - {stage: distil, tokens: 60, layers: 1.0, logits: 0.0}\n"
        "  - {stage: distil, tokens: 60, trainable: [query, swap], hidden: 1.0, batch: 4}\n"
        "  - {stage: fine_tune}\n"
    )
    words = [str(file), *options(tiny, tmp_path, "--variant", "simpletron_resl", *NO_SAVING)]
    recipe("text_classification.py", words, monkeypatch)
    result = RunResult.load(tmp_path / "simpletron-resl" / "results.json")
    assert result.steps == ("map", "distil", "distil")
    for sentence, start in zip(
        result.conversion,
        (
            "Attention replaced",
            "Calibrated: map",
            "Distilled without labels",
            "Distilled without labels",
            "Fine-tuned for 1",
        ),
        strict=True,
    ):
        assert sentence.startswith(start)
    assert "60 tokens, query, swap trained, loss 1 x logits + 1 x hidden states" in result.conversion[3]
    assert not list((tmp_path / "simpletron-resl" / "seed-0").glob("stage-*"))
    assert not (tmp_path / "simpletron-resl" / "seed-0" / "converted").exists()
