"""What patching could leave behind in a model, and a model from which all of it is gone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_attn_swap import describe


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything that patching could leave behind, by module: classes, attributes, hooks, children."""
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks") or "hooks_" in name]
    modules: dict[str, Any] = {}
    for path, module in model.named_modules():
        modules[path] = {
            "class": type(module),
            "attributes": sorted(vars(module)),
            "children": list(module._modules),
            "hooks": {name: len(getattr(module, name)) for name in hooks},
            "config": id(vars(module).get("config")),
            "training": module.training,
        }
    return modules


def tensors(model: nn.Module) -> dict[str, tuple[int, int, torch.Tensor]]:
    return {name: (t.data_ptr(), t._version, t.clone()) for name, t in model.state_dict().items()}


def assert_stock_again(
    model: nn.Module, parts: dict[str, Any], weights: dict[str, Any], config: Any, text: str
) -> None:
    assert anatomy(model) == parts
    after = tensors(model)
    assert list(after) == list(weights)
    for name, (place, version, tensor) in weights.items():
        assert after[name][:2] == (place, version), f"{name} was moved or written to"
        assert torch.equal(after[name][2], tensor)
    assert model.config is config
    assert config.to_json_string() == text
    assert config._attn_implementation == "sdpa"


def attentions(model: nn.Module) -> list[str]:
    return [row.attention for row in describe(model).rows]
