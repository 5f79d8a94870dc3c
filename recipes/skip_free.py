"""A ViT without residual connections, in which attention alone must keep the tokens apart.

The networks of table 7 of the modern Hopfield paper. There `mha` keeps its own skip, a share alpha of its normalised
input; with `alpha=0` nothing but the scores of the layers below is left. Its own model type, so that no one loads its
weights into a ViT.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTLayer


class SkipFreeConfig(ViTConfig):
    """A ViT's, under a name that ViT does not load."""

    model_type = "skip_free_vit"


class SkipFreeLayer(ViTLayer):  # type: ignore[misc]  # transformers carries no types
    """x <- MLP(LayerNorm(attention(LayerNorm(x)))): what each layer does not hand on is lost."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """(B,T,E) to the same."""
        read, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        return self.dropout(self.mlp(self.layernorm_after(self.dropout(read))))


class SkipFreeViTForImageClassification(ViTForImageClassification):
    """Classifies images by layers that skip nothing themselves."""

    config_class = SkipFreeConfig

    def __init__(self, config: SkipFreeConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, ViTLayer):
                module.__class__ = SkipFreeLayer  # the same parameters, another way through them


def without_skips(config: PreTrainedConfig) -> SkipFreeViTForImageClassification:
    """Such a model of a ViT's sizes.

    Raises:
        ValueError: the sizes are of another architecture.
    """
    if config.model_type != "vit":
        raise ValueError(f"--skip_free is for the architecture vit, got {config.model_type}.")
    return SkipFreeViTForImageClassification(SkipFreeConfig(**config.to_dict()))
