"""What a causal language model gives for the tokens at some places of a text, without the logits of all others.

Axes: N text, L token, T asked token, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..wiring.install import model_root
from .batches import forward
from .lm_head import can_skip_logits
from .lost import predicts_next


def need_next_token(model: nn.Module, what: str) -> None:
    """Refuse a model that is no causal language model.

    Args:
        model: the model.
        what: what is measured by the next token, with its verb: "recall is measured".

    Raises:
        ValueError: it is none.
    """
    if not predicts_next(model):
        raise ValueError(f"{what} by the next token; {type(model_root(model)).__name__} is no causal language model.")


def token_log_probs(model: nn.Module, texts_NL: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
    """Let a model read texts to their end, and ask for the tokens at some places, each given all tokens before it.

    Args:
        model: a causal language model.
        texts_NL: token ids.
        places_T: the places of the tokens, from 1; the first token of a text has nothing before it.

    Returns:
        The log-probability of each token (N,T), in nats, and whether it is the model's first choice (N,T), on the CPU.
    """
    before_T = places_T - 1  # a token's logits stand one place before it
    leaves_out = can_skip_logits(model_root(model))
    batch = {"input_ids": texts_NL, **({"logits_to_keep": before_T} if leaves_out else {})}
    logits_NTV = forward(model, batch).logits
    if not leaves_out:
        logits_NTV = logits_NTV[:, before_T.to(logits_NTV.device)]
    token_NT = texts_NL[:, places_T].to(logits_NTV.device)
    log_p_NT = logits_NTV.float().log_softmax(-1).gather(-1, token_NT[..., None])[..., 0]
    return log_p_NT.cpu(), torch.eq(logits_NTV.argmax(-1), token_NT).cpu()
