"""A vision-language model with a converted text model: generation from image and text, training, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

from hf_attn_swap import convert, describe, list_variants, patch_model, unpatch_model
from hf_attn_swap.conversion import DistillationTrainer, Losses, calibrate
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.harness import perturb, refused, swaps
from tests.conversion.distilling import arguments
from tests.harness.byte_tokenizer import byte_tokenizer
from tests.harness.process import python

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The clip cuts away")]
TOWER, TEXT = 2, 3  # layers
TEXTS = ["<image> what is it?", "and <image> this one, what is that?", "a text without an image"]
SHIM = """
import sys
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
assert "hf_attn_swap" not in sys.modules
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(sys.argv[1])
torch.save(model.generate(**torch.load(sys.argv[2]), max_new_tokens=6, do_sample=False), sys.argv[3])
"""


def processor() -> Any:
    """Bytes, and images of 2 x 2 patches."""
    tokenizer = byte_tokenizer("left")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = T.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
    return T.LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def llava() -> Any:
    """A tiny Llava: CLIP's vision tower, and Llama as the text model."""
    tokenizer = processor().tokenizer
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    vision = T.CLIPVisionConfig(**sizes, num_hidden_layers=TOWER, image_size=16, patch_size=8)
    tokens = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    text = T.LlamaConfig(**sizes, **tokens, vocab_size=len(tokenizer), num_hidden_layers=TEXT, num_key_value_heads=2)
    image = tokenizer.convert_tokens_to_ids("<image>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_id=image, image_seq_length=4)
        model = T.LlavaForConditionalGeneration(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and "embed" not in name:
                    parameter.mul_(6.0)  # weights of deviation 0.02 hide attention behind the residual
    return model.eval()


def images(count: int) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 255, (20, 24, 3), dtype=np.uint8)) for _ in range(count)]


def batch() -> dict[str, torch.Tensor]:
    """Two texts with an image each and one without, padded on the left."""
    return dict(processor()(images=images(2), text=TEXTS, return_tensors="pt", padding=True))


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows of an image and a text each."""
    read = processor()
    made = [
        read(images=[image], text=[f"<image> {place:02d} is it?"], return_tensors="pt")
        for place, image in enumerate(images(count))
    ]
    return [{name: value[0] for name, value in row.items()} for row in made]


def continued(model: Any, **more: Any) -> torch.Tensor:
    more |= {"suppress_tokens": [model.config.image_token_id]}  # a random model may write one
    return model.generate(**batch(), max_new_tokens=6, min_new_tokens=6, do_sample=False, **more)


@pytest.mark.parametrize("variant", list_variants())
def test_generated_from_image_and_text(variant: str, tmp_path: Path) -> None:
    """With the cache as without it; the same after a save and a load; and the stock model after unpatching."""
    model, stock = llava(), continued(llava())
    patch_model(model, variant, modules="language_model", strength=0.0, **tiny_options(variant))
    assert torch.equal(continued(model), stock)
    perturb(patch_model(model, variant, modules="language_model", **tiny_options(variant)))
    assert len(swaps(model.model.language_model)) == len(swaps(model)) == TEXT
    found = continued(model)
    assert torch.equal(found, continued(model, use_cache=False))
    model.save_pretrained(tmp_path)
    again = T.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted = model(**batch()).logits
        assert torch.equal(again(**batch()).logits, wanted)
        stock_logits = llava()(**batch()).logits
        assert (variant == "softmax") == torch.allclose(wanted, stock_logits, atol=1e-4)
        assert torch.equal(unpatch_model(model)(**batch()).logits, stock_logits)


@pytest.mark.parametrize("variant", ["belief", "modern_hopfield", "simpletron_resl"])
def test_program_without_the_package(variant: str, tmp_path: Path) -> None:
    model = perturb(patch_model(llava(), variant, modules="language_model"))
    model.save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    torch.save(batch(), tmp_path / "batch.pt")
    python("-c", SHIM, tmp_path / "model", tmp_path / "batch.pt", tmp_path / "found.pt")
    assert torch.equal(torch.load(tmp_path / "found.pt"), model.generate(**batch(), max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("trainable", ["all", "body", ("query", "output")])
def test_distilled(trainable: Any, tmp_path: Path) -> None:
    """The loss falls, with a term for each kind of comparison."""
    model = patch_model(llava(), "belief", modules="language_model")
    args = arguments(tmp_path, num_train_epochs=20, learning_rate=3e-3)
    losses = Losses(logits=1.0, hidden=0.5, layers=0.25)
    trainer = DistillationTrainer(model, args, train_dataset=rows(), trainable=trainable, losses=losses)
    before = trainer.evaluate(rows())["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows())["eval_loss"] < 0.9 * before
    assert [row.attention for row in describe(model).rows] == ["softmax (stock)"] * TOWER + ["belief"] * TEXT


def test_converted_by_one_call() -> None:
    model = llava()
    report = convert(model, "belief", rows(32), modules="language_model", tokens=2000, progress=False)
    assert report.steps[-1].layers == tuple(range(TOWER, TOWER + TEXT))
    assert report.steps[-1].lost.degradation < report.steps[0].lost.degradation
    assert {swap["modules"] for swap in model.config.attn_swap["swaps"]} == {"language_model"}


def test_the_whole_model_is_not_converted() -> None:
    """The batch's mask counts tokens of text, so that it says nothing about the patches of the tower."""
    model = llava()
    with refused("CLIPAttention", 'modules="language_model"'):
        convert(model, "belief", rows(), tokens=1000, progress=False)
    assert not swaps(model)


@pytest.mark.parametrize("patches", [5, 8])
def test_a_mask_of_text_is_not_a_mask_of_patches(patches: int, tmp_path: Path) -> None:
    """Also where there are as many tokens as patches."""
    given = {"pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": torch.ones(2, patches, dtype=torch.long)}
    given["input_ids"] = torch.full((2, patches), llava().config.image_token_id)
    given["input_ids"][:, 4:] = 7
    for variant in ("belief", "modern_hopfield"):
        with refused("CLIPAttention", "swap the text model alone"):
            calibrate(patch_model(llava(), variant), [given], progress=False)
    data = [{name: value[row] for name, value in given.items()} for row in range(2)]
    losses, model = Losses(logits=0.0, layers=1.0), patch_model(llava(), "belief")
    trainer = DistillationTrainer(model, arguments(tmp_path), losses=losses, trainable="body", train_dataset=data)
    with refused("CLIPAttention", "swap the text model alone"):
        trainer.train()
