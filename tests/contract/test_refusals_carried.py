"""Variants that carry scores need every layer, once, with the same keys; linear attention refuses a score bias."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.variants.base import VARIANTS
from tests.harness.checkpointing import ABLE
from tests.harness.one_swap import one_swap
from tests.harness.places import turns

from .cells import OPTION_CELLS, Cell, swap_in
from .harness import assert_same, batch_of, forward, fresh, refused, run

CARRYING = [cell for cell in OPTION_CELLS if "scores" in VARIANTS[cell[0]].places and one_swap(cell).carries]
LINEAR = [name for name in list_variants() if VARIANTS[name].replaces]
SHARED = "albert"


def checkpointed(model: Any, reentrant: bool, **kwargs: Any) -> Any:
    """Switch activation checkpointing on, by its name in this transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant}, **kwargs)
    return model.train()


@pytest.mark.parametrize("family", ABLE)
def test_reentrant_checkpointing(family: str) -> None:
    model = checkpointed(patch_model(fresh(family), CARRYING[0][0]), reentrant=True)
    with refused("re-entrant activation checkpointing", "'use_reentrant': False"):
        model(**batch_of(family))
    forward(model.eval(), batch_of(family))  # nothing is lost without gradients


@pytest.mark.parametrize(("family", "cell"), turns(ABLE, CARRYING))
def test_checkpointing_that_keeps_the_scores(family: str, cell: Cell) -> None:
    """The recomputation must see the same H: gradients as without checkpointing."""
    model = swap_in(fresh(family), cell[0], **cell[1])
    wanted = run(model.train(), batch_of(family))
    assert_same(run(checkpointed(model, reentrant=False), batch_of(family)), wanted)
    if hasattr(model, "activation_checkpointing_enable"):  # newer transformers checkpoint every n-th layer
        assert_same(run(checkpointed(model, reentrant=False, every_n_layers=2), batch_of(family)), wanted)


def test_a_shared_module_cannot_be_checkpointed() -> None:
    """ALBERT calls one module for all layers; computed again after the pass, its place is lost."""
    model = patch_model(fresh(SHARED), CARRYING[0][0])
    group = model.base_model.encoder.albert_layer_groups[0]
    group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
    with refused("serves several layers", "without checkpointing"):
        run(model, batch_of(SHARED))


@pytest.mark.parametrize("seed", range(4))
def test_layer_drop(seed: int) -> None:
    """Dropped layers below one that stays leave a hole; dropping the last ones does not."""
    model = patch_model(fresh("opt", layerdrop=0.5), "modern_hopfield").train()
    torch.manual_seed(seed)
    stays = [float(torch.rand([])) >= 0.5 for _ in range(model.config.num_hidden_layers)]
    torch.manual_seed(seed)
    if any(not below and above for below, above in itertools.pairwise(stays)):
        with refused("layer-drop", "set layerdrop to 0"):
            model(**batch_of("opt"))
    else:
        model(**batch_of("opt"))


def layer_alone(model: Any, index: int, **kwargs: Any) -> Any:
    x = torch.zeros(1, 4, model.config.hidden_size, dtype=model.dtype)
    return model.base_model.encoder.layer[index].attention(x, **kwargs)


def test_layer_without_its_model() -> None:
    with refused("does not pass keyword arguments", "alpha_prime=0"):
        layer_alone(patch_model(fresh("bert"), "modern_hopfield"), 0)
    layer_alone(patch_model(fresh("bert"), "modern_hopfield", alpha_prime=0.0), 0)


def test_layer_without_the_one_below() -> None:
    from hf_attn_swap.core.call import ForwardContext
    from hf_attn_swap.wiring.seam import CONTEXT

    with refused("scores of carrying layer 0 are missing", "run alone"):
        layer_alone(patch_model(fresh("bert"), "modern_hopfield"), 1, **{CONTEXT: ForwardContext()})


def test_no_residual_stream() -> None:
    model = swap_in(fresh("bert"), "modern_hopfield", alpha_prime=0.0, skip="residual")
    with refused("no residual stream", "skip='input'"):
        layer_alone(model, 0)


def hybrid_cache(**config: Any) -> Any:
    built = transformers.Gemma2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, sliding_window=4, pad_token_id=0, eos_token_id=None, bos_token_id=None,
        layer_types=["sliding_attention", "full_attention"], **config,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(built).eval()


def test_layers_with_different_keys() -> None:
    model = patch_model(hybrid_cache(), "modern_hopfield")
    prompt = torch.ones(1, 6, dtype=torch.long)
    length = {"max_new_tokens": 3, "do_sample": False}
    wanted = model.generate(prompt, use_cache=False, **length)
    assert torch.equal(model.generate(prompt, **length), wanted), "a new cache keeps the keys outside of windows, too"
    with refused("the layers do not see", "use_cache=False"):
        model.generate(prompt, cache_implementation="static", **length)


@pytest.mark.parametrize("name", LINEAR)
def test_no_place_for_a_soft_cap(name: str) -> None:
    with refused("layers.0.self_attn", "bounds its scores by a soft cap", f"{name} computes no scores", "layers="):
        patch_model(hybrid_cache(), name)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_no_place_for_a_finite_bias(strength: float) -> None:
    name = LINEAR[-1]
    model = patch_model(fresh("bert"), name, strength=strength)
    batch = batch_of("bert")
    rows, length = batch["input_ids"].shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.float64)
    batch["attention_mask"] = mask.clone()
    forward(model, batch)
    mask[..., 0] = -1.5
    batch["attention_mask"] = mask
    with refused(name, "finite values other than 0", "bool mask"):
        forward(model, batch)


def test_the_residual_skip_says_what_it_is_for() -> None:
    with pytest.warns(UserWarning, match="trained from scratch"):
        patch_model(fresh("bert"), "modern_hopfield", skip="residual")
