"""The table of what the papers say beside what the recorded runs measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.text.table import markdown

from .stanhop import found_in_table_1, found_in_table_2, measured_size


@dataclass(frozen=True)
class Claim:
    """A figure of a paper, and the runs beside it: labels to names of runs.

    Attributes:
        paper: the paper and its table.
        says: the figure.
        runs: the runs that measured it.
        scale: the size and budget of the runs, and of the paper's.
        found: for a study with a record of its own, what it measured, in words; there are no runs then.
    """

    paper: str
    says: str
    runs: Mapping[str, str]
    scale: str
    found: Callable[[], str] | None = None


def layers(count: int) -> str:
    """In words."""
    return f"{count} layer{'s' if count > 1 else ''}"


CLAIMS = (
    Claim(
        "SimpleTRON, Table 1",
        "ListOps, accuracy, the best of five seeds: softmax 36.37, `simpletron` 37.45, `simpletron_res` 37.10, "
        "`simpletron_resl` 37.55",
        {
            f"simpletron{end}": f"bert-small-lra-listops-simpletron{end.replace('_', '-')}"
            for end in ("", "_res", "_resl")
        },
        "2 layers of width 64, 100 to 300 tokens, 600 steps (there: 6 of width 512, 500 to 2,000 tokens, 15,000)",
    ),
    Claim(
        "SimpleTRON, Table 1",
        "IMDB, bytes, accuracy, the best of five seeds: softmax 64.27, `simpletron` 66.75, `simpletron_res` 66.65, "
        "`simpletron_resl` 66.71",
        {f"simpletron{end}": f"bert-small-lra-text-simpletron{end.replace('_', '-')}" for end in ("", "_res", "_resl")}
        | {f"simpletron_resl, {length} bytes": f"bert-small-lra-text-{length}-simpletron-resl" for length in (64, 256)},
        "2 layers of width 64, 128 bytes, 2,000 steps of 32 (there: 4 of width 256, 4,000 bytes, 20,000 of 32)",
    ),
    Claim(
        "SimpleTRON, section 4",
        "AG News from scratch, `simpletron_resl` (softmax): 1 layer 90.90 (89.12), 2: 90.32 (90.38), 4: 90.41 (90.66), "
        "8: 89.98 (90.68)",
        {layers(depth): f"bert-scratch-{depth}-layers-ag-news-simpletron-resl" for depth in (1, 2, 4, 8)},
        "width 256, 4,000 rows, two epochs",
    ),
    Claim(
        "SimpleTRON, section 4",
        "AG News from BERT's weights, `simpletron_resl` (softmax): 6 layers 92.30 (92.70), 12: 92.70 (94.20)",
        {layers(depth): f"minilm-{depth}-layers-ag-news-simpletron-resl" for depth in (1, 2, 4)}
        | {"6 layers": "minilm-ag-news-simpletron-resl"},
        "MiniLM, 6,000 rows, one epoch (fewer layers: 4,000 rows, two epochs)",
    ),
    Claim(
        "Modern Hopfield attention, Tables 1 and 2",
        "perplexity from scratch, `modern_hopfield` (softmax): GPT-2 20.70 (22.87), LLaMA 14.29 (14.49)",
        {name: f"{name}-bytes-wikitext2-modern-hopfield" for name in ("gpt2", "opt", "llama")},
        "3 layers of width 96, 0.8 million bytes of WikiText-2, perplexity per byte (there: WikiText-103 and more)",
    ),
    Claim(
        "Modern Hopfield attention, Table 3",
        "CIFAR-10, ViT-Tiny, `modern_hopfield` (softmax): 93.02 (93.27) at α = 0.5, 93.78 at α = 0.7",
        {"modern_hopfield": "vit-scratch-cifar10-modern-hopfield"},
        "4 layers of width 96, 10,000 images, two epochs",
    ),
    Claim(
        "Modern Hopfield attention, Table 7",
        "CIFAR-10 without residual connections, `modern_hopfield` (softmax): 1 layer 65.4 (55.1), 2: 79.8 (63.7), "
        "4: 85.7 (57.4), 8: 80.3 (48.6), 12: 10 (10)",
        {layers(depth): f"vit-skip-free-{depth}-layers-cifar10-modern-hopfield" for depth in (1, 2, 4, 8, 12)}
        | {
            f"α = 0, {layers(depth)}": f"vit-skip-free-{depth}-layers-cifar10-modern-hopfield-alpha-0"
            for depth in (1, 2, 4, 8, 12)
        },
        "width 96, 10,000 images, two epochs (there: ViT-Tiny)",
    ),
    Claim(
        "OutEffHop, Figure 7",
        "CIFAR-10, ViT, 100 epochs: `outeffhop` converges faster and to more accuracy than its original counterpart",
        {"outeffhop": "vit-scratch-cifar10-outeffhop"},
        "4 layers of width 96, 10,000 images, two epochs",
    ),
    Claim(
        "BeliefFormer, Table 3",
        "CIFAR-10, ViT-Small: softmax 88.15 ± 0.55, `belief` 89.14 ± 0.17, `belief_star` 88.64 ± 0.08",
        {name: f"vit-scratch-cifar10-{name.replace('_', '-')}" for name in ("belief", "belief_star")},
        "4 layers of width 96, 10,000 images, two epochs (there: 400)",
    ),
    Claim(
        "BeliefFormer, section 5.2",
        "GPT-2 on 5 billion tokens: `belief_star` clearly better, `belief` slightly",
        {
            f"{name}, {shape}": f"{shape}-bytes-wikitext2-{name.replace('_', '-')}"
            for shape in ("gpt2", "opt", "llama")
            for name in ("belief", "belief_star")
        },
        "3 layers of width 96, 0.8 million bytes, perplexity per byte",
    ),
    Claim(
        "OutEffHop, Table 2",
        "ETTh1, MSE, `outeffhop` (softmax): 24 hours 0.361 (0.360), 720 hours 0.894 (0.852); `sparsemax` 0.388 "
        "and 1.134",
        {
            f"{name}, {hours} hours": f"patchtst-{hours}-hours-etth1-{run}"
            for name, run in (("outeffhop", "outeffhop"), ("sparsemax", "sparsemax"))
            for hours in (24, 720)
        },
        "PatchTST of width 16, 200 steps (there: STanHop-Net)",
    ),
    Claim(
        "OutEffHop, Table 1, STanHop-Net",
        "ETTh1, kurtosis / largest activation / MSE / MSE in 8 bits: softmax 2.954 / 5.048 / 0.360 / 0.362, "
        "`outeffhop` 2.897 / 4.565 / 0.360 / 0.355, `clipped_softmax` 2.995 / 4.890 / 0.553 / 0.591, "
        "`outeffhop+clipped_softmax` 2.864 / 4.145 / 0.506 / 0.517, `gated` 2.487 / 4.277 / 0.380 / 0.375, "
        "`outeffhop+gated` 2.459 / 4.240 / 0.376 / 0.367",
        {},
        f"{measured_size()} (there: 35 million parameters)",
        found_in_table_1,
    ),
    Claim(
        "OutEffHop, Table 2, STanHop-Net",
        "ETTh1, 24 hours, MSE / kurtosis / largest activation: softmax 0.360 / 2.954 / 5.048, `sparsemax` 0.388 / "
        "3.311 / 4.954, `generalized_sparse` 0.395 / 3.269 / 4.947, `outeffhop` 0.361 / 2.897 / 4.565",
        {},
        f"{measured_size()} (there: 35 million parameters)",
        found_in_table_2,
    ),
)


def claims_table(runs: Mapping[str, RunResult], *, mark: str = "") -> str:
    """One row per claim; per run the swapped model's figure and the control's, * as `_clear` says.

    Args:
        runs: the recorded ones, by name; what is missing is said to be.
        mark: what stands behind a run of one seed.
    """
    rows = []
    for claim in CLAIMS:
        if claim.found is not None:
            rows.append((claim.paper, claim.says, claim.found(), claim.scale))
            continue
        known = {label: runs[name] for label, name in claim.runs.items() if name in runs}
        found = "; ".join(f"{label} {_beside(run)}{_alone(run, mark)}" for label, run in known.items())
        if len(known) < len(claim.runs):
            found += "; the rest not measured yet" if known else "not measured yet"
        rows.append((claim.paper, claim.says, found, claim.scale))
    return markdown(("paper", "it says", "measured, swapped (softmax)", "scale"), rows)


def _beside(run: RunResult) -> str:
    assert run.control is not None
    ours, theirs = run.converted.metrics[0], run.control.metrics[0]
    unit, digits = (100, 1) if ours.higher_is_better else (1, 3)
    return f"{unit * ours.mean:.{digits}f} ({unit * theirs.mean:.{digits}f}){' *' if _clear(run) else ''}"


def _alone(run: RunResult, mark: str) -> str:
    """The mark, if the run has one seed."""
    return f" {mark}" if mark and len(run.converted.seeds) == 1 else ""


def _clear(run: RunResult) -> bool:
    """The interval of the difference leaves 0 out, and all seeds agree on its sign."""
    assert run.control is not None
    pairs = zip(run.converted.metrics[0].values, run.control.metrics[0].values, strict=True)
    signs = {(ours > theirs) - (ours < theirs) for ours, theirs in pairs}
    return run.difference is not None and not run.difference.low <= 0 <= run.difference.high and len(signs) == 1
