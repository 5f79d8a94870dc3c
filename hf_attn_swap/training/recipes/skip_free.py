"""A ViT without residual connections, in which attention alone must keep the tokens apart.

These are the networks of table 7 of the modern Hopfield paper. In them `modern_hopfield` keeps its own skip, which is a
share alpha of the layer's normalized input. With `alpha=0`, only the scores of the layers below reach the next layer.
The model has its own model type, so that its weights are not loaded into an ordinary ViT.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTLayer


class SkipFreeConfig(ViTConfig):
    """A ViT's config under its own model type, which ViT does not load."""

    model_type = "skip_free_vit"


class SkipFreeLayer(ViTLayer):
    """x <- MLP(LayerNorm(attention(LayerNorm(x)))), without a residual connection around either part."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Hidden states (B,T,E) to hidden states (B,T,E)."""
        read, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        out: Tensor = self.dropout(self.mlp(self.layernorm_after(self.dropout(read))))
        return out


class SkipFreeViTForImageClassification(ViTForImageClassification):
    """A ViT classifier of images whose layers have no residual connections."""

    config_class = SkipFreeConfig

    def __init__(self, config: SkipFreeConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, ViTLayer):
                module.__class__ = SkipFreeLayer  # the parameters stay, and the forward pass changes


def without_skips(config: PreTrainedConfig) -> SkipFreeViTForImageClassification:
    """A ViT without residual connections, with the sizes of a ViT's config.

    Raises:
        ValueError: the config is of another architecture.
    """
    if config.model_type != "vit":
        raise ValueError(f"--skip_free is for the architecture vit, got {config.model_type}.")
    return SkipFreeViTForImageClassification(SkipFreeConfig(**config.to_dict()))
