"""Finds the last hidden states of a model, and whether its logits are the head's output on them and nothing more.

Axes: B batch, L token, E model width, V vocabulary (or class).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@contextlib.contextmanager
def last_hidden(root: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Inside the `with` block, keep the last hidden states that the model below the head returns."""
    caught: list[Tensor] = []
    # Some models call their decoder past the base model (OPT), or have no base model (T5). The outermost ends last.
    below = {id(module): module for module in (root.get_decoder(), root.base_model) if module is not root}
    with contextlib.ExitStack() as hooked:
        for module in below.values():
            hook = module.register_forward_hook(lambda module, args, output: caught.append(first_of(output)))
            hooked.callback(hook.remove)
        yield caught


def names_head(name: str) -> bool:
    """True if a class of this name has a head, such as BertForMaskedLM; False for BertModel."""
    return any(suffix in name for suffix in ("For", "LMHead"))


def can_skip_logits(root: PreTrainedModel) -> bool:
    """True if the model can leave out the logits of most tokens."""
    return "logits_to_keep" in inspect.signature(root.forward).parameters and root.get_output_embeddings() is not None


@torch.no_grad()
def head_alone(root: PreTrainedModel, hidden_BLE: Tensor, last_B1V: Tensor) -> bool:
    """True if the last token's logits are the head's output on its hidden state, with nothing after the head."""
    if last_B1V.dim() != 3 or last_B1V.shape[1] != 1:
        return False
    last_B1E = hidden_BLE[:, [-1]]  # by index, as the model takes it: a slice may run another kernel
    return torch.equal(root.get_output_embeddings()(last_B1E).to(last_B1V.dtype), last_B1V)


def logits_of(output: Any) -> Tensor:
    """The logits of an output.

    Raises:
        ValueError: the output has no logits.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError("the model gives no logits; set the loss 'logits' to 0 and 'hidden' above 0.")
    return logits


def first_of(output: Any) -> Tensor:
    """The main tensor of an output."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first
