"""What the command line of a recipe is read into."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import TrainingArguments

from hf_attn_swap.training import ConversionArguments, ImageDataArguments, ModelArguments, TextDataArguments
from hf_attn_swap.training import recipes as package


def classes(recipe: str) -> tuple[Any, ...]:
    """What the recipe's command line is read into."""
    module = importlib.import_module(f"{package.__name__}.{recipe}")
    data = ImageDataArguments if recipe == "image_classification" else TextDataArguments
    return (ModelArguments, data, ConversionArguments, module.RecipeArguments, TrainingArguments)
