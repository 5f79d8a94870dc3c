"""Damage to the config of a saved model: the place, values that must not stand there, and words of the error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any]], Any]
Place = tuple[str | int, ...]


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


HUGE, LONG = 10**400, "a" * 10_000
NUMBERS = (None, True, -1, HUGE, -HUGE, "1", "x", [], {}, math.nan, math.inf)
TEXTS = (None, True, 0, "x", LONG, "../../etc/passwd", "os.system", "__import__('os').abort()", "antigravity", [], {})
KEYS = "must have exactly"
BLOCK, SWAP = ("attn_swap",), ("attn_swap", "swaps", 0)
GATED = (*SWAP, "options", "gated")
SAME_LAYER = {"variant": "belief", "layers": [0], "options": {"belief": {}}, "strength": 1.0}
WRONG: dict[Place, tuple[str, tuple[Any, ...]]] = {
    BLOCK: (KEYS, (True, False, 0, "x", [], {}, [1], {"version": 1}, {"__class__": "os.system"})),
    (*BLOCK, "code"): (KEYS, ("print(1)",)),
    (*BLOCK, "version"): ("version must be 1|newer hf_attn_swap", (*NUMBERS, 0, 2, 1.0)),
    (*BLOCK, "modules"): ("modules must be|another model|layers must be", (*NUMBERS, 0, 2, 4, 3.0, 10**9)),
    (*BLOCK, "swaps"): (f"swaps must be|{KEYS}", (None, 0, "x", {}, [], [None], [[]], ["belief"], [{}], [None] * 50)),
    (*BLOCK, "swaps", 1): ("swapped twice", (SAME_LAYER,)),
    (*SWAP, "variant"): (
        "variant must be a name|unknown variant|both change|composes with nothing",
        (*TEXTS, "", "belief+belief", "softmax+belief", "+", "outeffhop+", "+".join(["gated"] * 50)),
    ),
    (*SWAP, "layers"): ("layers must be", (None, 0, "0-2", {}, [], [None], [True], ["0"], [0.0], [-1], [3], [HUGE])),
    (*SWAP, "layers", 0): ("swapped twice", (1,)),
    (*SWAP, "modules"): ("modules must be a pattern", (None, True, 0, "", LONG, [], {})),
    (*SWAP, "strength"): ("strength must be", (*NUMBERS, 2, 1.5, -0.1)),
    (*SWAP, "options"): (KEYS, (None, 0, "x", [], {}, {"gated": {}}, {"kind": "linear"}, {"os.system": {}})),
    (*SWAP, "options", "belief"): (KEYS, ({},)),
    GATED: ("must be a dict|unknown option|kind must be", (None, 0, "x", [], [1], {"__class__": "x"}, {"kind": {}})),
    (*GATED, "kind"): ("kind must be", (*TEXTS, "")),
    (*GATED, "pi_init"): ("pi_init must", (*NUMBERS, 2, 1.5)),
    (*SWAP, "retrained"): ("retrained must be true", (False, None, 1, "yes")),
    (*SWAP, "value_scale"): ("value_scale must be true", (False, None, 1, True)),  # the swap does not project
    (*SWAP, "neutral_start"): ("earlier version .*neutral_start.* cannot run", (10,)),
    (*SWAP, "head_order"): ("earlier version .*head_order.* cannot run", ([1, 0], None)),
    (*BLOCK, "files"): (
        f"files must be a dict|{KEYS}|is not known here|knows another variant",
        (None, 0, "x", [], {"x": 1}, {"flash": {"file": LONG, "sha256": 0}}, {"gated": {"file": [], "sha256": {}}}),
    ),
    ("attn_implementation",): ("cannot run with", ("sdpa",)),
}
LEFT_OUT: dict[Place, str] = {
    **{(*BLOCK, key): KEYS for key in ("version", "modules", "swaps")},
    **{(*SWAP, key): KEYS for key in ("variant", "layers", "options", "strength")},
    ("attn_implementation",): "cannot run with",
}
DAMAGE: dict[str, tuple[Change, str]] = {  # a few, for tests of another way to load
    "newer": (put(*BLOCK, "version", value=2), "newer hf_attn_swap"),
    "variant unknown": (put(*SWAP, "variant", value="flash"), "unknown variant"),
}
