"""`absorb_sink`: the model on a text is the stock model on the tokens and the text; what cannot be so is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as T  # as in the other tests
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import absorb_sink, sink
from tests.contract.harness import distance, fresh, refused, swaps

from .letters import Letters

ROTATED = 1e-6  # transformers computes the angles of rotary embeddings in fp32
TEXTS = ["the first text", "a second one, longer"]


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_the_stock_model_on_the_tokens_and_the_text(count: int) -> None:
    model = patch_model(fresh("llama"), "sink", tokens=count)
    found = absorb_sink(model, Letters(), TEXTS)
    assert len(found.tokens) == len(found.words) == count
    text = torch.tensor([Letters()("another text").input_ids])
    both = torch.cat([torch.tensor([found.tokens]), text], 1)
    wanted = logits(fresh("llama"), both)[:, count:]
    assert distance(logits(model, text), wanted) <= ROTATED
    assert distance(logits(fresh("llama"), text), wanted) > 1e-2
    assert all(swap.phase == "full" for swap in swaps(model))


def candidates(texts: list[str]) -> set[int]:
    """A line break, a full stop, a space, the special tokens, and the first token of each text."""
    letters = Letters()
    return {letters(text).input_ids[0] for text in ("\n", ".", " ", *texts)} | set(letters.all_special_ids)


def test_the_best_candidate_is_taken_and_told() -> None:
    model = patch_model(fresh("llama"), "sink")
    found = absorb_sink(model, Letters(), TEXTS)
    alone = {}
    for token in candidates(TEXTS):
        alone[token] = absorb_sink(model, Letters(), TEXTS, tokens=[token])
    assert len(alone) > 4
    assert min(max(each.after) for each in alone.values()) == pytest.approx(max(found.after))
    assert alone[found.tokens[0]] == found
    assert found.words[0] in str(found)
    assert len(found.before) == len(found.after) == model.config.num_hidden_layers - 1


def test_all_texts_decide() -> None:
    """The best token of the first texts is not the best one of all: a massive token may stand in the last text."""
    texts = ["ab", "ba", "a longer text with other letters in it"]
    model = patch_model(fresh("llama"), "sink")
    first, found = (absorb_sink(model, Letters(), part) for part in (texts[:2], texts))
    assert first.tokens != found.tokens
    largest = {}
    for token in candidates(texts):
        largest[token] = max(absorb_sink(model, Letters(), texts, tokens=[token]).after)
    assert largest[found.tokens[0]] == min(largest.values())
    assert largest[found.tokens[0]] < largest[first.tokens[0]]


def test_what_the_search_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first candidate, the text with the largest activation is read first; long texts get no logits."""
    order: list[list[int]] = []
    lengths: list[int] = []

    def measure(model: Any, rows: list[Tensor], *arguments: Any) -> Any:
        order.append([row.shape[1] for row in rows])
        measured = real(model, rows, *arguments)
        return replace(measured, massive=0, largest=(1.0,), of_rows=tuple(float(size) for size in order[-1]))

    real = sink._measure
    monkeypatch.setattr(sink, "_measure", measure)
    model = patch_model(fresh("llama"), "sink")
    model.lm_head.register_forward_pre_hook(lambda head, args: lengths.append(args[0].shape[1]))
    absorb_sink(model, Letters(), ["ab", "a" * 40, "abc"])
    _, first, *others, _ = order
    assert first == [2, 40, 3]
    assert others
    assert all(each == [40, 3, 2] for each in others)
    assert max(lengths) <= sink.SHORT + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Other positions and pairs change the outputs by rounding, which is no reason to refuse the model."""
    model = patch_model(fresh("llama", torch.float32).to(dtype), "sink")
    absorb_sink(model, Letters(), TEXTS, tokens=[7])
    text = torch.tensor([Letters()("another text").input_ids])
    wanted = logits(fresh("llama", torch.float32), torch.cat([torch.tensor([[7]]), text], 1))[:, 1:]
    assert distance(logits(model, text).float(), wanted) <= 5e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_refused(family: str, dtype: torch.dtype) -> None:
    model = patch_model(fresh(family, torch.float32).to(dtype), "sink")
    with refused("positions do not count relatively"):
        absorb_sink(model, Letters(), TEXTS)
    assert not any(parameter.any() for swap in swaps(model) for parameter in swap.parameters())


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LATENT |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
HYBRID = dict(num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, head_dim=8)
BART = dict(vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)


def built(name: str, more: dict[str, Any]) -> Any:
    """A model whose attention matters."""
    torch.manual_seed(0)
    model = getattr(T, f"{name}ForCausalLM")(getattr(T, f"{name}Config")(**more)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@pytest.mark.parametrize(
    ("name", "more", "right"),
    [
        ("Mistral", SMALL | dict(num_key_value_heads=2, sliding_window=64), True),
        ("Mistral", SMALL | dict(num_key_value_heads=2, sliding_window=4), False),  # the token leaves the window
        ("GPTNeoX", SMALL, True),
        ("DeepseekV3", SMALL | LATENT, True),  # keys of another width than values
        ("FalconH1", SMALL | HYBRID, False),  # a state-space model beside every attention reads the token, too
        ("GPTJ", dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8), False),  # a table of angles
        ("Bart", BART, False),  # learned positions, and an argument for positions that nothing reads
    ],
)
def test_other_architectures_are_right_or_refused(name: str, more: dict[str, Any], right: bool) -> None:
    stock, model = built(name, more), patch_model(built(name, more), "sink")
    if not right:
        with refused("train the sink instead"):
            absorb_sink(model, Letters(), TEXTS, tokens=[7])
        assert not any(parameter.any() for swap in swaps(model) for parameter in swap.parameters())
        return
    absorb_sink(model, Letters(), TEXTS, tokens=[7])
    text = torch.tensor([Letters()("another text").input_ids])
    wanted = logits(stock, torch.cat([torch.tensor([[7]]), text], 1))[:, 1:]
    assert distance(logits(model, text), wanted) <= ROTATED


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_every_copy_of_a_layer_gets_the_pairs() -> None:
    """PEFT keeps a copy of the module that it trains, and runs this copy."""
    model = patch_model(fresh("llama"), "sink")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_swap"]))
    absorb_sink(wrapped, Letters(), TEXTS, tokens=[7])
    keys = [value for name, value in wrapped.named_parameters() if name.endswith("learned.key")]
    assert len(keys) == 2 * model.config.num_hidden_layers
    assert all(key.any() for key in keys)


@pytest.mark.parametrize(
    ("family", "variant", "given", "reason"),
    [
        ("bert", "sink", {}, "causal language model"),
        ("llama", "outeffhop", {}, "3 of 3 attention layers have no sink"),
        ("llama", "sink", {"kind": "score"}, "3 of 3 attention layers have no sink"),
        ("llama", "sink", {"layers": [0, 2]}, "1 of 3 attention layers have no sink"),
    ],
)
def test_other_swaps_are_refused(family: str, variant: str, given: dict[str, Any], reason: str) -> None:
    model = patch_model(fresh(family), variant, **given)
    with refused(reason):
        absorb_sink(model, Letters(), TEXTS)


def test_wrong_arguments() -> None:
    model = patch_model(fresh("llama"), "sink", tokens=2)
    with refused("the swaps have 2 pairs and 1 tokens were given"):
        absorb_sink(model, Letters(), TEXTS, tokens=[3])
    with refused("processor must be a loaded tokenizer or image processor, got the name 'gpt2'"):
        absorb_sink(model, "gpt2", TEXTS)
    with refused("no text of two tokens or more"):
        absorb_sink(model, Letters(), ["a"])
