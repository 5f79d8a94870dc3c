"""What an analysis could leave behind in a module."""

from __future__ import annotations

import torch


def modes_and_hooks(module: torch.nn.Module) -> tuple[bool, int, int]:
    return module.training, len(module._forward_hooks), len(module._forward_pre_hooks)
