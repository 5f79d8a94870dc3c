"""Tiny models with random weights, one for each known family, and inputs for them.

The models come from `Family.tiny`, so that a new family needs nothing here. Axes: B batch, L token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..core.kind import Kind
from ..families import sites
from ..families.base import Family

SCALE = 8.0  # fresh weights have a deviation of 0.02, at which the residual stream hides what attention adds
ROWS, TOKENS, PADDED = 2, 8, 2
FIRST_ID = 4  # smaller numbers may be special tokens


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The stock model of one family, and the inputs of this model.

    Attributes:
        model: the stock model, in evaluation mode on the device of the check.
        kind: what its attention reads.
        batch: inputs without padding.
        padded: the same inputs with a mask, under which the first row has two tokens of padding; None for images.
        other: the inputs of `batch` with another first token, or another first patch.
        out: the stock model's outputs on `batch`.
    """

    model: Any
    kind: Kind
    batch: dict[str, Tensor]
    padded: dict[str, Tensor] | None
    other: dict[str, Tensor]
    out: Tensor


def matter(model: nn.Module) -> None:
    """Scale fresh weights up and draw biases, so that attention decides about the outputs. Uses PyTorch's generator."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            embedding = any(part in key.lower() for part in ("embed", "wte", "wpe", "shared"))
            if parameter.dim() >= 2 and not embedding:
                parameter.mul_(SCALE)
            elif parameter.dim() == 1 and key.endswith("bias"):
                parameter.normal_(0, 0.1)


def tiny(family: Family, device: torch.device) -> Tiny:
    """The model of a family and its inputs, the same at every call. PyTorch's generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which sets the devices' generators too
        config = AutoConfig.for_model(family.name, **family.tiny)
        model: Any = AutoModel.from_config(config)
        kind = sites(model)[0].kind
        if kind is Kind.DECODER:
            model = AutoModelForCausalLM.from_config(config)
            model.generation_config.eos_token_id = None  # generation then ends by its length alone
        matter(model)
    model = model.to(device).eval()
    batch = _batch(config, kind, device)
    return Tiny(
        model=model,
        kind=kind,
        batch=batch,
        padded=None if kind is Kind.IMAGE else _padded(batch, kind),
        other=_other(batch, config),
        out=output(model, batch),
    )


def output(model: Any, batch: dict[str, Tensor], **words: Any) -> Tensor:
    """The logits of a language model, or the last hidden state of another model, both (B,L,...)."""
    with torch.no_grad():
        result = model(**batch, **words)
    found: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return found


def _batch(config: Any, kind: Kind, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind is Kind.IMAGE:
        shape = (ROWS, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    return {"input_ids": torch.randint(FIRST_ID, config.vocab_size, (ROWS, TOKENS), generator=generator).to(device)}


def _padded(batch: dict[str, Tensor], kind: Kind) -> dict[str, Tensor]:
    """Decoders are padded before the text, as generation needs it, and other models after it."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, slice(PADDED) if kind is Kind.DECODER else slice(-PADDED, None)] = 0
    return {**batch, "attention_mask": mask}


def _other(batch: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    changed = {name: tensor.clone() for name, tensor in batch.items()}
    if "pixel_values" in changed:
        changed["pixel_values"][..., : config.patch_size, : config.patch_size] *= -1
    else:
        ids = changed["input_ids"]
        ids[:, 0] = torch.where(ids[:, 0] == FIRST_ID, FIRST_ID + 1, FIRST_ID)
    return changed
