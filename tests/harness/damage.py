"""Damage to the config of a saved model: each has a name, a change, and words of the error that it must raise."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any]], Any]


def rewritten(folder: Path, where: Path, change: Change) -> Path:
    """A copy of a checkpoint with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (where / "config.json").write_text(json.dumps(config))
    (where / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return where


def put(*path: str | int, value: Any) -> Change:
    """Set one entry of the config."""

    def change(config: dict[str, Any]) -> None:
        place: Any = config
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    """Remove one entry of the config."""

    def change(config: dict[str, Any]) -> None:
        place: Any = config
        for part in path[:-1]:
            place = place[part]
        del place[path[-1]]

    return change


def twice(config: dict[str, Any]) -> None:
    config["attn_swap"]["swaps"].append(copy.deepcopy(config["attn_swap"]["swaps"][0]))


BLOCK, SWAP = ("attn_swap",), ("attn_swap", "swaps", 0)
DAMAGE: dict[str, tuple[Change, str]] = {
    "empty": (put(*BLOCK, value={}), "must have exactly"),
    "a list": (put(*BLOCK, value=[]), "must have exactly"),
    "false": (put(*BLOCK, value=False), "must have exactly"),
    "extra key": (put(*BLOCK, "code", value="print(1)"), "must have exactly"),
    "newer": (put(*BLOCK, "version", value=2), "newer hf_attn_swap"),
    "version 0": (put(*BLOCK, "version", value=0), "version must be 1"),
    "version true": (put(*BLOCK, "version", value=True), "version must be 1"),
    **{f"without {key}": (drop(*BLOCK, key), "must have exactly") for key in ("version", "modules", "swaps")},
    **{f"no {key}": (drop(*SWAP, key), "must have exactly") for key in ("variant", "layers", "options", "strength")},
    "modules 0": (put(*BLOCK, "modules", value=0), "modules must be"),
    "modules huge": (put(*BLOCK, "modules", value=10**30), "modules must be"),
    "modules of another model": (put(*BLOCK, "modules", value=99), "another model"),
    "swaps empty": (put(*BLOCK, "swaps", value=[]), "swaps must be"),
    "swaps a mapping": (put(*BLOCK, "swaps", value={"0": {}}), "swaps must be"),
    "swaps of null": (put(*BLOCK, "swaps", value=[None]), "must have exactly"),
    "swap twice": (twice, "swapped twice"),
    "swaps too many": (put(*BLOCK, "swaps", value=[None] * 50), "swaps must be"),
    "layers empty": (put(*SWAP, "layers", value=[]), "layers must be"),
    "layers text": (put(*SWAP, "layers", value="012"), "layers must be"),
    "layers true": (put(*SWAP, "layers", value=[True]), "layers must be"),
    "layers negative": (put(*SWAP, "layers", value=[-1]), "layers must be"),
    "layers too high": (put(*SWAP, "layers", value=[3]), "layers must be"),
    "layers repeated": (put(*SWAP, "layers", value=[0, 0]), "swapped twice"),
    "variant null": (put(*SWAP, "variant", value=None), "variant must be a name"),
    "variant a list": (put(*SWAP, "variant", value=["gated"]), "variant must be a name"),
    "variant unknown": (put(*SWAP, "variant", value="flash"), "unknown variant"),
    "variant code": (put(*SWAP, "variant", value="__import__('os').abort()"), "unknown variant"),
    "variant long": (put(*SWAP, "variant", value="+".join(["gated"] * 50)), "both change the read"),
    "options null": (put(*SWAP, "options", value=None), "must have exactly"),
    "options flat": (put(*SWAP, "options", value={"kind": "linear"}), "must have exactly"),
    "options foreign": (put(*SWAP, "options", "belief", value={}), "must have exactly"),
    "options a list": (put(*SWAP, "options", "gated", value=[1]), "options of gated must be a dict"),
    "option unknown": (put(*SWAP, "options", "gated", "depth", value=3), "gated: unknown option 'depth'"),
    "option of another type": (put(*SWAP, "options", "gated", "pi_init", value="0.25"), "pi_init must be"),
    "option a mapping": (put(*SWAP, "options", "gated", "kind", value={"a": 1}), "kind must be"),
    "option out of range": (put(*SWAP, "options", "gated", "pi_init", value=1.5), "between 0 and 1"),
    "option not a number": (put(*SWAP, "options", "gated", "pi_init", value=math.nan), "pi_init must be"),
    "strength text": (put(*SWAP, "strength", value="1"), "strength must be"),
    "strength true": (put(*SWAP, "strength", value=True), "strength must be"),
    "strength null": (put(*SWAP, "strength", value=None), "strength must be"),
    "strength above 1": (put(*SWAP, "strength", value=1.5), "strength must be"),
    "strength negative": (put(*SWAP, "strength", value=-0.1), "strength must be"),
    "strength not a number": (put(*SWAP, "strength", value=math.nan), "strength must be"),
    **{
        f"{name} of an earlier version": (put(*SWAP, name, value=value), f"earlier version .*{name}.* cannot run")
        for name, value in (("neutral_start", 10), ("head_order", [1, 0]), ("head_order", None))
    },
    **{
        f"retrained {value!r}": (put(*SWAP, "retrained", value=value), "retrained must be true or absent")
        for value in (False, None, 1, "yes")
    },
    **{
        f"value scale {value!r}": (put(*SWAP, "value_scale", value=value), "value_scale must be true")
        for value in (False, None, 1, True)  # the swap is of a variant that does not project
    },
    "another attention": (put("attn_implementation", value="sdpa"), "cannot run with"),
    "no attention": (drop("attn_implementation"), "cannot run with"),
}
