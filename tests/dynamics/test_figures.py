"""Every figure is drawn, says its numbers, and is written as PNG and GIF; the command says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import BertTokenizer

from hf_attn_swap.dynamics import clusters, drawing, simulate, vertex_share
from hf_attn_swap.dynamics.figures import FIGURES, TRAINED, Settings
from hf_attn_swap.dynamics.heads import HeadMatrices
from tests.cli.conftest import command, tiny_bert  # noqa: F401  # the same command line and model as its own tests
from tests.contract.harness import fresh

TOKENIZER = BertTokenizer(
    vocab={word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
)


FAST = ("single-head",)  # the others differ in their settings alone
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(FIGURES)]


@pytest.mark.parametrize("name", CASES)
def test_every_figure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "FRAMES", 11)
    model = fresh("albert", torch.float32) if name in TRAINED else None
    drawn = FIGURES[name](Settings(seed=1, model=model, tokenizer=TOKENIZER, head=1, text="a b b a"))
    assert drawn.says.endswith(".")
    assert any(letter.isdigit() for letter in drawn.says) or "[]" in drawn.says
    first = dict(list(drawn.movies.items())[:1])
    paths = type(drawn)(figure=drawn.figure, says=drawn.says, movies=first).save(tmp_path, name)
    assert len(paths) == 1 + len(first)
    for path in paths:
        with Image.open(path) as picture:
            assert min(picture.size) > 100
            assert getattr(picture, "n_frames", 1) > 10 or path.suffix == ".png"


def test_clusters_by_hand() -> None:
    """Two pairs come together under V = I, Q = K = I; far apart they stay two clusters."""
    tokens = torch.tensor([[3.0, 0.0], [3.1, 0.3], [-3.0, 0.0], [-3.1, 0.2]], dtype=torch.float64)
    heads = HeadMatrices.plain(torch.eye(2), torch.eye(2))
    grouped = clusters(simulate(tokens, heads, time=6, step=0.05))
    assert (grouped.counts[0], grouped.counts[-1], grouped.collapse_time) == (4, 2, None)
    assert grouped.labels[-1].tolist() == [0, 0, 1, 1]
    together = clusters(simulate(0.1 * tokens, heads, time=6, step=0.05), tolerance=0.5)
    assert together.counts[-1] == 1
    assert together.collapse_time is not None
    assert 0 < together.collapse_time < 6


def test_vertices_by_hand() -> None:
    square = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    assert vertex_share(square) == (1.0, 4)
    assert vertex_share(torch.cat([square, torch.tensor([[0.5, 0.5]], dtype=torch.float64)])) == (0.8, 4)
    assert vertex_share(torch.nn.functional.pad(square, (0, 3))) == (1.0, 4), "a plane in five dimensions"
    assert vertex_share(torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)) == (pytest.approx(2 / 3), 2)
    assert vertex_share(torch.zeros(3, 2)) == (1.0, 1)
    with pytest.raises(ValueError, match="span 9 dimensions"):
        vertex_share(torch.randn(20, 9, generator=torch.Generator().manual_seed(0)))


def test_command(command: Callable[..., Any], tiny_bert: Path, tmp_path: Path) -> None:  # noqa: F811
    listed = command("dynamics")
    assert [line.split()[0] for line in listed.out.splitlines()] == list(FIGURES)
    done = command("dynamics", "spectra", "--model", tiny_bert, "--out", tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "spectra.png").exists()
    assert str(tmp_path / "spectra.png") in done.out
    for arguments, message in (
        (["no-such"], "unknown figure 'no-such'"),
        (["spectra"], "needs --model"),
        (["paragraph", "--model", tiny_bert], "needs --text"),
        (["single-head", "--model", tiny_bert, "--head", "9"], "heads 0 to 3"),
        (["spectra", "--model", tiny_bert, "--layer", "7"], "layers 0 to 1"),
    ):
        refused = command("dynamics", *arguments)
        assert refused.code == 2
        assert message in refused.err
