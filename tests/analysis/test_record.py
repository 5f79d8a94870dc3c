"""Recording changes nothing, leaves nothing behind, and records what the metrics say of the tensors themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.analysis import metrics, record
from hf_attn_swap.analysis.recording import Activation, Recording
from hf_attn_swap.families import sites
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import TEXT_FAMILIES, batch_of, forward, fresh, padding_side, perturb, refused
from tests.harness.places import one_per_place, turns

CELLS = [*((name, None) for name in FAMILY_NAMES), *(("llama", variant) for variant in one_per_place())]


def state_of(model: Any) -> list[Any]:
    """Everything that a recording might have left behind."""
    return [
        (name, type(module), len(module._forward_hooks), len(module._forward_pre_hooks), sorted(module.__dict__))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize(("name", "variant"), CELLS)
@pytest.mark.parametrize("strength", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_changes_nothing(name: str, variant: str | None, strength: float) -> None:
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32, padded=padding_side(name))
    if variant is not None:
        perturb(patch_model(model, variant, strength=strength))
    wanted, before = forward(model, batch), state_of(model)
    with record(model) as recording:
        assert torch.equal(forward(model, batch), wanted)
        assert torch.equal(forward(model, batch), wanted)
    assert state_of(model) == before
    assert torch.equal(forward(model, batch), wanted)
    assert recording.samples == 2 * len(next(iter(batch.values())))
    assert sorted(recording.layers) == [0, 1, 2]
    assert all(len(layer.similarity) == recording.samples for layer in recording.layers.values())
    assert recording.max_inf_norm > 0
    heads = 4
    linear = variant is not None and variant.startswith("simpletron") and strength == 1
    for layer in recording.layers.values():
        assert layer.entropy.value.shape == (heads,)
        assert layer.entropy.value.isfinite().all() or linear
        assert (layer.sinks.value >= 0).all()
        assert (layer.sinks.value <= 1 + 1e-6).all()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_equals_the_public_outputs(name: str) -> None:
    """Similarity and entropy against `output_hidden_states` and `output_attentions` of the stock eager model."""
    stock = fresh(name)
    side = "right" if name in TEXT_FAMILIES else None  # on the left, eager attention gives NaN in fp64
    batch = batch_of(name, padded=side)
    model = copy.deepcopy(stock)
    with record(model) as recording:
        forward(model, batch)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = stock(**batch, output_attentions=True, output_hidden_states=True)
    real = batch.get("attention_mask", torch.ones(outputs.hidden_states[0].shape[:2])).bool()
    tokens = real.sum(1)
    for place, layer in recording.layers.items():
        entropies = metrics.attention_entropy(outputs.attentions[place]).transpose(1, 2)[real]
        assert torch.allclose(layer.entropy.value, entropies.mean(0), atol=1e-6)
        assert layer.entropies.counts.sum() == entropies.numel()
        assert layer.pairs.counts.sum() == (tokens * (tokens - 1) // 2).sum()
        if place + 1 < len(recording.layers):  # the last hidden states have passed the final norm
            similarity = metrics.token_similarity(outputs.hidden_states[place + 1], real)
            assert layer.similarity == pytest.approx(similarity.tolist(), abs=1e-7)  # eager softmax is fp32


@pytest.mark.parametrize(("name", "side"), turns(TEXT_FAMILIES, ["left", "right"]))
def test_the_largest_activation_and_its_token(name: str, side: str) -> None:
    """Against the public hidden states; the last of them has passed the final norm."""
    model, batches = fresh(name), [batch_of(name, padded=side, seed=seed) for seed in (1, 2)]
    with record(model) as recording:
        for batch in batches:
            forward(model, batch)
    for place in range(len(recording.layers) - 1):
        best = (0.0, -1, None)
        for batch in batches:
            with torch.no_grad():
                states = model(**batch, output_hidden_states=True).hidden_states[place + 1]
            for row, mask in zip(range(len(states)), batch["attention_mask"].bool(), strict=True):
                tops = states[row][mask].abs().amax(-1)
                own = int(tops.argmax())
                best = max(best, (float(tops[own]), own, int(batch["input_ids"][row][mask][own])))
        result = recording.layers[place].largest
        assert (result.place, result.token) == best[1:]
        assert result.value == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_padding_does_not_count(name: str) -> None:
    padded = batch_of(name, padded="right")
    results = []
    for batches in (
        [padded],
        [{k: v[row : row + 1][:, padded["attention_mask"][row].bool()] for k, v in padded.items()} for row in (0, 1)],
    ):
        model = perturb(patch_model(fresh(name), "outeffhop"))
        with record(model) as recording:
            for batch in batches:
                forward(model, batch)
        results.append(recording)
    one, two = results
    assert one.kurtosis == pytest.approx(two.kurtosis, rel=1e-9)
    assert one.max_inf_norm == pytest.approx(two.max_inf_norm, rel=1e-9)
    for place, layer in one.layers.items():
        assert torch.allclose(layer.entropy.value, two.layers[place].entropy.value, rtol=1e-9)
        assert torch.allclose(layer.sinks.value, two.layers[place].sinks.value, rtol=1e-9)
        assert torch.allclose(layer.update_norm.value, two.layers[place].update_norm.value, rtol=1e-9)


def test_outliers_by_hand() -> None:
    """Largest value: of each sample, then the mean over samples, then the largest module. 3, 9 and 6, 6 give 6."""
    recording = Recording()
    recording.activations["a"] = Activation(kurtosis=[1.0, 5.0], max_inf_norm=[3.0, 9.0])
    recording.activations["b"] = Activation(kurtosis=[2.0, 2.0], max_inf_norm=[6.0, 5.0])
    assert recording.max_inf_norm == pytest.approx(6.0)
    assert recording.kurtosis == pytest.approx((3.0 + 2.0) / 2)
    result = recording.to_dict()
    assert (result["max_inf_norm"], result["kurtosis"]) == (pytest.approx(6.0), pytest.approx(2.5))
    assert result["modules"]["a"] == {"kurtosis": pytest.approx(3.0), "max_inf_norm": pytest.approx(6.0)}
    assert result["modules"]["b"] == {"kurtosis": pytest.approx(2.0), "max_inf_norm": pytest.approx(5.5)}


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, [None, "outeffhop", "modern_hopfield"]))
def test_updates_are_those_of_each_layers_own_input(name: str, variant: str | None) -> None:
    """Norm and angle of what W_o gives, against what the same layer's queries are made of; by hand."""
    model = fresh(name)
    if variant is not None:
        patch_model(model, variant)
    batch = batch_of(name, padded=padding_side(name))
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    handles = []
    for site in dict.fromkeys(site for site in sites(model) if site.usable):
        query, output = site.core.get_submodule(site.family.query), site.container.get_submodule(site.family.output)
        handles.append(query.register_forward_pre_hook(lambda _, args: read.append(args[0])))
        handles.append(output.register_forward_hook(lambda _, args, given: written.append(given)))
    with record(model) as recording:
        forward(model, batch)
    for handle in handles:
        handle.remove()
    assert len(read) == len(written) == len(recording.layers) == 3
    real = batch.get("attention_mask", torch.ones(read[0].shape[:2])).bool()
    angles = []
    for place, (x, update) in enumerate(zip(read, written, strict=True)):
        layer = recording.layers[place]
        cosine = torch.nn.functional.cosine_similarity(x[real], update[real], dim=-1, eps=0)
        assert layer.update_angle.value.item() == pytest.approx(cosine.acos().mean().item(), rel=1e-9)
        assert layer.update_norm.value.item() == pytest.approx(update[real].norm(dim=-1).mean().item(), rel=1e-9)
        angles.append(layer.update_angle.value.item())
    assert len({round(angle, 6) for angle in angles}) == 3


@pytest.mark.parametrize(("name", "side"), turns(TEXT_FAMILIES, ["left", "right"], 2))
def test_the_first_real_token_is_the_sink(name: str, side: str) -> None:
    """Under left padding that is not column 0: rows by hand from the weights that the model hands out."""
    model, batch = patch_model(fresh(name), "outeffhop"), batch_of(name, padded=side)
    real = batch["attention_mask"].bool()
    first = [row.tolist().index(True) for row in real]
    assert first == ([2, 0] if side == "left" else [0, 0])
    with record(model) as recording:
        forward(model, batch)
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    for place, weights in enumerate(attentions):
        shares = [
            weights[row, :, query, first[row]] / weights[row, :, query].sum(-1)
            for row in range(len(real))
            for query in real[row].nonzero().flatten().tolist()
        ]
        wanted = torch.stack(shares).nanmean(0)
        assert torch.allclose(recording.layers[place].sinks.value, wanted, rtol=1e-9)
        assert (wanted > 0).any()


@pytest.mark.parametrize("variant", [None, "modern_hopfield", "belief"])
def test_generation(variant: str | None) -> None:
    model = fresh("llama", torch.float32)
    if variant is not None:
        patch_model(model, variant)
    ids = batch_of("llama")["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, **settings)
    with record(model) as recording:
        assert torch.equal(model.generate(ids, **settings), wanted)
    count = recording.layers[0].entropy.count
    assert count is not None
    assert count.tolist() == [2 * (ids.shape[1] + 3)] * 4


def test_refused_and_put_back() -> None:
    model = fresh("bert")
    before = state_of(model)
    with refused("matches 'nothing like this'"), record(model, modules="nothing like this"):
        pass
    assert state_of(model) == before
    broken = set_strength(patch_model(fresh("bert"), "belief"), 0.5)
    torch.nn.init.constant_(broken.bert.encoder.layer[1].output.dense.bias, float("nan"))
    with refused("activations are not finite"), record(broken):
        forward(broken, batch_of("bert"))
