"""STanHop-Net: every block against its formula, written out; masks, memory, alpha, 8 bits, saving and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap.core.probe import Probe
from hf_attn_swap.memory import STanHopConfig, STanHopForPrediction
from hf_attn_swap.memory.stanhop import DecoderLayer, Hopfield, Merge, Tandem
from hf_attn_swap.quantization import fake_w8a8
from tests import slow

from .harness import close, normal

RETRIEVALS = ["softmax", "sparsemax", "entmax15", "generalized_sparse", "outeffhop+clipped_softmax", "outeffhop+gated"]
RETRIEVALS += ["generalized_sparse+clipped_softmax+gated"]
SIZES: dict[str, Any] = dict(
    num_input_channels=3,
    context_length=20,
    prediction_length=7,
    patch_length=4,
    merge_size=2,
    d_model=8,
    ffn_dim=12,
    num_attention_heads=2,
    num_prototypes=3,
    gamma=-0.2,  # so that some weights are clipped
)
every_retrieval = pytest.mark.parametrize("retrieval", RETRIEVALS)


def config(**changes: Any) -> STanHopConfig:
    return STanHopConfig(**{**SIZES, **changes})


def built(kind: Any, **changes: Any) -> Any:
    """A module in float64 and evaluation mode, with every parameter drawn, so that none is 0."""
    torch.manual_seed(0)
    module = kind(config(**changes)).double().eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(module.named_parameters()):
            drawn = normal(number, *parameter.shape)
            scale = 2 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(1 + drawn / 4 if name.endswith("weight") and parameter.dim() == 1 else scale * drawn)
    return module


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.mT + layer.bias


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def mlp(layers: nn.Sequential, x: Tensor) -> Tensor:
    inner = linear(layers[0], x)
    return linear(layers[2], inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)


def read(layer: Hopfield, retrieval: str, state_QE: Tensor, stored_KE: Tensor) -> Tensor:
    """One row and one head at a time: what the states read from the patterns that count."""
    heads, width = 2, 4
    query, key = linear(layer.query, state_QE), linear(layer.key, stored_KE)
    value = linear(layer.value, key)
    reads = []
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        scores = query[:, columns] @ key[:, columns].T / math.sqrt(width)
        if "outeffhop" in retrieval:
            weights = slow.slow_softmax_n(scores, 1.0)
        elif "sparsemax" in retrieval:
            weights = slow.slow_sparsemax(scores)
        elif "entmax15" in retrieval:
            weights = slow.slow_entmax15(scores)
        elif "generalized_sparse" in retrieval:
            weights = slow.slow_entmax(scores, float(1 + torch.sigmoid(layer.alpha_logit.detach())))
        else:
            weights = slow.slow_softmax_n(scores, 0.0)
        if "clipped" in retrieval:
            weights = (1.2 * weights - 0.2).clamp(0, 1)
        heads_QD = weights @ value[:, columns]
        if "gated" in retrieval:
            logits = state_QE[:, columns] @ layer.gate[head, :-1] + layer.gate[head, -1]
            heads_QD = heads_QD * (4 / (1 + (-logits).exp()))[:, None]
        reads.append(heads_QD)
    return linear(layer.out, torch.cat(reads, 1))


def tandem(block: Tandem, retrieval: str, x_CPE: Tensor, keep_P: Tensor) -> Tensor:
    """One sample: along time for each channel, then across the channels for each patch."""
    channels = []
    for x in x_CPE:
        x = norm(block.norm1, x + read(block.time, retrieval, x, x[keep_P]))
        channels.append(norm(block.norm2, x + mlp(block.mlp1, x)))
    patches = []
    for x in torch.stack(channels, 1):
        pooled = read(block.pool, retrieval, block.prototypes, x)
        x = norm(block.norm3, x + read(block.series, retrieval, x, pooled))
        patches.append(norm(block.norm4, x + mlp(block.mlp2, x)))
    return torch.stack(patches, 1)


def merged(layer: Merge, x_CPE: Tensor, keep_P: Tensor) -> tuple[Tensor, Tensor]:
    """Five patches as three pairs: the last one twice, and zeros for what is left out."""
    pairs = [(0, 1), (2, 3), (4, 4)] if x_CPE.shape[1] == 5 else [(0, 1), (2, 2)]
    joined = [torch.cat([x_CPE[:, i] * keep_P[i] for i in pair], -1) for pair in pairs]
    keep = torch.stack([keep_P[list(pair)].any() for pair in pairs])
    return torch.stack([linear(layer.linear, norm(layer.norm, x)) for x in joined], 1), keep


def decoded(layer: DecoderLayer, retrieval: str, x_CPE: Tensor, encoded_CKE: Tensor, keep_K: Tensor) -> Tensor:
    whole = torch.ones(x_CPE.shape[1], dtype=torch.bool)
    channels = []
    for x, encoded in zip(tandem(layer.tandem, retrieval, x_CPE, whole), encoded_CKE, strict=True):
        x = norm(layer.norm1, x + read(layer.cross, retrieval, x, encoded[keep_K]))
        channels.append(norm(layer.norm2, x + mlp(layer.mlp, x)))
    return torch.stack(channels)


def forecast(model: STanHopForPrediction, past_TC: Tensor, length: int) -> Tensor:
    """The whole model on the last `length` rows of one sample, by the functions above."""
    body, retrieval = model.model, model.config.retrieval
    past = past_TC[-length:]
    past = torch.cat([past[:1].expand(20 - length, -1), past])
    keep = torch.tensor([4 * (patch + 1) > 20 - length for patch in range(5)])
    x = past.T.reshape(3, 5, 4)
    x = norm(body.norm, linear(body.embed, x) + body.past_positions)
    scales = [(x, keep)]
    for number, block in enumerate(body.encoder):
        if number:
            x, keep = merged(body.merge[number - 1], x, keep)
        x = tandem(block, retrieval, x, keep)
        scales.append((x, keep))
    x, total = body.future_positions, torch.zeros(3, 8, dtype=torch.float64)
    for layer, head, (encoded, keep) in zip(body.decoder, model.heads, scales, strict=True):
        x = decoded(layer, retrieval, x, encoded, keep)
        total = total + linear(head, x).flatten(1)
    return total[:, :7].T


@pytest.mark.parametrize(
    "retrieval", [pytest.param(name, marks=pytest.mark.slow if "sparse+" in name else ()) for name in RETRIEVALS]
)
def test_different_lengths_in_one_batch(retrieval: str) -> None:
    """By the formula, as each alone, and whatever stands in the padding; the loss is the mean squared error."""
    model, past, future = built(STanHopForPrediction, retrieval=retrieval), normal(1, 3, 20, 3), normal(2, 3, 7, 3)
    lengths = [20, 13, 1]
    observed = torch.arange(20) >= torch.tensor([20 - length for length in lengths])[:, None]
    noisy = past.masked_fill(~observed[..., None], math.nan)
    got = model(noisy, future, past_observed_mask=observed.long())
    for row, length in enumerate(lengths):
        close(got.prediction_outputs[row], forecast(model, past[row], length), 1e-10)
        close(model(past[row : row + 1, -length:]).prediction_outputs[0], got.prediction_outputs[row])
    close(got.loss, (got.prediction_outputs - future).square().mean())
    assert model(noisy, past_observed_mask=observed, return_dict=False)[0].shape == (3, 7, 3)


@pytest.mark.parametrize("retrieval", ["softmax", "outeffhop", "sparsemax", "generalized_sparse"])
def test_plug_and_play_memory(retrieval: str) -> None:
    """Each block first reads the stored patches of the same channel at its own scale; None leaves the memory out."""
    model, past, stored = built(STanHopForPrediction, retrieval=retrieval), normal(1, 2, 20, 3), normal(2, 4, 20, 3)
    weigh = {
        "softmax": lambda scores: slow.slow_softmax_n(scores, 0.0),
        "outeffhop": lambda scores: slow.slow_softmax_n(scores, 1.0),
        "sparsemax": slow.slow_sparsemax,
        "generalized_sparse": slow.slow_entmax15,
    }[retrieval]
    body, observed = model.model, torch.ones(2, 20, dtype=torch.bool)
    memory = body.encode(stored, torch.ones(4, 20, dtype=torch.bool))
    x, keep = body.encode(past, observed)[0]
    for number, block in enumerate(body.encoder):
        recalled = torch.empty_like(x)
        for channel in range(3):
            patterns = memory[number][0][:, channel].reshape(-1, 8)
            states = x[:, channel]
            recalled[:, channel] = (states + weigh(states @ patterns.T / math.sqrt(8)) @ patterns) / 2
        if number:
            recalled, keep = body.merge[0](recalled, keep)
        x = block(recalled, keep)
    got = body.encode(past, observed, memory)
    close(got[-1][0], x, 1e-11)
    close(got[0][0], body.encode(past, observed)[0][0])
    with_memory = model(past, memory_values=stored).prediction_outputs
    alone = model(past).prediction_outputs
    assert (with_memory - alone).abs().max() > 1e-3
    close(model(past, memory_values=None).prediction_outputs, alone)
    assert model(past, memory_values=stored[:, 9:]).prediction_outputs.isfinite().all()
    padded = body.encode(stored[:, 9:], torch.ones(4, 11, dtype=torch.bool))
    close(
        body.recall(got[0][0], *padded[0]),
        body.recall(got[0][0], padded[0][0][:, :, 2:], padded[0][1][:, 2:]),
    )


@every_retrieval
def test_every_parameter_learns(retrieval: str) -> None:
    model = STanHopForPrediction(config(retrieval=retrieval, gamma=-0.001))
    assert model.training
    model(torch.randn(4, 20, 3), torch.randn(4, 7, 3)).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("retrieval", ["softmax", "outeffhop+gated"])
def test_eight_bits(retrieval: str) -> None:
    """Scores, weights and what is read have 256 values, the heads of the forecast are left out, and all comes back."""
    torch.manual_seed(0)
    model = STanHopForPrediction(config(retrieval=retrieval)).eval().requires_grad_(False)
    past = torch.randn(8, 20, 3)
    before = model(past).prediction_outputs
    probes = {path: module for path, module in model.named_modules() if isinstance(module, Probe)}
    assert len(probes) == 3 * (2 * 3 + 3 * 4)
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), fake_w8a8(model, [{"past_values": past}]) as inside:
        for path, probe in probes.items():
            probe.register_forward_hook(lambda module, args, output, path=path: seen.update({path: output}))
        rounded = model(past).prediction_outputs
    names = {point.name for point in inside}
    assert set(probes) <= names
    assert not any(name.startswith("heads") or "gate" in name for name in names)
    assert all(len(output.unique()) <= 256 for output in seen.values())
    assert 0 < (rounded - before).abs().max() < before.abs().max() / 4
    assert torch.equal(model(past).prediction_outputs, before)


def test_the_papers_size() -> None:
    """OutEffHop, Table 1: 35.13 million parameters with 12 decoder layers, and 0.02 million more with gates."""
    with torch.device("meta"):
        sizes = dict(patch_length=6, merge_size=1, encoder_layers=11)
        counts = [
            sum(p.numel() for p in STanHopForPrediction(STanHopConfig(retrieval=name, **sizes)).parameters())
            for name in ("softmax", "gated")
        ]
    assert counts[0] / 1e6 == pytest.approx(35.13, abs=0.1)
    assert counts[1] - counts[0] == 81 * 4 * 65  # 35.15m - 35.13m


@pytest.mark.parametrize("retrieval", ["generalized_sparse+gated", "outeffhop+clipped_softmax"])
def test_saving(retrieval: str, tmp_path: Path) -> None:
    model = built(STanHopForPrediction, retrieval=retrieval).float()
    model.save_pretrained(tmp_path)
    again = STanHopForPrediction.from_pretrained(tmp_path).eval()
    assert again.config.retrieval == retrieval
    assert again.config.gamma == -0.2
    past = torch.randn(2, 20, 3)
    assert torch.equal(again(past).prediction_outputs, model(past).prediction_outputs)
