"""The same exactness on real pretrained weights: MiniLM, SmolLM2, a ViT-S, a small ALBERT and a small LLaMA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_attn_swap import describe, list_variants, patch_model, set_strength, unpatch_model
from hf_attn_swap.layer.registry import parse, tiny_options
from hf_attn_swap.measuring.retrieval import haystacks, pair_texts
from tests.contract.harness import gradient_distance, perturb, swaps, without_shortcut
from tests.harness.process import python

from .checkpoints import CHECKPOINTS, FOLDER, GENERATING, TEXTS, alone, fresh, inputs, needs, real, relative, run, stock

VARIANTS = pytest.mark.parametrize("variant", list_variants())
TOLERANCE = 2e-5  # fp32, a few dozen layers deep
FP64 = 1e-11


def loosely(variant: str) -> float:
    """SimpleTRON's unnormalized sums on softmax weights are large and cancel: digits are lost in any order."""
    return 1e-3 if any(cls.replaces for cls in parse(variant)) else TOLERANCE


@pytest.mark.parametrize("name", list(map(needs, CHECKPOINTS)))
@VARIANTS
def test_exact_at_zero_and_back(name: str, variant: str) -> None:
    """Stock bits with the shortcut, fp32 tolerance without it, another model at 1, stock bits after unpatching."""
    batch = inputs(name)
    wanted = run(stock(name), batch)
    model = patch_model(fresh(name), variant, strength=0.0, **tiny_options(variant))
    assert torch.equal(run(model, batch), wanted)
    assert relative(run(without_shortcut(model), batch), wanted) <= TOLERANCE
    swapped = run(perturb(set_strength(model, 1.0)), batch)
    assert (relative(swapped, wanted) > 1e-3) == (variant != "softmax")
    assert len(swaps(model)) == sum(row.layer is not None for row in describe(model).rows) > 0
    assert torch.equal(run(unpatch_model(model), batch), wanted)


@pytest.mark.parametrize("name", list(map(needs, CHECKPOINTS)))
@VARIANTS
def test_fused_equals_reference(name: str, variant: str) -> None:
    """In fp64: thirty trained layers amplify fp32's rounding by hundreds, which is the model's own, not the form's."""
    batch = {key: value.double() if value.is_floating_point() else value for key, value in inputs(name).items()}
    model = perturb(patch_model(fresh(name).double(), variant, **tiny_options(variant)))
    for strength in (1.0, 0.3):
        fused = run(set_strength(model, strength), batch)
        assert relative(run(model, batch, output_attentions=True), fused) <= FP64


@pytest.mark.parametrize("name", [needs(name) for name in CHECKPOINTS if not CHECKPOINTS[name].slow])
@VARIANTS
def test_gradients_at_zero(name: str, variant: str) -> None:
    batch = inputs(name)

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        out = real(model(**batch), batch)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * weights).mean().backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None and ".attn_swap." not in key}

    wanted = gradients(fresh(name))
    model = patch_model(fresh(name), variant, strength=0.0, **tiny_options(variant))
    assert gradient_distance(gradients(model), wanted) <= 1e-6
    model.zero_grad()
    assert gradient_distance(gradients(without_shortcut(model)), wanted) <= TOLERANCE


@pytest.mark.parametrize("name", list(map(needs, TEXTS)))
@VARIANTS
def test_padding_does_not_matter(name: str, variant: str) -> None:
    batch = inputs(name)
    model = perturb(patch_model(fresh(name), variant, strength=0.5, **tiny_options(variant)))
    together = run(model, batch).split(batch["attention_mask"].sum(1).tolist())
    for index, row in enumerate(together):
        assert relative(row, run(model, alone(batch, index))) <= loosely(variant)


@pytest.mark.parametrize("name", list(map(needs, GENERATING)))
@VARIANTS
def test_cached_generation(name: str, variant: str) -> None:
    """Greedy tokens and logits of a left-padded batch do not depend on the cache."""
    batch = inputs(name)
    model = patch_model(fresh(name), variant, strength=0.3, **tiny_options(variant))
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings |= {"pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(**batch, **settings, use_cache=False)
    cached = model.generate(**batch, **settings, use_cache=True)
    assert torch.equal(cached.sequences, whole.sequences)
    for got, wanted in zip(cached.logits, whole.logits, strict=True):
        assert relative(got, wanted) <= loosely(variant)


CHILD = """
import sys, torch, transformers, hf_attn_swap
folder, auto = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder)
batch, wanted = torch.load(folder + "/expected.pt")
with torch.no_grad():
    assert torch.equal(model(**batch)[0], wanted)
print(hf_attn_swap.describe(model).summary())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(map(needs, CHECKPOINTS)))
def test_loaded_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    batch = inputs(name)
    model = perturb(patch_model(fresh(name), "outeffhop+gated", strength=0.3))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.save((batch, model(**batch)[0]), tmp_path / "expected.pt")
    assert describe(model).summary() in python("-c", CHILD, tmp_path, CHECKPOINTS[name].auto).stdout


@pytest.mark.parametrize("name", [needs("smollm2")])
def test_hidden_numbers_and_pairs_are_found_far_more_often_than_by_chance(name: str) -> None:
    """Otherwise the two measures would say nothing. A window that hides them, as patched, takes them away."""
    tokenizer = AutoTokenizer.from_pretrained(Path(FOLDER) / name)
    text = (Path(__file__).parents[2] / "docs" / "mathematics.md").read_text("utf-8")
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:4096]]
    texts, pairs = (
        haystacks(stock(name), rows, tokenizer, (256,), texts=2),
        pair_texts(stock(name), rows, tokenizer, (64,), texts=1),
    )
    found, values = texts.measure(stock(name)), pairs.measure(stock(name)).by_pairs[64]
    assert found.together[256].token_accuracy > 0.8 > 0.3 > found.chance[256].token_accuracy
    assert found.together[256].exact_match >= 0.5
    assert values.exact_match > 0.4, "a guess is right once in 64 times"
    blind = patch_model(fresh(name), "window", window=16, sinks=1)
    assert texts.measure(blind).together[256].exact_match < 0.2
    assert pairs.measure(blind).by_pairs[64].exact_match < 0.1
