"""Real pretrained checkpoints and real inputs: sentences, a chemical reaction, a drawn picture.

The environment variable HF_ATTN_SWAP_MODELS names a folder with one Hugging Face folder per model.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

FOLDER = os.environ.get("HF_ATTN_SWAP_MODELS", "")
SENTENCES = (
    "The old lighthouse keeper climbed the stairs every evening and lit the lamp before the first ships came home.",
    "Bread rises because yeast turns sugar into gas.",
    "In 1869 Mendeleev wrote the names of the elements on cards and moved them about until a pattern appeared.",
)
REACTIONS = (
    "CC(=O)Cl.OCc1ccccc1>>CC(=O)OCc1ccccc1",
    "O=C(O)c1ccccc1.CO>>COC(=O)c1ccccc1",
    "Nc1ccc(Br)cc1.OB(O)c1ccccc1>>Nc1ccc(-c2ccccc2)cc1",
)
SMILES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z0-9().=#\-~/\\*]")


@dataclass(frozen=True)
class Checkpoint:
    """How a model is loaded, and on which side a batch of texts is padded (None: no text)."""

    auto: str
    padded: str | None
    generates: bool = False
    slow: bool = False


CHECKPOINTS = {
    "minilm": Checkpoint("AutoModel", "right"),
    "smollm2": Checkpoint("AutoModelForCausalLM", "left", generates=True, slow=True),
    "vit": Checkpoint("AutoModel", None),
    "albert_rxn": Checkpoint("AutoModelForMaskedLM", "right"),
    "stories260k": Checkpoint("AutoModelForCausalLM", "left", generates=True),
}
TEXTS = [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.padded]
GENERATING = [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.generates]


def needs(name: str) -> Any:
    """A test parameter that skips with a reason where the checkpoint is absent; the largest model is slow."""
    there = bool(FOLDER) and (Path(FOLDER) / name).is_dir()
    reason = f"HF_ATTN_SWAP_MODELS names no folder with the real checkpoint {name}"
    marks = [pytest.mark.weights, pytest.mark.skipif(not there, reason=reason)]
    return pytest.param(name, marks=[*marks, pytest.mark.slow] if CHECKPOINTS[name].slow else marks)


@functools.cache
def stock(name: str) -> Any:
    """The checkpoint itself, never patched."""
    return getattr(transformers, CHECKPOINTS[name].auto).from_pretrained(Path(FOLDER) / name).eval()


def fresh(name: str) -> Any:
    """A copy of one's own."""
    return copy.deepcopy(stock(name))


def inputs(name: str) -> dict[str, Tensor]:
    """A batch; texts of three lengths, padded to the longest."""
    if name == "vit":
        return {"pixel_values": picture()}
    rows = {"albert_rxn": _reactions, "stories260k": _stories}.get(name, _sentences)(name)
    return pad(rows, CHECKPOINTS[name].padded == "left")


def pad(rows: list[list[int]], left: bool) -> dict[str, Tensor]:
    """Rows of ids as a batch with its attention mask."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(longest - len(row), None) if left else slice(len(row))
        ids[index, where], mask[index, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One row of a batch without its padding."""
    real = batch["attention_mask"][index].bool()
    return {key: value[index : index + 1, real] for key, value in batch.items()}


def _sentences(name: str) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(FOLDER) / name)
    rows: list[list[int]] = tokenizer(list(SENTENCES))["input_ids"]
    return rows


def _reactions(name: str) -> list[list[int]]:
    """A molecule is text: one token per atom, bond or bracket."""
    vocabulary = {token: index for index, token in enumerate((Path(FOLDER) / name / "vocab.txt").read_text().split())}
    return [[vocabulary[token] for token in ("[CLS]", *SMILES.findall(reaction), "[SEP]")] for reaction in REACTIONS]


def _stories(name: str) -> list[list[int]]:
    """This checkpoint brings no tokenizer: what it tells when it is asked for a story, cut at three lengths."""
    start = torch.ones(1, 1, dtype=torch.long)
    with torch.random.fork_rng():
        told = (
            stock(name)
            .generate(start, attention_mask=start, max_new_tokens=23, do_sample=False, pad_token_id=0)[0]
            .tolist()
        )
    return [told, told[:9], told[:16]]


def picture() -> Tensor:
    """Two drawn images (2,3,224,224): a disc before a gradient sky, and stripes."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
    disc = ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.2).float()
    sky = torch.stack([disc, 0.5 * disc + 0.2 * y, 0.6 - 0.4 * y])
    stripes = torch.stack([torch.sin(12 * x), torch.sin(12 * x + y), torch.cos(5 * y)])
    return torch.stack([sky, stripes])


def real(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The outputs of real tokens."""
    out: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return out[batch["attention_mask"].bool()] if "attention_mask" in batch else out


def run(model: Any, batch: dict[str, Tensor], **arguments: Any) -> Tensor:
    """Outputs of real tokens, without gradients."""
    with torch.no_grad():
        return real(model(**batch, **arguments), batch)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    assert torch.isfinite(got).all()
    return float((got - wanted).abs().max() / wanted.abs().max())
