"""Says what a conversion will train, and what its weights and its optimizer hold: `convert --dry-run`.

Counted on the modules of the config, without weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_attn_swap.text.table import Table

GIGA = 1e9
ADAM = 12  # bytes of a number that trains: its gradient and two moments, in float32


def dry_run(
    model: str,
    variant: str | None,
    *,
    task: str | None,
    revision: str | None,
    token: str | None,
    dtype: str,
    tokens: str,
    low_memory: bool = False,
    **_: Any,
) -> Table:
    """Count the weights of a conversion.

    The arguments are the parameters of the command `convert` or `quantize`; those that change no count are not read.

    Returns:
        The weights and what trains, in numbers and in GB, and their sum.

    Raises:
        ValueError: the model, the variant, the precision or the number of tokens is unknown.
        OSError: the config cannot be read.
    """
    import torch

    from hf_attn_swap.conversion.config import default_distil
    from hf_attn_swap.conversion.trainable import choose_trainable
    from hf_attn_swap.publish.checkpoint import check_dtype, skeleton
    from hf_attn_swap.text.table import Table
    from hf_attn_swap.text.typed import parse_count

    check_dtype(dtype)
    empty: Any = skeleton(model, task, revision=revision, token=token)
    empty.to((empty.config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype))
    stage = default_distil(empty, variant or "softmax", low_memory=low_memory)
    size = sum(weight.numel() * weight.element_size() for weight in empty.parameters())
    counts = [("weights", empty.num_parameters(), size)]
    if parse_count(tokens) == 0:
        pass
    elif stage.rank is None:
        choose_trainable(empty, stage.trainable)
        trained = empty.num_parameters(only_trainable=True)
        counts.append(("gradients and optimizer, all but embeddings", trained, ADAM * trained))
    else:
        trained = adapter_weights(empty, stage.rank)
        counts.append((f"adapters of rank {stage.rank}, gradients and optimizer", trained, (4 + ADAM) * trained))
    rows = [(name, f"{number:,}", f"{held / GIGA:.2f}") for name, number, held in counts]
    rows.append(("together", "", f"{sum(held for *_, held in counts) / GIGA:.2f}"))
    summary = f"{type(empty).__name__}. The activations, the data and the libraries come on top, and are not counted."
    return Table(summary=summary, header=("", "numbers", "GB"), rows=rows)


def adapter_weights(model: Any, rank: int) -> int:
    """The number of weights of LoRA adapters on all matrices but the head."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    matrices = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D)) and module is not head]
    return rank * sum(sum(matrix.weight.shape) for matrix in matrices)
