"""Architectures of transformers' own registry: exact, or refused when they are patched; there is no third outcome."""

from __future__ import annotations

import copy
import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EsmConfig, EsmModel, TrainingArguments

from docs.tables.architectures import known, known_version, record, written
from hf_attn_swap import describe, patch_model, unpatch_model
from hf_attn_swap.conversion import DistillationTrainer, Losses
from hf_attn_swap.families import sites
from tests.contract.harness import perturb, refused, swaps
from tests.harness.places import turns
from tests.slow import slow_simple_attention

from .cached import decodings
from .children import Walk, Work, read, walked
from .named import named
from .probe import distance, find_probes, run
from .shrink import CHOICES
from .tiny import build, configured, registry
from .walk import EXACT, LATE, NOT_BUILT, PART, REFUSED, VARIANTS, WRONG, Outcome, compare, find, hold

HANDFUL = 3
NO_SDPA = ("bigbird_pegasus", "nllb-moe", "pegasus_x")  # their stock attention is not SDPA
ONCE_REFUSED = (
    "aimv2_vision_model",
    "bigbird_pegasus",
    "pegasus_x",
    "sam3_vit_model",
    "seamless_m4t",
    "seamless_m4t_v2",
    "siglip_vision_model",
)
BARE = ("siglip_vision_model", "aimv2_vision_model", "sam3_vit_model")  # layers take no keywords
SINKS = ("gpt_oss", "inkling2_text")
LATENT = "deepseek_v3"  # queries and keys are wider than values


def behind(model_type: str) -> str:
    """The model type, if this transformers sends its attention through the interface (some came after 5.10)."""
    if not sites(fresh(model_type)):
        pytest.skip(f"transformers {transformers.__version__} computes the attention of {model_type} in its own code")
    return model_type


def fresh(model_type: str) -> Any:
    return build(configured(named(model_type), CHOICES[0]))


def stock_and_probes(model_type: str) -> tuple[Any, Any, Any]:
    model = fresh(model_type)
    probes = find_probes(model, {site.path for site in sites(model) if site.usable})
    return model, probes, [run(model, probe) for probe in probes]


def drawn() -> list[str]:
    """The same few architectures in every run, of those that the page could build."""
    built = {name for (name, _), result in known().items() if result != NOT_BUILT}
    return random.Random(0).sample(sorted(built.intersection(registry())), HANDFUL)


@pytest.mark.slow
def test_a_handful() -> None:
    stocks = {model_type: find(model_type) for model_type in drawn()}
    for model_type, variant in itertools.product(stocks, VARIANTS):
        outcome = compare(stocks[model_type], variant)
        assert outcome.result not in (WRONG, LATE), outcome
        if transformers.__version__ == known_version():
            assert outcome.result == known()[model_type, variant], outcome


@pytest.mark.slow
def test_every_architecture(tmp_path: Path) -> None:
    """All of the registry: nothing wrong, nothing refused late, and everything exact that the page says is exact."""
    outcomes = walked(file=tmp_path / "outcomes.jsonl")
    assert not [outcome for outcome in outcomes if outcome.result in (WRONG, LATE)]
    exact = {(outcome.model_type, outcome.variant) for outcome in outcomes if outcome.result in (EXACT, PART)}
    assert all(outcome.sentence for outcome in outcomes if outcome.result == REFUSED)
    assert len({name for name, _ in exact}) >= 204
    if transformers.__version__ == known_version():
        page = {place for place, result in known().items() if result in (EXACT, PART)}
        assert not page - exact


def test_the_page_has_no_fault() -> None:
    assert not [place for place, result in known().items() if result in (WRONG, LATE)]
    if transformers.__version__ == known_version():
        assert {name for name, _ in known()} == set(registry())
        assert set(VARIANTS) <= {variant for _, variant in known()}


def test_each_sentence_is_written_once() -> None:
    """Model types and variants that are refused for one reason share a sentence; the names in it are their own."""
    outcomes = [
        Outcome("bart", "belief", REFUSED, "BartModel: layers.0.attn has 4 heads in belief."),
        Outcome("bart", "sparsemax", EXACT, ""),
        Outcome("opt", "belief", REFUSED, "OPTModel: decoder.layers.1.attn has 8 heads in belief."),
        Outcome("opt", "sparsemax", REFUSED, "OPTModel: decoder.layers.1.attn has 8 heads in sparsemax."),
        Outcome("t5", "belief", PART, "another reason", modules=4, run=3),
        Outcome("t5", "sparsemax", NOT_BUILT, "no inputs"),
    ]
    made = record(outcomes, "5")
    assert made["variants"] == ["sparsemax", "belief"]
    assert made["types"]["bart"] == ["Bart", "exact", "refused (2)"]
    assert made["types"]["opt"] == ["OPT", "refused (2)", "refused (2)"]
    assert made["types"]["t5"] == ["T5", "not built (3)", "exact in part (1; 3 of 4 ran)"]
    assert made["sentences"] == [
        ["1", PART, "another reason", "t5"],
        ["2", REFUSED, "BartModel: layers.0.attn has 4 heads in belief.", "bart"],
        ["3", NOT_BUILT, "transformers builds no model from any of our small configurations.", "t5"],
    ]
    assert json.loads(written(made)) == made


@pytest.mark.parametrize(
    "model_type",
    [LATENT, "jetmoe", "nllb-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ONCE_REFUSED)],
)
def test_exact_with_belief(model_type: str) -> None:
    assert hold(behind(model_type)).result == EXACT


@pytest.mark.parametrize("model_type", SINKS)
def test_sinks_are_refused_when_patched(model_type: str) -> None:
    model = fresh(model_type)
    with refused("attention sinks", "use the stock attention"):
        patch_model(model, "outeffhop")
    assert not swaps(model)


def test_parts_chosen_by_the_implementation_are_refused_when_patched() -> None:
    """GIT looks its text attention up by the implementation's name: transformers could not load a saved swap."""
    model = fresh("git")
    with refused("GitAttention", "a saved swap could not be loaded"):
        patch_model(model, "belief")
    assert not swaps(model)


def test_packed_tower_is_refused_when_patched() -> None:
    model = fresh("qwen2_5_vl")
    with refused("visual.blocks.0.attn", "not one row per query"):
        patch_model(model, "belief")
    patch_model(model, "outeffhop")


@pytest.mark.parametrize(("kind", "found"), [("relative", "adds a position bias to its scores"), ("rotary", None)])
def test_position_bias_by_the_config(kind: str, found: str | None) -> None:
    """One class, and only one of its position embeddings is a bias."""
    config = configured(behind("wav2vec2-conformer"), CHOICES[0])
    config.position_embeddings_type = kind
    assert {site.biased for site in sites(build(config))} == {found}


def test_learned_queries_are_refused() -> None:
    model = patch_model(fresh("videoprism"), "belief")
    assert "its queries are parameters (pooling_attention_query)" in str(describe(model))


def test_attention_to_two_sequences_at_once_is_refused() -> None:
    model = patch_model(fresh("t5gemma2"), "belief")
    assert "another sequence (encoder_hidden_states) at once" in str(describe(model))


@pytest.mark.parametrize("model_type", ["nllb-moe", "seamless_m4t"])
def test_cross_attention_by_the_call(model_type: str) -> None:
    """One class serves both places: the decoder layer's call tells them apart."""
    found = sites(fresh(behind(model_type)))
    found = {site.path.rpartition(".")[2]: site.cross for site in found if "decoder" in site.path}
    assert found == {"self_attn": False, "cross_attention": True}


@pytest.mark.parametrize(("model_type", "variant"), turns(BARE, ["modern_hopfield", "belief_star", "simpletron_resl"]))
def test_context_arrives_without_keywords(model_type: str, variant: str) -> None:
    """The layer's input, the carried scores and what comes after W_o, where only the mask is handed on."""
    stock, probes, wanted = stock_and_probes(model_type)
    model = perturb(patch_model(copy.deepcopy(stock), variant))
    moved = [run(model, probe) for probe in probes]
    assert all(distance(one, two) > 1e-4 for one, two in zip(moved, wanted, strict=True))
    with torch.no_grad():
        shown = model(**probes[0].batch, output_attentions=True)
    assert len(shown.attentions) == len(swaps(model))
    assert distance([shown.last_hidden_state], moved[0][:1]) <= 3e-5
    unpatch_model(model)
    assert all(torch.equal(a, b) for a, b in zip(run(model, probes[0]), wanted[0], strict=True))


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "aimv2_vision_model"])
@pytest.mark.parametrize("variant", ["softmax", "belief"])
def test_the_loss_of_layers_without_keywords(model_type: str, variant: str, tmp_path: Path) -> None:
    """The teacher is the stock attention too where only the mask is handed on, with the first call's mask."""
    model, probes, _ = stock_and_probes(model_type)
    patch_model(model, variant)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = DistillationTrainer(model, args, losses=Losses(logits=0.0, layers=1.0), trainable="body")
    loss = trainer.compute_loss(model, probes[0].batch)
    assert torch.isfinite(loss)
    assert (loss < 1e-9) if variant == "softmax" else (loss > 1e-3)


@pytest.mark.parametrize("model_type", NO_SDPA)
def test_float_masks_survive_saving(model_type: str, tmp_path: Path) -> None:
    """A loaded model knows again that its stock masks are numbers to add."""
    stock, probes, wanted = stock_and_probes(model_type)
    model = patch_model(copy.deepcopy(stock), "belief", strength=0.0)
    model.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path).eval()
    assert swaps(loaded)
    assert all(distance(run(loaded, probe), want) <= 1e-5 for probe, want in zip(probes, wanted, strict=True))
    unpatch_model(loaded)
    assert all(distance(run(loaded, probe), want) <= 1e-5 for probe, want in zip(probes, wanted, strict=True))
    assert "attn_swap_masks" not in json.dumps(loaded.config.to_dict())


def test_a_wrong_cache_is_seen() -> None:
    """A model that forgets what is in its cache decodes other numbers than without a cache."""
    model, probes, _ = stock_and_probes("llama")
    ways, left_out = decodings(model, probes, 1e-5)
    assert [way.words for way in ways] == ["", " with left padding"]
    assert not left_out
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(forget, with_kwargs=True)
    assert all(way.distance(model) > 1e-3 for way in ways)


def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {name: None if isinstance(value, transformers.Cache) else value for name, value in kwargs.items()}


@pytest.mark.slow
def test_a_walk_goes_on_from_its_file(tmp_path: Path) -> None:
    """What a file of outcomes holds is not run again."""
    file = tmp_path / "outcomes.jsonl"
    first = Outcome("llama", "belief", EXACT, "kept")
    file.write_text(json.dumps(asdict(first)) + "\n")
    outcomes = walked(("belief", "outeffhop"), ["llama", "no such model"], file=file, processes=2)
    assert outcomes[0] == first
    assert [outcome.result for outcome in outcomes] == [EXACT, EXACT, NOT_BUILT, NOT_BUILT]
    assert "KeyError" in outcomes[2].sentence
    assert read(file) == [first, *outcomes[1:]]


class Dying(Walk):
    """A walk whose children die over one variant of an architecture that they could build, and over another one."""

    def _child(self, work: Work) -> tuple[set[str], int]:
        for name, variants in work.items():
            for variant in variants:
                if variant == "belief" or name == "opt":
                    return {"bert", "llama"}, -11
                self._keep(Outcome(name, variant, EXACT, ""))
        return set(work), 0


def test_a_child_that_dies_costs_one_variant() -> None:
    walk = Dying(None)
    variants = ["outeffhop", "belief", "gated"]
    walk.run(dict.fromkeys(("bert", "opt", "llama"), variants))
    assert {name: [walk.found[name, each].result for each in variants] for name in ("bert", "opt", "llama")} == {
        "bert": [EXACT, WRONG, EXACT],
        "opt": [NOT_BUILT, NOT_BUILT, NOT_BUILT],
        "llama": [EXACT, WRONG, EXACT],
    }


def test_linear_attention_reads_unscaled_queries() -> None:
    """This module scales its queries itself, and reshapes them by a method of its own."""
    model, probes, _ = stock_and_probes("qwen2_audio_encoder")
    patch_model(model, "simpletron_resl", layers=[0])
    site = next(site for site in sites(model) if site.usable)
    passed: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        passed[name] = tensor

    for name in ("query", "key", "value"):
        projection = site.core.get_submodule(getattr(site.family, name))
        projection.register_forward_hook(lambda _, args, output, name=name: keep(name, output))
    output = site.container.get_submodule(str(site.family.output))
    output.register_forward_pre_hook(lambda _, args: keep("heads", args[0]))
    with torch.no_grad():
        model(**probes[0].batch)
    heads = site.geometry().heads
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in map(passed.get, ("query", "key", "value")))
    wanted = slow_simple_attention(q, k, v, allowed=torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool))
    assert distance([passed["heads"]], [wanted.transpose(1, 2).flatten(2)]) <= 1e-5


def test_the_scale_of_queries_is_read() -> None:
    """By the attention function, or by the module itself (ESM, before its angles), or not at all (T5)."""
    esm = EsmModel(EsmConfig(vocab_size=33, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=1))
    scales = [{site.query_scale for site in sites(model)} for model in (fresh("llama"), esm, fresh("t5"))]
    assert scales == [{1.0}, {0.25}, {1.0}]


def test_linear_attention_refuses_queries_of_unknown_scale() -> None:
    """TimesFM learns a scale for each number of a head."""
    with refused("scales its queries by a factor", "TimesFmAttention"):
        patch_model(fresh("timesfm"), "simpletron_resl")


def test_a_part_that_is_not_built_on_meta_is_loaded(tmp_path: Path) -> None:
    """DiffLlama draws some of its numbers on the CPU even while `from_pretrained` builds it without weights."""
    stock, probes, _ = stock_and_probes("diffllama")
    for variant in ("softmax", "sink"):
        model = perturb(patch_model(copy.deepcopy(stock), variant))
        model.save_pretrained(tmp_path / variant)
        loaded = type(stock).from_pretrained(tmp_path / variant).eval()
        assert distance(run(loaded, probes[0]), run(model, probes[0])) <= 1e-6


def test_windowed_blocks_are_patched_again() -> None:
    """A patched block keeps configs, which cannot be hashed."""
    model = patch_model(fresh("sam3_vit_model"), "belief")
    patch_model(model, "modern_hopfield")
    assert {name for swap in swaps(model) for name in swap.names} == {"modern_hopfield"}
