"""The ViT without residual connections that `--skip_free` of image_classification.py trains, for `import skip_free`."""

from hf_attn_swap.training.recipes.skip_free import (
    SkipFreeConfig,
    SkipFreeLayer,
    SkipFreeViTForImageClassification,
    without_skips,
)

__all__ = ["SkipFreeConfig", "SkipFreeLayer", "SkipFreeViTForImageClassification", "without_skips"]
