"""Quantises weights and activations to 8 bits (W8A8) with the integer matrix products of torchao."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..wiring.install import model_root
from .places import quantizable

M = TypeVar("M", bound=nn.Module)


def int8_dynamic(model: M) -> M:
    """Quantise the projections of a model in place with torchao: int8 weights, int8 activations per token.

    Task heads and gates are not quantised. GPT-2's Conv1D is not quantised either, because torchao does not support it.
    The weights cannot be restored: to undo the quantisation, load the model again.
    docs/mathematics.md, section Quantisation to 8 bits.

    Returns:
        The same model.

    Raises:
        ImportError: torchao is missing; it comes with `pip install "hf-attn-swap[quant]"`.
        ValueError: the model has no Linear that torchao could quantise.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError:
        raise ImportError('torchao is not installed; pip install "hf-attn-swap[quant]".') from None
    root = model_root(model)
    chosen = {path for path, module in quantizable(root) if isinstance(module, nn.Linear)}
    if not chosen:
        name = type(root).__name__
        raise ValueError(f"{name} has no Linear that torchao could quantise (GPT-2 has Conv1D); use fake_w8a8 instead.")
    quantize_(root, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda module, path: path in chosen)
    return model
