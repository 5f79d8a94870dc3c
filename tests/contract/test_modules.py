"""`modules=` chooses a part of a model, `layers` counts inside it, and the choice is kept in the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.wiring.seam import OF_KEYS, kind_of_masks
from tests.harness.places import one_per_place

from .cells import LINEAR, swap_in
from .harness import Recorder, refused, swaps
from .llava import IMAGE_TOKEN, llava


def nested() -> Any:
    """The same, but the tower lies inside the language model, in front of its layers."""
    model = llava()
    tower = model.model.vision_tower
    del model.model.vision_tower
    model.model.language_model.embed_tokens.vision_tower = tower
    return model


def batch_of(length: int = 12, rows: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(IMAGE_TOKEN + 1, 60, (rows, length), generator=generator)
    ids[:, :4] = IMAGE_TOKEN
    pixels = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


def rows(model: Any) -> list[str]:
    return [row.attention for row in describe(model).rows]


STOCK = "softmax (stock)"


@pytest.mark.parametrize("modules", ["language_model", r"model\.language_model", r"language_model\.layers", "lang.*"])
def test_one_tower(modules: str) -> None:
    model = patch_model(llava(), "belief", modules=modules)
    assert rows(model) == [STOCK] * 2 + ["belief"] * 3
    assert {swap["modules"] for swap in model.config.attn_swap["swaps"]} == {modules}
    assert [swap["layers"] for swap in model.config.attn_swap["swaps"]] == [[2, 3, 4]]


def test_layers_count_inside() -> None:
    model = patch_model(llava(), "belief", modules="language_model", layers=[0, 2])
    assert rows(model) == [STOCK, STOCK, "belief", STOCK, "belief"]
    patch_model(model, "outeffhop", modules="vision_tower", layers=1)
    assert rows(model) == [STOCK, "outeffhop", "belief", STOCK, "belief"]
    with refused("layers [3] do not exist", "0 to 2"):
        patch_model(model, "belief", modules="language_model", layers=[3])


def test_strength_of_one_tower() -> None:
    model = patch_model(llava(), "belief")
    assert not any("modules" in swap for swap in model.config.attn_swap["swaps"])
    set_strength(model, 0.5, modules="vision_tower")
    set_strength(model, 0.25, modules="language_model", layers=[1])
    assert [swap.strength for swap in swaps(model)] == [0.5, 0.5, 1.0, 0.25, 1.0]
    unpatch_model(model)
    patch_model(model, "belief", modules="language_model")
    with refused("no swapped layer lies in modules='vision_tower'", "[2, 3, 4]"):
        set_strength(model, 0.5, modules="vision_tower")


@pytest.mark.parametrize("modules", ["vision", "language", "tower.vision", "no_such_tower"])
def test_nothing_fits(modules: str) -> None:
    model = llava()
    with refused(repr(modules), "fits no swappable attention module", "model.language_model.layers", "vision_tower"):
        patch_model(model, "belief", modules=modules)
    assert rows(model) == [STOCK] * 5


@pytest.mark.parametrize(
    ("modules", "reason"), [("(", "no regular expression"), ("", "part of a module path"), (3, "3")]
)
def test_no_pattern(modules: Any, reason: str) -> None:
    with refused(reason):
        patch_model(llava(), "belief", modules=modules)


@pytest.mark.parametrize("variant", one_per_place())
def test_tokens_onto_a_cache_in_a_model_with_nested_configs(variant: str) -> None:
    """The mask function is given the text model's config, the swap is written on the whole model's."""
    model, batch = swap_in(llava(), variant, modules="language_model"), batch_of()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        wanted = model(**batch).logits
        first = model(ids[:, :7], pixel_values=batch["pixel_values"], attention_mask=mask[:, :7], use_cache=True)
        rest = model(ids[:, 7:], attention_mask=mask, **with_cache(model, cache_of(first)))
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
def test_linear_attention_in_a_part_of_a_model_stays_linear(padded: bool) -> None:
    """No tensor of queries times keys, in the text tower of a larger model, before and after loading and unpatching."""
    length = 200
    model, batch = patch_model(llava(), LINEAR[-1], modules="language_model"), batch_of(length)
    if padded:
        batch["attention_mask"][0, :3] = 0
    with torch.no_grad(), Recorder() as seen:
        model(**batch)
    assert any(length in shape for shape in seen.shapes)
    assert not [shape for shape in seen.shapes if sum(size >= length for size in shape) > 1]
    patch_model(model, "belief", modules="language_model")
    assert model.model.language_model.config._attn_implementation == "hf_attn_swap"
    unpatch_model(model)
    assert model.model.language_model.config._attn_implementation == "sdpa"


def test_a_stack_inside_another_keeps_its_own_masks() -> None:
    model = patch_model(nested(), "simpletron")
    text = model.model.language_model
    tower = text.embed_tokens.vision_tower
    patch_model(model, "belief", modules=r"language_model\.layers")
    assert rows(model) == ["simpletron"] * 2 + ["belief"] * 3
    assert kind_of_masks(text.config) is None
    assert kind_of_masks(tower.config) == OF_KEYS
