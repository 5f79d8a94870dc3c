r"""BeliefFormer's Figure 3 of any model: the lengths of MH W_o and of Δ W_o of one pass, and their angles.

    python recipes/belief_geometry.py MODEL data/test.parquet --length 256 --rows 4 --draw geometry.png

MH are the heads of a layer, and Δ is what `belief` leaves of them (eq. 10). Both are of the same pass, which is that of
the model as it came: one of stock attention, or a converted one. The table has a row per layer: the mean length of
MH W_o and of Δ W_o over the tokens, the share of tokens whose Δ W_o is the shorter one, the mean angles of both with
the layer's input X, and the mean angle between MH and Δ, in degrees. Biases are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

import torch
from as_patched import CAUSAL, rows_of
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_attn_swap.analysis.metrics import update_geometry
from hf_attn_swap.conversion.calibrate import output_matrix
from hf_attn_swap.functional import belief_projection
from hf_attn_swap.measuring.instrumented import instrumented
from hf_attn_swap.patch import need_installation
from hf_attn_swap.text.table import markdown

HEADER = ("layer", "MH W_o", "Δ W_o", "shorter", "∠(MH W_o, X)", "∠(Δ W_o, X)", "∠(MH, Δ)")
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def geometry(model: Any, rows: list[dict[str, Tensor]]) -> list[Layer]:
    """Per layer, over all tokens (N): both lengths, and the three angles in degrees."""
    seen: list[list[Layer]] = []

    def watch(place: int, layer: Any) -> Any:
        matrix = output_matrix(layer.site.container.get_submodule(layer.site.family.output))[0]

        def before(swap: Any, args: tuple[Any, ...]) -> None:
            call = args[1]

            def probe(name: str, heads_BLHD: Tensor) -> Tensor:
                if name == "context":
                    delta = belief_projection(heads_BLHD, call.own_values(heads_BLHD.shape[2]))
                    mh, rest = heads_BLHD.flatten(2), delta.flatten(2)
                    (long, wide), (short, narrow) = (update_geometry(call.x, part @ matrix) for part in (mh, rest))
                    between = update_geometry(mh, rest)[1]
                    seen[place].append((long, short, *(180 / math.pi * angle for angle in (wide, narrow, between))))
                return heads_BLHD

            call.probe = probe

        return before

    with instrumented(model) as root, contextlib.ExitStack() as hooks:
        for place, layer in enumerate(need_installation(root).layers()):
            seen.append([])
            hooks.callback(layer.swap.register_forward_pre_hook(watch(place, layer)).remove)
        for row in rows:
            root(**row)
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in seen]  # type: ignore[misc]  # five of them


def table(layers: list[Layer]) -> str:
    """One row per layer, in Markdown."""
    rows = []
    for number, (long, short, *angles) in enumerate(layers):
        shorter = (short <= long).double().mean()
        means = [f"{angle.nanmean():.1f}" for angle in angles]
        rows.append((str(number), f"{long.mean():.4g}", f"{short.mean():.4g}", f"{shorter:.1%}", *means))
    return markdown(HEADER, rows)


def draw(layers: list[Layer]) -> Figure:
    """Lengths and angles with X over the layers, as in the paper; and the angle between MH and Δ as violins."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    lengths, angles, between = figure.subplots(1, 3)
    places = range(len(layers))
    for panel, pairs, title in ((lengths, (0, 1), "length"), (angles, (2, 3), "angle with X (degrees)")):
        for index, label in zip(pairs, ("MH W_o", "Δ W_o"), strict=True):
            panel.plot(places, [float(layer[index].nanmean()) for layer in layers], ".-", label=label)
        panel.set(xlabel="layer", title=title)
        panel.legend()
    lengths.set_yscale("log")
    between.violinplot([layer[4][~layer[4].isnan()].tolist() or [0.0] for layer in layers], list(places))
    between.set(xlabel="layer", title="angle of MH and Δ (degrees)")
    return figure


def main() -> None:
    """Print the table, and draw the figure."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="Name on the Hub, or folder.")
    parser.add_argument("data", help="A parquet file.")
    parser.add_argument("--column", default="text", help="The column of texts, token ids or images.")
    parser.add_argument("--length", type=int, default=256, help="Tokens per row.")
    parser.add_argument("--rows", type=int, default=4, help="Rows that are read.")
    parser.add_argument("--draw", help="A file for the picture.")
    arguments = parser.parse_args()
    classes = AutoConfig.from_pretrained(arguments.model).architectures or ()
    causal = any(name.endswith(CAUSAL) for name in classes)
    auto = AutoModelForCausalLM if causal else AutoModel
    model = auto.from_pretrained(arguments.model, dtype=torch.float32).eval()
    layers = geometry(model, rows_of(arguments, arguments.rows))
    print(table(layers))
    if arguments.draw:
        draw(layers).savefig(arguments.draw, dpi=150)


if __name__ == "__main__":
    main()
