"""`target="engine"`: what is converted can be exported, and what cannot be is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import absorb_sink
from hf_attn_swap.conversion.config import ConvertConfig
from hf_attn_swap.engines.export import stock_model
from tests.contract.harness import distance, fresh, swaps

from .converting import ADAPTERS, converted, long, text
from .letters import Letters

VALUE = {"kind": "score_value"}


@pytest.mark.parametrize(
    ("variant", "options", "form"),
    [
        ("window", {"window": 8}, ("sink+window", {"sink": VALUE, "window": {"window": 8, "sinks": 0}})),
        (
            "window+sink",
            {"sink": {"kind": "score"}},
            ("window+sink", {"sink": {"kind": "score"}, "window": {"sinks": 0}}),
        ),
        ("outeffhop+window", {}, ("outeffhop+window", {"window": {"sinks": 0}})),
        ("softmax_1", {}, ("outeffhop", {})),
        ("sink", {}, ("sink", VALUE)),
    ],
)
def test_the_form_that_leaves(variant: str, options: dict[str, Any], form: tuple[str, Any]) -> None:
    config = ConvertConfig(variant=variant, options=options, target="engine")
    assert (config.variant, config.options) == form


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"variant": "belief"}, "belief"),
        ({"variant": "window", "options": {"sinks": 4}}, "first tokens"),
        ({"variant": "sink", "options": {"kind": "key"}}, "score_value"),
        ({"variant": "window", "heads": "auto", "keep": 0.5}, "whole layers"),
        ({"variant": "window", "target": "vllm"}, "'engine'"),
    ],
)
def test_what_cannot_leave_is_refused(words: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ConvertConfig(**({"target": "engine"} | words))


def test_the_mean_score_takes_the_place_of_the_key() -> None:
    """The value is the token's, and the score its mean over all queries of the texts."""
    texts, scores = ["the first text", "a second one, longer"], []
    keyed, constant = (patch_model(fresh("llama"), "sink", kind=kind) for kind in ("key_value", "score_value"))
    for model in (keyed, constant):
        absorb_sink(model, Letters(), texts, tokens=[7])
    swap = swaps(keyed)[-1]
    key = swap.at("keys").learned.key.detach()

    def note(module: Any, args: tuple[Any, ...]) -> None:
        inputs = args[0]
        groups = inputs.query.shape[1] // key.shape[0]
        products = inputs.query * key.repeat_interleave(groups, 0)[None]
        scores.append(products.sum(-1)[0] * inputs.scaling)

    handle = swap.register_forward_pre_hook(note)
    for words in texts:
        keyed(torch.tensor([Letters()(words).input_ids]))
    handle.remove()
    learned = swaps(constant)[-1].at("keys").learned
    assert distance(learned.score[:, 0].detach(), torch.cat(scores, 1).mean(1).detach()) < 1e-6
    assert torch.equal(learned.value, swap.at("keys").learned.value)


@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_a_conversion_can_be_exported(keep: float) -> None:
    model = long()
    words: dict[str, Any] = dict(processor=Letters(), window=8, keep=keep, target="engine", stages=[ADAPTERS])
    report = converted(model, "window", text(), **words)
    assert report.variant == "sink+window"
    stock, forms = stock_model(model)
    assert [form.window for form in forms].count(8) == len(report.layers) == (2 if keep else 3)
    ids = text(1)[0]["input_ids"][None]
    with torch.no_grad():
        assert distance(model(ids).logits, stock(ids).logits) < 1e-5
