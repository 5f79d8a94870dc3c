"""The real tokens of a batch: an encoder and a decoder have a mask each, and each stack reads its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import Losses, calibrate
from hf_attn_swap.measuring.batches import read_by, read_by_decoder, read_by_encoder, token_mask
from tests import zoo
from tests.generic.harness import behind_the_interface

from .converting import stock
from .distilling import distiller, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LOSSES = (Losses(), Losses(logits=0.0, hidden=1.0), Losses(logits=0.0, hidden=1.0, hidden_layers="last"))
SWAPPED = pytest.mark.skipif(
    not behind_the_interface("t5"), reason="this transformers computes attention in the model's own code"
)
BESIDE = 2  # the last tokens of the first row, which the decoder's mask leaves out


def batch(decoder: bool, **more: Any) -> dict[str, Any]:
    """Encoder and decoder have rows of one length; the encoder has padding, and the decoder has it if asked."""
    made = zoo.inputs("t5", batch=2, length=5, padded="right")
    mask = torch.ones(2, 5, dtype=torch.long)
    if decoder:
        mask[0, -BESIDE:] = 0
    return made | {"decoder_attention_mask": mask} | more


def test_each_stack_reads_its_own_mask() -> None:
    given = batch(decoder=True)
    tokens = torch.zeros(2, 5, 3)
    assert torch.equal(token_mask(read_by_decoder(given), tokens), given["decoder_attention_mask"].bool())
    assert torch.equal(token_mask(read_by_encoder(given), tokens), given["attention_mask"].bool())
    model = stock("t5")
    inside = {path: each for path, each in model.named_modules() if path.endswith("SelfAttention")}
    for path, each in inside.items():
        wanted = "decoder_attention_mask" if path.startswith("decoder") else "attention_mask"
        assert [name for name in read_by(each, given) if "mask" in name] == [wanted]
    without = {name: value for name, value in given.items() if name != "decoder_attention_mask"}
    assert token_mask(read_by_decoder(without), torch.zeros(2, 7, 3)).all(), "of another length than the encoder's"


@SWAPPED
@pytest.mark.parametrize("losses", LOSSES, ids=["logits", "hidden", "last"])
def test_padding_of_the_decoder_costs_nothing(losses: Losses, tmp_path: Path) -> None:
    """Other tokens in the decoder's padding change no loss; instead of real tokens they do."""
    trainer = distiller(patch_model(stock("t5"), "outeffhop"), tmp_path, "t5", losses=losses, trainable="body")
    found = []
    for decoder in (True, False):
        for token in (5, 9):
            given = batch(decoder)
            given["decoder_input_ids"] = given["decoder_input_ids"].clone()
            given["decoder_input_ids"][0, -BESIDE:] = token
            found.append(loss_of(trainer, given))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] != pytest.approx(found[3], rel=1e-4)


@SWAPPED
def test_layers_and_fits_read_the_mask_of_their_stack(tmp_path: Path) -> None:
    found = []
    for token in (5, 9):
        given = batch(decoder=True)
        given["decoder_input_ids"] = given["decoder_input_ids"].clone()
        given["decoder_input_ids"][0, -BESIDE:] = token
        model = patch_model(stock("t5"), "outeffhop")
        trainer = distiller(model, tmp_path, "t5", losses=Losses(logits=0.0, layers=1.0), trainable="query")
        error = loss_of(trainer, given)
        fit = calibrate(model, [given] * 4, fit="gain", progress=False)
        found.append((error, [value for explained in fit.after.values() for value in explained]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
