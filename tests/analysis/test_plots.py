"""The pictures show the recorded numbers, both models beside each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.path import Path

from hf_attn_swap import patch_model
from hf_attn_swap.analysis import Recording, plots, record
from hf_attn_swap.analysis.recording import Layer
from tests.contract.harness import batch_of, forward, fresh, perturb


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    model, batch = fresh("bert", torch.float32), batch_of("bert", torch.float32, padded="right")
    by_name = {}
    for label in ("unswapped", "simpletron_resl"):
        if label != "unswapped":
            perturb(patch_model(model, label))
        with record(model) as by_name[label]:
            forward(model, batch)
    return by_name


def labels(figure: plots.Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_similarity(recordings: dict[str, Recording]) -> None:
    figure = plots.similarity(recordings)
    assert labels(figure) == list(recordings)
    for line, recording in zip(figure.axes[0].lines, recordings.values(), strict=True):
        assert line.get_ydata() == pytest.approx([np.mean(recording.layers[place].similarity) for place in range(3)])


def test_violins(recordings: dict[str, Recording]) -> None:
    """One per layer and model, over the values that the layer has; a linear attention has no entropies."""
    above, below = plots.spread(recordings).axes
    assert [len(axes.collections) for axes in (above, below)] == [6, 3]
    for violin, layer in zip(above.collections, recordings["unswapped"].in_order, strict=False):
        drawn, found = Path.make_compound_path(*violin.get_paths()).get_extents(), layer.pairs.counts.nonzero()
        assert drawn.intervaly == pytest.approx([-1 + float(end) / 50 for end in (found.min(), found.max() + 1)])
        assert drawn.width == pytest.approx(0.4), "the most frequent value"


def test_all_pairs_at_one() -> None:
    """A single bin is drawn, and values beyond the ends are counted in it."""
    recording = Recording(layers={0: Layer()})
    recording.layers[0].pairs.add(torch.tensor([[1.0, 1.0 + 1e-7], [float("nan"), 0.985]]))
    assert recording.layers[0].pairs.counts.nonzero().tolist() == [[99]]
    assert recording.layers[0].pairs.counts[99] == 3
    (violin,) = plots.similarity({"one": recording}).axes[0].collections
    assert violin.get_paths()[0].get_extents().intervaly == pytest.approx((0.98, 1.0))


def test_entropy_and_sinks(recordings: dict[str, Recording]) -> None:
    """A linear attention has no entropy, and is drawn as a gap."""
    lines = {line.get_label(): line.get_ydata() for line in plots.entropy(recordings).axes[0].lines}
    assert lines["unswapped"] == pytest.approx(
        [float(recordings["unswapped"].layers[p].entropy.value.mean()) for p in range(3)]
    )
    assert np.isnan(lines["simpletron_resl"]).all()
    shares = {line.get_label(): line.get_ydata() for line in plots.sinks(recordings).axes[0].lines}
    for label, recording in recordings.items():
        assert shares[label] == pytest.approx([float(recording.layers[p].sinks.value.mean()) for p in range(3)])


def test_outliers_and_updates(recordings: dict[str, Recording]) -> None:
    figure = plots.outliers(recordings)
    modules = recordings["unswapped"].activations
    assert [len(line.get_ydata()) for line in figure.axes[1].lines] == [len(modules)] * 2
    norms = plots.updates(recordings).axes[0].lines[0].get_ydata()
    assert norms == pytest.approx([float(recordings["unswapped"].layers[p].update_norm.value) for p in range(3)])
