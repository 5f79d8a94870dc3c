"""Cards are rendered from results alone, hold what they must, and their metadata is what the Hub wants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.card import bare_card, bibtex, commands_beside, layers_text, number, render, table
from hf_attn_swap.publish.results import RESULTS_FILE, AppliedSwap, RunResult

from .examples import full, measured, metric, result, sparse

ROOT = Path(__file__).parents[2]
SPARSE = RunResult.from_dict(sparse())


def metadata(text: str) -> dict[str, Any]:
    block = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert block is not None
    data = yaml.safe_load(block[1])
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("run", [result(), SPARSE], ids=["full", "sparse"])
def test_card_is_valid_and_its_metadata_survive_a_round_trip(run: RunResult) -> None:
    text = render(run, "me/model")
    once = ModelCard(text)
    again = ModelCard(str(once))
    assert once.data.to_dict() == again.data.to_dict() == metadata(text)
    assert str(again) == text


def test_metadata() -> None:
    data = metadata(render(result()))
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["hf-attn-swap", "attn-swap:belief", "attn-swap:outeffhop+gated"]
    assert data["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert data["base_model_relation"] == "finetune"
    assert data["datasets"] == ["cornell-movie-review-data/rotten_tomatoes"]
    assert data["metrics"] == ["accuracy", "loss"]
    assert "license" not in metadata(render(result(license=None)))
    assert (data["license"], data["language"], data["pipeline_tag"]) == ("apache-2.0", ["en"], "text-classification")
    index = data["model-index"][0]["results"][0]
    assert index["dataset"]["split"] == "test"
    assert index["metrics"][0] == {"type": "accuracy", "value": 0.82, "name": "accuracy (mean of 3 seeds)"}
    assert "language" not in metadata(render(SPARSE))


def test_a_file_of_the_user_is_no_data_set_of_the_hub() -> None:
    run = result(data={**result().data.__dict__, "name": "my-texts"})
    assert {"datasets", "model-index"}.isdisjoint(metadata(render(run)))
    assert "`my-texts`" in render(run)
    assert "huggingface.co/datasets/my-texts" not in render(run)


def test_a_model_from_scratch_has_no_base_model() -> None:
    run = result(base={**result().base.__dict__, "relation": "scratch"}, language=[])
    outcome, text = metadata(render(run)), render(run)
    assert "base_model" not in outcome
    assert "base_model_relation" not in outcome
    assert "from-scratch" in outcome["tags"]
    assert "Tokenizer" not in text
    assert "random weights" in text


def test_a_folder_is_no_name_on_the_hub() -> None:
    """The card names it without a link, and the metadata leave it out: the Hub would look for another model."""
    run = result(base={**result().base.__dict__, "name": "checkpoint-400", "on_hub": False})
    text = render(run)
    data = metadata(text)
    assert "base_model" not in data
    assert "base_model_relation" not in data
    assert "\n`checkpoint-400` with its softmax attention replaced" in text
    assert "huggingface.co/checkpoint-400" not in text
    assert "huggingface.co/sentence-transformers/all-MiniLM-L6-v2)" in render(result())


def test_recall_is_explained_where_it_was_measured() -> None:
    assert "a passage gains" not in render(result())
    both = [metric("accuracy", 0.5), metric("recall_after_200", 3.5)]
    run = result(converted={**measured(0.5), "metrics": both, "outliers": None}, control=None, difference=None)
    text = render(run)
    assert "| recall_after_200 (higher is better) | 3.5 |" in text
    assert "\n`recall_after_200`: " in text


@pytest.mark.parametrize(
    ("loader", "shown"),
    [
        ("AutoModelForCausalLM", "from transformers import AutoModelForCausalLM, AutoTokenizer"),
        ("PatchTSTForPrediction", "from transformers import AutoTokenizer, PatchTSTForPrediction"),
        ("lra.Matcher", "from lra import Matcher"),
    ],
)
def test_how_it_loads(loader: str, shown: str) -> None:
    text = render(result(base={**result().base.__dict__, "relation": "scratch", "auto_class": loader}))
    assert shown in text
    assert f"model = {loader.rpartition('.')[2]}.from_pretrained(" in text


def test_card_says_what_the_results_hold() -> None:
    text = render(result(), "me/model")
    for part in (
        "| accuracy (higher is better) | 0.8200 ± 0.0100 | 0.8100 ± 0.0100 | +0.0100 ± 0.0100 [-0.005, +0.025] |",
        "softmax control, seeds 0, 1, 2: accuracy 0.8, 0.81, 0.82",
        "| 0-2, 4 of 6 | belief | `Y - (<Y, V> / <V, V>) V` | none | 1 |",
        "`kind=linear` `pi_init=0.25` | 0.5 |",
        "× 1.12",
        "kurtosis (lower is better)",
        "title = {{BeliefFormer}: Belief Attention in Transformer}",
    ):
        assert part in text
    assert text.count("hu2024outeffhop") == 1


def test_a_card_without_control_seeds_cost_and_outliers_says_so() -> None:
    text = render(SPARSE)
    assert "**There is no control**" in text
    assert "softmax control |" not in text
    assert "One seed: its spread is not known" in text
    assert "## Cost\n\nThe time of a pass beside stock attention was not measured." in text
    assert "Outliers" not in text
    assert "Not fine-tuned; run on batches of 16 × 64 tokens." in text


def test_seeds_that_differ_are_not_paired() -> None:
    control = {**measured(0.80, 0.81, 0.82), "seeds": [7, 8, 9]}
    text = render(result(control=control))
    assert "| +0.01 [-0.005, +0.025] |" in text
    assert "seed by seed" not in text
    assert "softmax control, seeds 7, 8, 9" in text


@pytest.mark.parametrize("variant", list_variants())
def test_every_variant_has_a_citation(variant: str) -> None:
    for entry in bibtex(get_variant(variant).about.paper):
        assert re.match(r"@\w+\{\w+,\n", entry)
        assert entry.count("{") == entry.count("}")


def test_a_paper_without_citation_is_an_error() -> None:
    with pytest.raises(ValueError, match="no citation for the paper 'Nobody, 1900'"):
        bibtex("Nobody, 1900")


def test_card_without_results() -> None:
    text = bare_card(result().swaps, 6, "me/model")
    assert metadata(text) == {
        "library_name": "transformers",
        "tags": ["hf-attn-swap", "attn-swap:belief", "attn-swap:outeffhop+gated"],
    }
    assert "**belief** at strength 1 (layers: 0-2, 4 of 6); **outeffhop+gated** at strength 0.5" in text
    assert 'from_pretrained("me/model")' in text
    assert "No results were published" in text


def test_table(tmp_path: Path) -> None:
    for name, data in (("one", full()), ("two", sparse())):
        (tmp_path / name).mkdir()
        (tmp_path / name / RESULTS_FILE).write_text(json.dumps(data))
    (tmp_path / "one" / "README.md").touch()
    lines = table(tmp_path).splitlines()
    assert len(lines) == 2 + 4  # two metrics each
    assert len({line.count(" | ") for line in lines}) == 1
    assert lines[2].startswith("| [minilm-belief-reviews](one/README.md) | sentence-transformers/all-MiniLM-L6-v2 |")
    assert "| 0.8200 ± 0.0100 | 0.8100 ± 0.0100 | +0.0100 ± 0.0100 [-0.005, +0.025] | 3 | × 1.12 |" in lines[2]
    assert "| 0.5 | none |  | 1 | not measured |" in lines[4]
    assert f"](two/{RESULTS_FILE})" in lines[4]
    with pytest.raises(ValueError, match=r"no results\.json in any folder"):
        table(tmp_path / "one")
    (tmp_path / "two" / RESULTS_FILE).write_text("{}")
    with pytest.raises(ValueError, match="two"):
        table(tmp_path)


@pytest.mark.parametrize(
    ("mean", "spread", "expected"),
    [
        (0.123456, None, "0.1235"),
        (0.123456, 0.0, "0.1235 ± 0"),
        (0.123456, 0.0123, "0.123 ± 0.012"),
        (1234.5, 67.8, "1234 ± 68"),
        (12345.6, 6789.0, "12346 ± 6789"),
        (1e-9, 2e-10, "1e-09 ± 2e-10"),
    ],
)
def test_numbers(mean: float, spread: float | None, expected: str) -> None:
    assert number(mean, spread) == expected


def test_layers() -> None:
    def words(*layers: int) -> str:
        return layers_text(AppliedSwap(components=result().swaps[0].components, layers=layers, strength=1), 12)

    assert words(3) == "3 of 12"
    assert words(5, 6, 7, 1) == "1, 5-7 of 12"
    assert words(*range(12)) == "all 12"


def test_published_cards_are_what_their_results_and_commands_render() -> None:
    paths = sorted((ROOT / "model_cards").glob(f"*/{RESULTS_FILE}"))
    assert paths
    for path in paths:
        commands = commands_beside(path)
        assert commands
        assert (path.parent / "README.md").read_text("utf-8") == render(RunResult.load(path), commands=commands), path


def test_commands_stand_on_the_card_as_they_are_typed() -> None:
    text = render(result(), commands=["# first the data", "python make.py '{\"a\": 1}'", "hf-attn-swap push x me/y"])
    console = re.search(r"```console\n(.*?)```", text, re.DOTALL)
    assert console is not None
    assert console[1] == "# first the data\n$ python make.py '{\"a\": 1}'\n$ hf-attn-swap push x me/y\n"
    assert "```console" not in render(result())
