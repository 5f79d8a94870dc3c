"""A copy of the user's tokenizer, so that no call of ours changes the user's own."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin


def own_tokenizer(processor: Any) -> Any:
    """A copy of a tokenizer that can pad; an image processor, or None, as it is.

    A tokenizer in Rust keeps the truncation and the padding of its last call, and saves them with itself. A token that
    pads is hidden by the mask, so any token serves where the tokenizer names none.
    """
    if isinstance(processor, (PreTrainedTokenizerBase, ProcessorMixin)):
        processor = copy.deepcopy(processor)
    elif hasattr(processor, "pad_token"):
        processor = copy.copy(processor)
    if getattr(processor, "pad_token", "none is needed") is None:
        processor.pad_token = processor.eos_token or processor.convert_ids_to_tokens(0)
    return processor
