"""What is published of several runs: only what was measured on the same rows is compared, and the budget is whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.publish.results import versions
from hf_attn_swap.training.arguments import ModelArguments, TextDataArguments
from hf_attn_swap.training.compare import About, publish
from hf_attn_swap.training.run import Outcome
from tests.contract.harness import fresh

ROWS = 40
REFERENCES = tuple(float(row % 2) for row in range(ROWS))
ABOUT = About(prefix="tiny", task="text-classification", auto_class="AutoModel", intended_use="None.")


def outcome(seed: int, missed: int, references: tuple[float, ...] = REFERENCES) -> Outcome:
    """A run that gets the first rows wrong."""
    predictions = tuple(1 - value if row < missed else value for row, value in enumerate(REFERENCES))
    right = float(np.mean(np.equal(predictions, references)))
    return Outcome(
        settings={},
        seed=seed,
        metrics={"accuracy": right},
        predictions=predictions,
        references=references,
        swap=json.dumps(patch_model(fresh("bert"), "modern_hopfield").config.attn_swap),
        parameters_added=0,
        conversion=("Fine-tuned.",),
        steps=7,
        rows={"train": 100, "test": len(references)},
        wall_seconds=1.5 + seed,
        hardware="1 x CPU",
        versions=versions(),
    )


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the cards of the models on the Hub say; there is no other model."""
    cards: dict[str, Any] = {}
    monkeypatch.setattr(HfApi, "model_info", lambda _, name, **__: SimpleNamespace(card_data=cards[name]))
    return cards


def published(
    folder: Path,
    converted: list[Outcome],
    control: list[Outcome],
    trained_on: str | None = None,
    *,
    about: About = ABOUT,
    scratch: bool = False,
    words: dict[str, str] | None = None,
    **training: Any,
) -> Any:
    data = TextDataArguments(dataset_name="some/rows", train_data_card_name=trained_on)
    model = ModelArguments(
        **{"model_name_or_path": "some/model", **(words or {})},
        variant="modern_hopfield",
        seeds=[run.seed for run in converted],
    )
    args = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True, **training)
    (folder / model.run_name).mkdir()
    return publish(converted, control, about, model, data, args, scratch=scratch)


def test_the_difference_is_paired_over_seeds_and_rows(tmp_path: Path) -> None:
    result = published(tmp_path, [outcome(0, 2), outcome(1, 4)], [outcome(0, 6), outcome(1, 10)])
    assert result.difference.mean == pytest.approx((8 - 3) / ROWS)
    assert result.converted.seeds == result.control.seeds == (0, 1)
    assert result.converted.metrics[0].values == (pytest.approx(38 / 40), pytest.approx(36 / 40))
    assert result.wall_seconds == pytest.approx(1.5 + 2.5)
    assert result.data.rows == {"train": 100, "test": ROWS}


FOLDER = {"base_model_card_name": "some/model"}  # on the Hub too


@pytest.mark.parametrize(
    ("there", "words", "here", "wanted"),
    [
        ("mit", {}, None, "mit"),
        (None, {}, None, None),
        ("mit", {"license": "gpl-3.0"}, None, "gpl-3.0"),
        ("mit", FOLDER, None, "mit"),
        ("mit", FOLDER, "---\nlicense: llama3\n---\n", "llama3"),
        ("mit", {"base_model_card_name": "no/model"}, None, None),
    ],
)
def test_the_licence_is_that_of_the_base_models_card(
    there: str | None, words: dict[str, str], here: str | None, wanted: str | None, hub: Any, tmp_path: Path
) -> None:
    hub["some/model"] = {"license": there}
    if "base_model_card_name" in words:
        words = {**words, "model_name_or_path": str(tmp_path / "base")}
        (tmp_path / "base").mkdir()
    if here is not None:
        (tmp_path / "base" / "README.md").write_text(here)
    result = published(tmp_path, [outcome(0, 2)], [], words=words)
    card = ModelCard.load(tmp_path / "modern-hopfield" / "README.md")
    assert (result.license, card.data.get("license")) == (wanted, wanted)


def test_without_a_title_the_name_is_that_of_the_model_and_the_data(tmp_path: Path) -> None:
    plain = replace(ABOUT, prefix=None)
    assert published(tmp_path, [outcome(0, 2)], [], about=plain).name == "model-rows-modern-hopfield"
    (long := tmp_path / f"a b{'c' * 120}").mkdir()
    result = published(long, [outcome(0, 2)], [], about=plain, words={"model_name_or_path": str(long)})
    assert result.name.startswith("a-bccc")
    assert result.base.name.startswith("a-bccc")


def test_a_run_whose_settings_hold_an_older_name_is_found_again(tmp_path: Path) -> None:
    old = replace(outcome(0, 2), settings={"variant": "outeffhop+clipped", "seed": "0"})
    old.save(tmp_path)
    assert Outcome.find(tmp_path, {"variant": "outeffhop+clipped_softmax", "seed": 0}) == old
    with pytest.raises(ValueError, match="holds a run with variant = outeffhop\\+clipped_softmax, not belief"):
        Outcome.find(tmp_path, {"variant": "belief", "seed": 0})


OTHER = (1 - REFERENCES[0], *REFERENCES[1:])  # as many rows, one of them another


@pytest.mark.parametrize(("whose", "seed"), [("converted", 1), ("control", 0), ("control", 1)])
@pytest.mark.parametrize("references", [OTHER, REFERENCES[::-1]], ids=["other", "reordered"])
def test_other_held_out_rows_are_refused(whose: str, seed: int, references: tuple[float, ...], tmp_path: Path) -> None:
    """The interval pairs row by row: rows in another order, or one other row, would be paired with strangers."""
    sides = {side: [outcome(0, 2), outcome(1, 4)] for side in ("converted", "control")}
    sides[whose][seed] = outcome(seed, 3, references)
    with pytest.raises(ValueError, match="not measured on the same rows; run both again"):
        published(tmp_path, sides["converted"], sides["control"])


@pytest.mark.parametrize(("batch", "accumulated"), [(4, 1), (4, 3), (1, 8)])
def test_the_batch_size_is_what_a_step_sees(batch: int, accumulated: int, tmp_path: Path) -> None:
    words = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "learning_rate": 3e-4}
    budget = published(tmp_path, [outcome(0, 2)], [], **words).budget
    assert budget.batch_size == batch * accumulated
    assert (budget.steps, budget.sequence_length, budget.learning_rate) == (7, 128, 3e-4)
