"""Every diagnostic against a hand-computed case, its invariances, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from hf_attn_swap.analysis import metrics

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_kurtosis_by_hand() -> None:
    """0, 0, 0, 4: mean 1, fourth moments (1+1+1+81)/4 = 21, unbiased variance (1+1+1+9)/3 = 4."""
    sample = torch.tensor([[[0.0, 0.0], [0.0, 4.0]]])
    assert metrics.kurtosis(sample).item() == pytest.approx(21 / (16 + 1e-6))
    normal = metrics.kurtosis(random(1, 500, 400))
    assert normal.item() == pytest.approx(3.0, abs=0.05)


def test_largest_value_by_hand() -> None:
    sample = torch.tensor([[[1.0, -7.0], [2.0, 3.0]], [[0.5, 0.0], [0.0, 9.0]]])
    assert metrics.max_inf_norm(sample).tolist() == [7.0, 9.0]
    real = torch.tensor([[True, True], [True, False]])
    assert metrics.max_inf_norm(sample, real).tolist() == [7.0, 0.5]


def test_similarity_by_hand() -> None:
    """Tokens at 0, 60 and 120 degrees: cosines 1/2, 1/2 and -1/2."""
    angles = torch.tensor([0.0, math.pi / 3, 2 * math.pi / 3])
    tokens = torch.stack([angles.cos(), angles.sin()], -1)[None] * torch.tensor([1.0, 5.0, 0.1])[:, None]
    assert metrics.token_similarity(tokens).item() == pytest.approx((0.5 + 0.5 - 0.5) / 3, abs=1e-6)
    assert metrics.token_similarity(tokens[:, :1]).isnan().all()
    assert torch.cat(list(metrics.pair_cosines(tokens))).tolist() == pytest.approx([0.5, -0.5, 0.5], abs=1e-6)


def test_each_pair_of_real_tokens_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two samples, in blocks of four tokens."""
    monkeypatch.setattr(metrics, "ROWS", 4)
    states, real = random(2, 11, 5), torch.ones(2, 11, dtype=torch.bool)
    real[1, 7:] = False
    pairs = torch.cat(list(metrics.pair_cosines(states, real)))
    assert len(pairs) == 11 * 10 // 2 + 7 * 6 // 2
    means = torch.stack([pairs[:55].mean(), pairs[55:].mean()])
    assert torch.allclose(means, metrics.token_similarity(states, real), atol=1e-12)


def test_entropy_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.0, 0.0]])
    wanted = [0.0, math.log(4), math.log(2), math.log(4) / 2]
    assert metrics.attention_entropy(rows[None, None]).flatten().tolist() == pytest.approx(wanted)
    assert metrics.attention_entropy(torch.tensor([[[[0.5, -0.5]]]])).isnan().all()


def test_sinks_by_hand() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.2]])[None, None]
    sinks = torch.tensor([[True, False, True]])
    assert metrics.sink_mass(rows, sinks).flatten().tolist() == pytest.approx([0.8, 0.75])


def test_residual_ratio_by_hand() -> None:
    """X = [[1, 2], [3, 2]]: column sums 4, 4, row sums 3, 5; less its mean [[-1, 0], [1, 0]]: 2, 0 and 1, 1."""
    states = torch.tensor([[[1.0, 2.0], [3.0, 2.0]]])
    assert metrics.residual_ratio(states).item() == pytest.approx(math.sqrt(2 * 1) / math.sqrt(4 * 5))
    assert metrics.residual_ratio(torch.ones(1, 3, 4)).item() == 0
    opposite = torch.tensor([[[1.0], [1.0], [1.0], [-1.0]]])
    assert metrics.residual_ratio(opposite).item() > 0.9


def test_geometry_by_hand() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]])
    update = torch.tensor([[[0.0, 3.0], [0.0, -1.0], [0.0, 0.0]]])
    norm, angle = metrics.update_geometry(x, update)
    assert norm.tolist() == [3.0, 1.0, 0.0]
    assert angle[:2].tolist() == pytest.approx([math.pi / 2, math.pi])
    assert angle[2].isnan()


SAMPLEWISE = [metrics.kurtosis, metrics.max_inf_norm, metrics.token_similarity, metrics.residual_ratio]


@pytest.mark.parametrize("metric", SAMPLEWISE)
def test_padding_does_not_count(metric: object) -> None:
    states, real = random(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)
    real[0, 4:] = False
    padded = states.masked_fill(~real[..., None], 1e3)
    got = metric(padded, real)
    assert got[0].item() == pytest.approx(metric(states[:1, :4]).item(), rel=1e-12)
    assert got[1].item() == pytest.approx(metric(states[1:]).item(), rel=1e-12)
