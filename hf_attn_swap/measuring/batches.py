"""Prepares batches for a model: removes the labels, and finds out which tokens are real.

A batch is a plain dict of tensors. A token is real if the attention mask does not mark it as padding.

Axes: B batch, L token, N real token, C channel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..wiring.install import model_root

Batch = dict[str, Any]
LABELS = ("labels", "label", "label_ids")
POSITIONS = ("start_positions", "end_positions")  # the labels of question answering
MASKS = ("attention_mask", "decoder_attention_mask")
DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


def as_batches(batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield the batches without their labels. A single dict counts as one batch.

    Raises:
        ValueError: `batches` is empty, or a batch is not a dict of tensors.
    """
    empty = True
    for batch in [batches] if isinstance(batches, Mapping) else batches:
        empty = False
        check_batch(batch)
        yield without_labels(batch)
    if empty:
        raise ValueError("there are no batches; pass a few dicts of tensors as the model takes them.")


def check_batch(batch: Any) -> None:
    """Refuse anything that is no dict of tensors.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
        raise ValueError(f"a batch is a dict of tensors as the model takes them, got {type(batch).__name__}.")


def without_labels(batch: Mapping[str, Any]) -> Batch:
    """Return the batch without its labels, because calibration and distillation are not supervised."""
    return {key: value for key, value in batch.items() if not is_label(key)}


def is_label(name: str) -> bool:
    """True for an argument of a model's forward pass that holds labels, such as `next_sentence_label`."""
    return name in POSITIONS or ("label" in name and not name.startswith("input_"))


@contextlib.contextmanager
def evaluating(*models: nn.Module | None) -> Iterator[None]:
    """Inside the `with` block, the models are in evaluation mode. Afterwards every module has its former mode again."""
    training = [module for model in models if model is not None for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def forward(model: nn.Module, batch: Batch) -> Any:
    """Run the model on a batch, on the model's device, and return the output."""
    return model(**on_device(model, batch))


def on_device(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device."""
    device = next(model.parameters()).device
    if device.type == "meta":  # offloaded weights are on "meta", and accelerate moves the batch for them
        return batch
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def read_by_decoder(batch: Batch) -> Batch:
    """The batch without the mask of the encoder, if a decoder reads tokens of its own. It gives the logits."""
    if not any(batch.get(name) is not None for name in DECODER):
        return batch
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def read_by_encoder(batch: Batch) -> Batch:
    """The batch without the mask of the decoder."""
    return {name: value for name, value in batch.items() if name != "decoder_attention_mask"}


def read_by(module: nn.Module, batch: Batch) -> Batch:
    """The batch with the mask of that stack alone, encoder or decoder, to which an attention module belongs.

    Some decoders, such as Moonshine's, say only that they are causal.
    """
    decodes = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return read_by_decoder(batch) if decodes else read_by_encoder(batch)


def token_mask(batch: Batch, tokens_BL: Tensor) -> Tensor:
    """Return a bool mask (B,L), True for the real tokens of a tensor (B,L,...) inside the model.

    All tokens are real if the batch has no mask. In a batch for an encoder and a decoder, `read_by` leaves one mask.

    Raises:
        ValueError: the batch has masks, but no mask has the shape (B,L).
    """
    shape = tokens_BL.shape[:2]
    masks = [batch[name] for name in MASKS if batch.get(name) is not None]
    for mask in masks:
        if mask.shape == shape:
            real: Tensor = mask.to(device=tokens_BL.device, dtype=torch.bool)
            return real
    if masks:
        raise ValueError(
            f"an attention mask of shape {tuple(masks[0].shape)} does not say which of {tuple(shape)} tokens are real; "
            "pass the 2-D mask that the tokenizer gives."
        )
    return torch.ones(shape, dtype=torch.bool, device=tokens_BL.device)


def real_tokens(batch: Batch, x_BLC: Tensor) -> Tensor:
    """The rows (N,C) of a tensor that belong to real tokens, where a mask of its shape says which; otherwise all."""
    for name in MASKS:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and x_BLC.dim() == 3 and mask.shape == x_BLC.shape[:2]:
            return x_BLC[mask.to(device=x_BLC.device, dtype=torch.bool)]
    return x_BLC.flatten(0, -2)


def refuse_other_tokens(root: nn.Module, cores: Iterable[nn.Module], batch: Batch) -> None:
    """Refuse attention modules whose tokens the batch's mask does not count: the vision tower beside a text model.

    Raises:
        ValueError: the batch has a mask, and a module lies outside the text model of a model of several parts.
    """
    text = getattr(root.config, "text_config", None)
    if text is None or not any(batch.get(name) is not None for name in MASKS):
        return
    outside = sorted({type(core).__name__ for core in cores if type(core.config) is not type(text)})
    if outside:
        raise ValueError(
            f"the attention mask counts tokens of text, and not those that {', '.join(outside)} reads; swap the text "
            'model alone, as with modules="language_model".'
        )


def gives_numbers(model: nn.Module) -> bool:
    """True if a row's outputs are no logits of classes: a regression, or labels that do not exclude each other.

    A softmax over them would mean nothing; over a single number it is always 1.
    """
    root = model_root(model)
    if not type(root).__name__.endswith(("SequenceClassification", "ImageClassification")):
        return False
    kind = getattr(root.config, "problem_type", None)
    return root.config.num_labels == 1 or kind in ("regression", "multi_label_classification")


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that a model of text was made for, as its config says; None if it names none."""
    positions = getattr(model_root(model).config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def usual_length(models: Iterable[nn.Module], length: int) -> int:
    """This number of tokens, or the positions of the model that has the fewest, if they are fewer."""
    limits = [limit for model in models if (limit := max_positions(model)) is not None]
    return min([length, *limits])


def check_length(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Refuse rows that are longer than the model's positions: what a model gives behind them says nothing.

    Raises:
        ValueError: they are.
    """
    longest = max((batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch), default=0)
    limit = max_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the rows have up to {longest:,} tokens, and {type(model_root(model)).__name__} was made for {limit:,} "
            "positions; what it gives behind them says nothing, so measure shorter rows."
        )
