"""Every way to generate that transformers has, with linear attention's state: equal to generation without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, GenerationConfig

from hf_attn_swap import patch_model
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.wiring.cache import LinearState
from hf_attn_swap.wiring.implementations import NAME
from hf_attn_swap.wiring.state import CROPPED
from tests import zoo
from tests.harness.places import turns

from .cells import LINEAR
from .harness import fresh, perturb

NEW = 12
SHORT, LONG = 20, 100  # tokens of a prompt: fewer, and more, than a state can take back
DRAFTED = {"target": (False, True), "draft": (True, False), "both": (True, True)}  # who is swapped


def causal(family: str, variant: str | None, **config: Any) -> Any:
    lengths = {"gpt2": "n_positions"}
    model = fresh(family, **{lengths.get(family, "max_position_embeddings"): 160}, **config)
    model.generation_config.eos_token_id = None
    return model if variant is None else perturb(patch_model(model, variant))


def repeating(family: str, length: int, batch: int = 1) -> dict[str, Tensor]:
    """A text that comes back, so that prompt lookup has something to propose."""
    ids = zoo.inputs(family, batch=batch, length=7)["input_ids"].repeat(1, length)[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plain(model: Any, prompt: dict[str, Tensor], **asked: Any) -> Tensor:
    tokens: Tensor = model.generate(**prompt, max_new_tokens=NEW, use_cache=False, **{"do_sample": False, **asked})
    return tokens


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that states were asked to take back."""
    cropped: list[int] = []
    crop = LinearState.crop

    def counted(self: LinearState, tokens: int) -> None:
        before = self.get_seq_length()
        crop(self, tokens)
        cropped.append(before - self.get_seq_length())

    monkeypatch.setattr(LinearState, "crop", counted)
    return cropped


def given_layers(*models: Any) -> list[bool]:
    """For each call of these models: True if the cache that `generate` gives them has layers, which states can replace.

    Before it proposes tokens, transformers 5.10 makes a cache that gets its layers later: it keeps keys and values.
    """
    has_layers: list[bool] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        has_layers.extend(bool(value.layers) for value in kwargs.values() if isinstance(value, Cache))

    for model in models:
        model.register_forward_pre_hook(look, with_kwargs=True)
    return has_layers


def assert_same_tokens(
    model: Any, prompt: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, swapped: list[Any], **asked: Any
) -> None:
    """Generation that proposes tokens gives those of plain generation, and takes wrong proposals back."""
    wanted = plain(model, prompt)
    cropped, layers = count(monkeypatch), given_layers(*swapped)
    got = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, **asked)
    assert torch.equal(got[:, : wanted.shape[1]], wanted)  # with transformers 5.10, the stock model too goes on
    assert any(cropped) == layers[0]


@pytest.mark.parametrize(("length", "proposed"), [(SHORT, 8), (LONG, 3)])
def test_prompt_lookup(length: int, proposed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llama"
    model, prompt = causal(family, LINEAR[0]), repeating(family, length)
    model.generation_config.eos_token_id = model.config.vocab_size - 1  # some versions of transformers need an end
    assert_same_tokens(model, prompt, monkeypatch, [model], prompt_lookup_num_tokens=proposed)


def test_more_proposals_than_a_cache_takes_back() -> None:
    """The sentence says how many tokens may be proposed, and so many may."""
    model = patch_model(fresh("llama", max_position_embeddings=512), "window", window=8)
    model.generation_config.eos_token_id = model.config.vocab_size - 1
    prompt = {"input_ids": torch.arange(3, 53).repeat(1, 5)}
    asked: dict[str, Any] = {"max_new_tokens": 2 * CROPPED, "do_sample": False}
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=") as caught:
        model.generate(**prompt, **asked, prompt_lookup_num_tokens=CROPPED + 30)
    allowed = int(str(caught.value).partition("prompt_lookup_num_tokens=")[2].split()[0])
    got = model.generate(**prompt, **asked, prompt_lookup_num_tokens=allowed)
    assert torch.equal(got, model.generate(**prompt, **asked))


@pytest.mark.parametrize(("who", "length"), turns(list(DRAFTED), [LONG, SHORT]))
def test_a_draft_model(who: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    family, name = "llama", LINEAR[0]
    swapped = drafts, targets = DRAFTED[who]
    model = causal(family, name if targets else None)
    draft = causal(family, name if drafts else None)
    with torch.no_grad():  # a draft that is right for a while and then wrong
        for parameter in draft.parameters():
            parameter.add_(
                0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter)
            )
    both = [swapped_model for swapped_model, is_swapped in zip((draft, model), swapped, strict=True) if is_swapped]
    assert_same_tokens(model, repeating(family, length), monkeypatch, both, assistant_model=draft)


@pytest.mark.parametrize("variant", ["outeffhop", "simpletron_resl"])
def test_times_of_words(variant: str) -> None:
    """Whisper sets the attention to "eager" by itself to read weights: they are given, and nothing stays changed."""
    model = zoo.build("whisper", max_target_positions=64, median_filter_width=3)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, decoder_start_token_id=3)
    model.generation_config.alignment_heads = [[0, 0], [1, 1]]
    model.generation_config.no_timestamps_token_id = 50
    patch_model(model, variant, modules="encoder", **tiny_options(variant))
    features = zoo.inputs("whisper")["input_features"]
    before = model.generate(features, max_new_tokens=4)
    timed = model.generate(features, max_new_tokens=4, return_token_timestamps=True, return_dict_in_generate=True)
    assert torch.equal(timed["sequences"][:, -before.shape[1] :], before)  # with the first tokens of the prompt
    assert timed["token_timestamps"].shape == timed["sequences"].shape
    assert torch.equal(model.generate(features, max_new_tokens=4), before)
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation("eager")  # a user's own choice is refused, as long as no weights are asked for
    with pytest.raises(ValueError, match="unpatch_model"):
        model.generate(features, max_new_tokens=4)
