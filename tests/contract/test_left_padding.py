"""Padding in front: a row of a batch is the row alone, in every program that runs a model, and with every variant.

The pairs of `sink` stand at the place before the first token that the row sees, whatever its position is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as T  # as in the other tests
from torch import Tensor
from transformers import DynamicCache

from benchmarks.bench_caches import with_cache
from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.conversion import absorb_sink
from hf_attn_swap.layer.registry import tiny_options
from tests.conversion.letters import Letters
from tests.harness.places import turns

from .cells import swap_in
from .harness import TOLERANCE, distance, fresh, perturb, refused, swaps

ROTATED = 1e-6  # transformers computes the angles of rotary embeddings in fp32
LONG, SHORT = 13, 9  # tokens of the rows; the short one has padding in front
CUT = 8  # tokens of a prompt, before which the padding lies
PADDING = LONG - SHORT


def places(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1]).expand_as(mask)


def counted(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


def at_once(model: Any, ids: Tensor, mask: Tensor, positions: Any = None, **given: Any) -> Tensor:
    if positions is not None:
        given["position_ids"] = positions(mask)
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **given).logits
    return logits


def by_steps(model: Any, ids: Tensor, mask: Tensor, positions: Any = None) -> Tensor:
    """A prompt, single tokens, and several tokens."""
    cache, logits = DynamicCache(config=model.config), []
    prompt = CUT - (LONG - ids.shape[1])
    cuts = [0, *range(prompt, ids.shape[1] - 1), ids.shape[1]]
    for start, end in itertools.pairwise(cuts):
        given = {} if positions is None else {"position_ids": positions(mask)[:, start:end]}
        given |= with_cache(model, cache)
        logits.append(model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **given).logits)
    return torch.cat(logits, 1)


def generated(model: Any, ids: Tensor, mask: Tensor, **how: Any) -> Tensor:
    """The logits of the generated tokens, behind so many zeros as the text has tokens."""
    how |= {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = model.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **how).logits
    return F.pad(torch.stack(logits, 1), (0, 0, ids.shape[1], 0))


def as_embeddings(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """As sentence-transformers calls a decoder: its `forward`, without a head, without positions."""
    decoder: Any = next(child for child in model.children() if isinstance(child, T.PreTrainedModel))
    states: Tensor = decoder.forward(input_ids=ids, attention_mask=mask).last_hidden_state
    return states


def of_queries_and_keys(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    shown = mask[:, None, None, :].bool() & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits: Tensor = model(input_ids=ids, attention_mask=shown, use_cache=False).logits
    return logits


PROGRAMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "at once": at_once,
    "at once, tokens counted": functools.partial(at_once, positions=counted),
    "at once, places counted": functools.partial(at_once, positions=places),
    "at once, counted from 5": functools.partial(at_once, positions=lambda mask: counted(mask) + 5 * (1 - mask[:, :1])),
    "by steps": by_steps,
    "by steps, tokens counted": functools.partial(by_steps, positions=counted),
    "by steps, places counted": functools.partial(by_steps, positions=places),
    "generate": generated,
    "generate, static cache": functools.partial(generated, cache_implementation="static", disable_compile=True),
    "forward of the decoder": as_embeddings,
    "4-D mask": of_queries_and_keys,
}
COUNTED = ("at once, tokens counted", "by steps, tokens counted", "generate")  # what learned positions need


@torch.no_grad()
def moved(model: Any, program: str) -> float:
    """How far a row in a batch, with padding in front, is from the row alone."""
    ids = torch.randint(5, 60, (2, LONG), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :PADDING], mask[0, :PADDING] = 3, 0
    run = PROGRAMS[program]
    alone = run(model, ids[:1, PADDING:], mask[:1, PADDING:])
    return distance(run(model, ids, mask)[:1, PADDING:], alone)


def scaled(model: Any) -> Any:
    """Weights so large that attention matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval().double()


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
GROUPED = SMALL | dict(num_key_value_heads=2)
MIXED = GROUPED | dict(head_dim=8, sliding_window=6)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LATENT |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
COMPLEX = dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=32)
TABLES = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)


def rotary(kind: str, **more: Any) -> dict[str, Any]:
    return GROUPED | dict(rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **more})


LENGTH = dict(factor=2.0, original_max_position_embeddings=32)
BANDS = dict(low_freq_factor=1.0, high_freq_factor=4.0)
FACTORS = dict(short_factor=[1.5] * 4, long_factor=[2.0] * 4)
ROTARY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "default": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "linear": ("LlamaConfig", "LlamaForCausalLM", rotary("linear", factor=2.0)),
    "dynamic": ("LlamaConfig", "LlamaForCausalLM", rotary("dynamic", factor=2.0)),
    "yarn": ("LlamaConfig", "LlamaForCausalLM", rotary("yarn", **LENGTH)),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", rotary("llama3", **LENGTH, **BANDS)),
    "longrope": ("Phi3Config", "Phi3ForCausalLM", rotary("longrope", **LENGTH, **FACTORS)),
    "partial": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL),
    "partial, without keywords": ("StableLmConfig", "StableLmForCausalLM", GROUPED),
    "interleaved": ("CohereConfig", "CohereForCausalLM", GROUPED),
    "latent": ("DeepseekV3Config", "DeepseekV3ForCausalLM", SMALL | LATENT),
    "two kinds of layers": ("Gemma3TextConfig", "Gemma3ForCausalLM", MIXED),
    "complex": ("Llama4TextConfig", "Llama4ForCausalLM", GROUPED | COMPLEX),
    "tables": ("GPTJConfig", "GPTJForCausalLM", TABLES),
}
NOT_ABSORBED = ("tables", "two kinds of layers")  # a token of a text would leave a window of 6, and a pair does not


@functools.cache
def with_sink(kind: str, absorbed: bool) -> Any:
    config, cls, given = ROTARY[kind]
    torch.manual_seed(0)
    model = patch_model(scaled(getattr(T, cls)(getattr(T, config)(**given))), "sink", tokens=2)
    if absorbed:
        absorb_sink(model, Letters(), ["the first text"], tokens=[7, 9])
        return model
    with torch.no_grad():
        for swap in swaps(model):
            for parameter in swap.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("kind", ROTARY)
def test_pairs_stand_before_the_first_seen_token(kind: str) -> None:
    """Drawn pairs, and those of tokens: positions of the stack, of a cache, and of a layer."""
    for absorbed in (False, True)[: 1 if kind in NOT_ABSORBED else 2]:
        for program in ("at once", "by steps", "forward of the decoder"):
            assert moved(with_sink(kind, absorbed), program) <= ROTATED, (absorbed, program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program(program: str) -> None:
    for absorbed in (False, True):
        assert moved(with_sink("default", absorbed), program) <= ROTATED


@functools.cache
def swapped(family: str, name: str) -> Any:
    return perturb(swap_in(fresh(family), name, **tiny_options(name)))


@pytest.mark.parametrize(("name", "program"), turns(list_variants(), list(PROGRAMS)))
def test_every_variant(name: str, program: str) -> None:
    """The variants and the programs take turns."""
    assert moved(swapped("llama", name), program) <= ROTATED


def test_carried_scores_refuse_a_program_that_goes_around_the_model() -> None:
    with refused("call model(...)"):
        moved(swapped("llama", "modern_hopfield"), "forward of the decoder")


@pytest.mark.parametrize(("family", "program"), list(itertools.product(["gpt2", "opt"], COUNTED)))
def test_learned_positions(family: str, program: str) -> None:
    """They reach no attention module, and stay as they are."""
    for name in ("sink", "window", "simpletron_resl"):
        assert moved(swapped(family, name), program) <= TOLERANCE[torch.float64], name


def test_learned_positions_stay_those_of_the_caller() -> None:
    """Without position_ids, a row of GPT-2 begins at the position behind its padding, with a sink and without."""
    model = swapped("gpt2", "sink")
    ids, mask = torch.arange(5, 14)[None], torch.ones(1, 9, dtype=torch.long)
    mask[:, :3] = 0
    with torch.no_grad():
        got = at_once(model, ids, mask)[:, 3:]
        wanted = at_once(model, ids[:, 3:], mask[:, 3:], positions=lambda mask: places(mask) + 3)
    assert distance(got, wanted) <= TOLERANCE[torch.float64]


@torch.no_grad()
def test_a_bidirectional_encoder() -> None:
    model = swapped("modernbert", "sink")
    ids, mask = torch.arange(5, 14)[None], torch.ones(1, 9, dtype=torch.long)
    mask[:, :3] = 0
    alone = model(input_ids=ids[:, 3:]).logits
    assert distance(model(input_ids=ids, attention_mask=mask).logits[:, 3:], alone) <= ROTATED


@torch.no_grad()
def test_positions_without_padding_in_front_stay_as_they_are() -> None:
    """No padding, padding behind, padding inside, and packed texts: the stack gets what the caller gave."""
    model = with_sink("default", False)
    seen: list[Any] = []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    ids, ones = torch.arange(5, 14)[None], torch.ones(1, 9, dtype=torch.long)
    inside = ones.clone()
    inside[:, 3] = inside[:, 8] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    model(input_ids=ids)
    model(input_ids=ids, attention_mask=inside)
    model(input_ids=ids, attention_mask=inside, position_ids=packed)
    model(input_ids=ids, position_ids=packed)
    handle.remove()
    assert torch.equal(torch.cat(seen), torch.cat([places(ones), places(ones), packed, packed]))
    assert seen[2] is packed
    assert seen[3] is packed


@torch.no_grad()
def test_what_cannot_be_known_is_refused() -> None:
    model = with_sink("default", False)
    ids, mask = torch.arange(5, 14)[None], torch.ones(1, 9, dtype=torch.long)
    mask[:, :3] = 0
    order = torch.ones(9, 9, dtype=torch.bool).tril()
    window = (order & order.T.tril(3).T & (mask[:, None, None] > 0)).view(1, 1, 9, 9)

    def cached(mask: Tensor) -> dict[str, Any]:
        cache = DynamicCache()
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], **with_cache(model, cache), use_cache=True)
        return {"input_ids": ids[:, -1:], **with_cache(model, cache)}

    with refused("pass position_ids that begin at 0"):
        model(input_ids=ids, attention_mask=window & (places(mask) >= 3))
    with refused("position_ids=(attention_mask.cumsum(-1)"):
        model(**cached(mask), attention_mask=mask, position_ids=torch.tensor([[40]]))
    with refused("a mask of all tokens so far"):
        model(**cached(mask), attention_mask=window[:, :, -1:])
    given = cached(mask)
    given |= with_cache(model.model, next(value for value in given.values() if isinstance(value, DynamicCache)))
    with refused("Call model(...) instead"):
        model.model.forward(**given, attention_mask=mask)
