"""Linear attention decodes from a state of constant size, equal to decoding from keys and values."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.wiring.cache import CROPPED, LinearState
from tests import zoo
from tests.harness.generation import PROMPT, assert_equal_generation, prompt_of
from tests.harness.places import turns

from .cells import LINEAR
from .harness import CAUSAL_FAMILIES, TOLERANCE, distance, fresh, perturb


def model_of(family: str, name: str = "simpletron_resl", layers: Any = None, **options: Any) -> Any:
    model = patch_model(fresh(family), name, layers=layers, **options)
    model.generation_config.eos_token_id = None
    return perturb(model)


def state_of(cache: Any, layer: int = 0) -> LinearState:
    assert isinstance(cache.layers[layer], LinearState)
    return cache.layers[layer]


@pytest.mark.parametrize(("family", "name"), turns(CAUSAL_FAMILIES, LINEAR))
def test_generate_takes_it_by_itself_and_it_does_not_grow(family: str, name: str) -> None:
    model, prompt = model_of(family, name), prompt_of(family, "left")
    sizes = []
    for new in (2, 7):
        out = model.generate(**prompt, max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        states = [state_of(cache_of(out), layer) for layer in range(model.config.num_hidden_layers)]
        assert all(state.get_seq_length() == PROMPT + new - 1 for state in states)
        assert all(state.keys.numel() == state.values.numel() == 0 for state in states)
        sizes.append(sum(state.full.state.numel() + state.full.seen.numel() for state in states))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("family", "padded", "layers"), [("llama", None, [0]), ("gpt2", "left", [1])])
def test_hybrids(family: str, padded: str | None, layers: list[int]) -> None:
    model = model_of(family, layers=layers)
    assert_equal_generation(model, prompt_of(family, padded), {})
    with torch.no_grad():
        out = model(**prompt_of(family, padded), use_cache=True)
    kinds = [isinstance(layer, LinearState) for layer in cache_of(out).layers]
    assert kinds == [index in layers for index in range(model.config.num_hidden_layers)]


@torch.no_grad()
def prefilled(model: Any, family: str, tokens: int = PROMPT, padded: str | None = None) -> tuple[dict[str, Any], Any]:
    prompt = zoo.inputs(family, batch=2, length=tokens + 1, padded=padded)
    mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))
    out = model(input_ids=prompt["input_ids"][:, :-1], attention_mask=mask[:, :-1], use_cache=True)
    return {"input_ids": prompt["input_ids"][:, -1:], "attention_mask": mask}, cache_of(out)


@torch.no_grad()
def test_crop() -> None:
    model = model_of("llama")
    ids = zoo.inputs("llama", batch=2, length=9)["input_ids"]
    cache = cache_of(model(input_ids=ids[:, :4], use_cache=True))
    model(input_ids=ids[:, 4:7], **with_cache(model, cache))
    cache.crop(-2)
    assert cache.get_seq_length() == 5
    got = model(input_ids=ids[:, 5:], **with_cache(model, cache)).logits
    assert distance(got, model(input_ids=ids).logits[:, 5:]) <= TOLERANCE[torch.float64]
    state_of(cache).crop(cache.get_seq_length())  # nothing to take back
    longer = cache_of(model(input_ids=ids.repeat(1, 16)[:, : 2 * CROPPED + 9], use_cache=True))
    longer.crop(-CROPPED)
    assert longer.get_seq_length() == CROPPED + 9
    with pytest.raises(ValueError, match=f"cannot go back 1 tokens; only to {CROPPED} before"):
        longer.crop(-1)
    longer.crop(-longer.get_seq_length())  # to nothing: that is always known
    assert longer.get_seq_length() == 0
    got = model(input_ids=ids, **with_cache(model, longer)).logits
    assert distance(got, model(input_ids=ids).logits) <= TOLERANCE[torch.float64]


def tokens(generator: torch.Generator, count: int, padded: bool) -> tuple[Any, Any, Any]:
    """Keys, values and which of them are real, of two rows with two heads of width 3."""
    key, value = torch.randn(2, 2, 2, count, 3, generator=generator, dtype=torch.float64)
    return key, value, torch.rand(2, count, generator=generator) < 0.7 if padded else None


def fed(text: tuple[Any, Any, Any]) -> LinearState:
    state = LinearState()
    state.absorb(*text)
    return state


def assert_same_sums(state: LinearState, wanted: LinearState) -> None:
    assert state.get_seq_length() == wanted.get_seq_length()
    assert distance(state.full.state, wanted.full.state) <= TOLERANCE[torch.float64]
    assert torch.equal(state.full.seen, wanted.full.seen)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(2))
@torch.no_grad()
def test_a_cropped_state_is_the_state_of_the_shorter_text(seed: int, padded: bool) -> None:
    """Calls of 1 to 200 tokens in any order, and crops to any length less than `CROPPED` before the longest so far."""
    generator = torch.Generator().manual_seed(seed)
    state, whole = LinearState(), tokens(generator, 0, padded)
    longest, steps = 0, 0
    for _ in range(60):
        count = [1, 1, 5, 70, 200][int(torch.randint(0, 5, (), generator=generator))]
        some = tokens(generator, count, padded)
        state.absorb(*some)
        whole = tuple(
            None if new is None else torch.cat([old, new], 1 if new.dim() == 2 else 2)
            for old, new in zip(whole, some, strict=True)
        )
        longest = max(longest, state.get_seq_length())
        if torch.rand((), generator=generator) < 0.4:  # in two steps, as a draft model may do
            most = state.get_seq_length() - max(longest - CROPPED, 1)
            remove = int(torch.randint(0, most + 1, (), generator=generator))
            state.crop(-(remove // 2))
            state.crop(-(remove - remove // 2))
            length = state.get_seq_length()
            whole = tuple(t if t is None else t[:, :length] if t.dim() == 2 else t[:, :, :length] for t in whole)
            steps += remove > 0
        assert_same_sums(state, fed(whole))
    assert steps > 10


def test_the_tail_is_long_enough_and_does_not_grow() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, CROPPED, CROPPED + 1, 1000):
        state = LinearState()
        for _ in range(max(3, 600 // count)):
            some = tokens(generator, count, False)
            state.absorb(*some)
            kept = sum(chunk.length for chunk in state.tail)
            assert min(CROPPED, state.get_seq_length()) <= kept <= 2 * CROPPED
            held = sum(part.untyped_storage().nbytes() for chunk in state.tail for part in (chunk.key, chunk.value))
            assert held <= 2 * 2 * CROPPED * 2 * 2 * 3 * 8 * (1 + (count <= CROPPED))  # of `tokens`: both of a pair
        assert len(state.tail) <= 2 * CROPPED


@torch.no_grad()
def test_a_token_does_not_copy_the_state() -> None:
    """Of 300 tokens, the first makes the tensor and all others change it in place."""
    generator = torch.Generator().manual_seed(0)
    state, made, given = LinearState(), [], tokens(generator, 300, True)
    for token in range(300):
        before = state.full.state
        state.absorb(
            given[0][:, :, token : token + 1], given[1][:, :, token : token + 1], given[2][:, token : token + 1]
        )
        if state.full.state is not before:
            made.append(token)
    assert made == [0]
    assert_same_sums(state, fed(given))


CHANGES: dict[str, Any] = {
    "crop": lambda state: state.crop(-1),
    "crop the tail": lambda state: state.crop(state.base.length - state.length),
    "beams": lambda state: state.reorder_cache(torch.tensor([1, 1])),
    "rows": lambda state: state.batch_select_indices(slice(0, 2)),  # views of the same memory
    "none": lambda state: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@torch.no_grad()
def test_what_else_holds_the_sums_keeps_its_numbers(change: str, held: Any) -> None:
    """A copy of the cache, and the sums before the tail."""
    generator = torch.Generator().manual_seed(0)
    state = fed(tokens(generator, CROPPED + 9, False))
    state.absorb(*tokens(generator, 1, False))
    CHANGES[change](state)
    other, wanted, base = held(state), state.full.state.clone(), state.base.state.clone()
    token = tokens(torch.Generator().manual_seed(1), 1, False)
    for holder in (state, other):
        for _ in range(3):
            holder.absorb(*token)
    assert torch.equal(state.base.state, base)
    assert torch.equal(other.base.state, base)
    assert_same_sums(state, other)
    assert distance(state.full.state, wanted + 3 * token[0].mT @ token[1]) <= TOLERANCE[torch.float64]


@torch.no_grad()
def test_rows_that_are_a_view_go_on() -> None:
    """Every second row of a batch is no plain piece of memory."""
    key, value = torch.randn(2, 4, 2, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, every = fed((key, value, None)), slice(None, None, 2)
    state.absorb(key, value, None)
    state.batch_select_indices(every)
    state.absorb(key[every], value[every], None)
    assert distance(state.full.state, 3 * (key.mT @ value)[every]) <= TOLERANCE[torch.float64]


def test_a_graph_of_gradients_keeps_its_sums() -> None:
    """Tokens without gradients, after one with gradients, leave alone what its backward pass needs; and they end it."""
    model = model_of("llama")
    last, cache = prefilled(model, "llama")
    other = copy.deepcopy(cache)
    embedded = model.get_input_embeddings()(last["input_ids"]).detach().requires_grad_()

    def read(cache: Any, **words: Any) -> torch.Tensor:
        mask = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
        return model(**words, attention_mask=mask, **with_cache(model, cache)).logits

    gradients = []
    for read_cache, later in ((cache, 3), (other, 0)):
        with torch.no_grad():
            for _ in range(3):
                read(read_cache, input_ids=last["input_ids"])
        out = read(read_cache, inputs_embeds=embedded)
        with torch.no_grad():
            for _ in range(later):
                read(read_cache, input_ids=last["input_ids"])
        gradients += torch.autograd.grad(out.sum(), embedded)
    assert distance(*gradients) <= TOLERANCE[torch.float64]
    assert not state_of(cache).full.state.requires_grad


def test_a_state_of_inference_mode_goes_on_without_it() -> None:
    """PyTorch forbids changes in place of such tensors outside of inference mode."""
    given = [tokens(torch.Generator().manual_seed(seed), 1, False) for seed in range(6)]
    state, wanted = LinearState(), LinearState()
    for some in given:
        wanted.absorb(*some)
    with torch.inference_mode():
        for some in given[:3]:
            state.absorb(*some)
    with torch.no_grad():
        for some in given[3:]:
            state.absorb(*some)
    assert_same_sums(state, wanted)


def test_autocast_does_not_round_the_state() -> None:
    key, value, _ = tokens(torch.Generator().manual_seed(0), 5, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = fed((key.float(), value.float(), None))
    wanted = fed((key, value, None)).full.state
    assert state.full.state.dtype == torch.float32
    assert distance(state.full.state.double(), wanted) <= TOLERANCE[torch.float32]


class CoreError(RuntimeError):
    """What goes wrong between a layer's hooks and its cache."""


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [unpatch_model, lambda model: set_strength(model, 0.5), lambda m: set_strength(m, 0)]
)
def test_an_error_before_the_cache_leaves_no_claim(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llama"
    model = model_of(family, layers=[0])  # no second layer that is not claimed
    last, cache = prefilled(model, family)
    fail = Mock(side_effect=CoreError)
    with monkeypatch.context() as broken:
        broken.setattr(LinearState, "update", fail)  # everything before the update has run, the update has not
        with pytest.raises(CoreError) as held:  # the error's frames keep modules alive, as in a notebook
            model(**last, **with_cache(model, cache))
    change(model)
    with pytest.raises(ValueError, match="states of linear attention"):
        model(**last, **with_cache(model, cache))
    assert held.value.__traceback__ is not None


@torch.no_grad()
def test_a_claim_ends_with_its_model() -> None:
    model = model_of("llama")
    last, cache = prefilled(model, "llama")
    state_of(cache).claim(model.model.layers[0].self_attn)
    stock = fresh("llama")
    del model
    gc.collect()
    with pytest.raises(ValueError, match="states of linear attention"):
        stock(**last, **with_cache(stock, cache))


@torch.no_grad()
def test_a_claimed_cache_can_be_copied_and_pickled() -> None:
    model = model_of("llama")
    last, cache = prefilled(model, "llama")
    state_of(cache).claim(model.model.layers[0].self_attn)
    wanted = model(**last, **with_cache(model, copy.deepcopy(cache))).logits
    assert torch.equal(model(**last, **with_cache(model, pickle.loads(pickle.dumps(cache)))).logits, wanted)


@torch.no_grad()
def test_the_state_of_half_precision_is_held_in_fp32() -> None:
    model = patch_model(fresh("llama", torch.bfloat16), "simpletron_resl")
    last, cache = prefilled(model, "llama")
    assert state_of(cache).full.state.dtype == torch.float32
    assert model(**last, **with_cache(model, cache)).logits.dtype == torch.bfloat16
