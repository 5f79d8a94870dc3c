"""Chooses the form of a variant that `export` can write for other programs, for `convert(..., target="engine")`.

Classes of transformers have one window for all heads of a layer, and sinks whose scores do not depend on the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layer.registry import canonical_keys, parse
from ..variants.outeffhop import OutEffHop
from ..variants.sink import Sink
from ..variants.softmax import Softmax
from ..variants.window import Window

ENGINE = "engine"
SCORES = ("score", "score_value")  # kinds of `sink` that leave


def engine_form(variant: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The variant and its options in the form that leaves.

    A window has no first tokens, and a sink beside it takes their place. A sink has a score and a value.

    Args:
        variant: the name that the user gave.
        options: the options that the user gave, as `patch_model` takes them.

    Raises:
        ValueError: the variant, or an option, cannot leave.
    """
    classes = parse(variant)
    if others := [cls.name for cls in classes if cls not in (Softmax, OutEffHop, Sink, Window)]:
        raise ValueError(
            f"target={ENGINE!r}: no class of transformers computes {'+'.join(others)}; leave target out, and see which "
            "variants the plugin for vLLM runs."
        )
    given = canonical_keys(options) if len(classes) > 1 else {classes[0].name: dict(options)}
    names = [cls.name for cls in classes]
    if Window in classes:
        window = given.setdefault(Window.name, {})
        if window.setdefault("sinks", 0) or window.get("full_heads"):
            raise ValueError(
                f"target={ENGINE!r}: a window has no first tokens and is the same in all heads of a layer; leave out "
                "sinks and full_heads (keep= leaves whole layers as they are)."
            )
        if not {Sink, OutEffHop} & set(classes):
            names.insert(0, Sink.name)
    if Sink.name in names and given.setdefault(Sink.name, {}).setdefault("kind", SCORES[1]) not in SCORES:
        raise ValueError(f"target={ENGINE!r}: the kind of a sink is {' or '.join(map(repr, SCORES))}.")
    if len(names) == 1:
        return names[0], given[names[0]]
    return "+".join(names), {name: chosen for name, chosen in given.items() if chosen}
