"""The table of what the papers say beside what the recorded runs measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.text.table import markdown

from .simpletron import PAPER, SERIES, accuracies, deviations
from .speed import FIGURES
from .stanhop import found_in_table_1, found_in_table_2, measured_size

MEASURED_DEPTHS = (1, 2, 4, 6, 8, 12)
# Of the best control of a claim: a run whose own control is below this did not train, and compares nothing.
TRAINED = 0.6
BERT = 109.5e6  # the parameters of BERT-base
OF_PAPER = (("DeiT-S", 384, 22.2e6), ("nanoGPT", 768, 123.5e6))  # 12 layers of a width, and all parameters


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


def overhead() -> str:
    """The time above stock's of a forward pass and of a training step by shape, from `bench.py`; and the parameters."""
    rows = json.loads((FIGURES / "bench-bert.json").read_text("utf-8"))["rows"]
    parts = []
    for name, parameters in (("belief", 0), ("belief_star", 12 * 768 * 768)):
        forward, training = (
            " / ".join(f"{100 * (row[kind] - 1):.1f}" for row in rows if row["variant"] == name)
            for kind in ("forward", "train")
        )
        added = "no parameters"
        if parameters:
            at_size = ", ".join(f"{100 * 12 * width**2 / whole:.1f} % of {name}" for name, width, whole in OF_PAPER)
            added = f"{100 * parameters / BERT:.1f} % parameters; at the paper's own sizes {at_size}"
        parts.append(f"`{name}` {forward} % (forward), {training} % (training), {added}")
    return "; ".join(parts)


def layers(count: int) -> str:
    """In words."""
    return f"{count} layer{'s' if count > 1 else ''}"


CLAIMS = (
    Claim(
        "SimpleTRON, Table 1",
        "ListOps, accuracy: softmax 36.37 (taken from the LRA benchmark), `simpletron` 37.45 (the best of five "
        "trainings; their mean is 37.15), `simpletron_res` 37.10, `simpletron_resl` 37.55",
        {
            f"simpletron{end}": f"bert-small-lra-listops-simpletron{end.replace('_', '-')}"
            for end in ("", "_res", "_resl")
        },
        "2 layers of width 64, 100 to 300 tokens, 600 steps (there: 6 of width 512, 500 to 2,000 tokens, 15,000)",
    ),
    Claim(
        "SimpleTRON, Table 1",
        "IMDB, bytes, accuracy: softmax 64.27 (taken from the LRA benchmark), `simpletron` 66.75 (the best of five "
        "trainings; their mean is 66.61), `simpletron_res` 66.65, `simpletron_resl` 66.71",
        {f"simpletron{end}": f"bert-small-lra-text-simpletron{end.replace('_', '-')}" for end in ("", "_res", "_resl")}
        | {f"simpletron_resl, {length} bytes": f"bert-small-lra-text-{length}-simpletron-resl" for length in (64, 256)},
        "2 layers of width 64, 128 bytes, 2,000 steps of 32 (there: 4 of width 256, 4,000 bytes, 20,000 of 32)",
    ),
    Claim(
        "SimpleTRON, section 4",
        "AG News from scratch, `simpletron_resl` (softmax): "
        + ", ".join(f"{layers(blocks)} {simple:.2f} ({bert:.2f})" for blocks, (bert, simple) in PAPER.items()),
        {layers(depth): SERIES.format(depth) for depth in MEASURED_DEPTHS},
        "width 64, 32 tokens, 400 steps of 32 (there: BERT-base's width)",
    ),
    Claim(
        "SimpleTRON, Figure 3",
        "8 blocks on a text: with a linear layer and no skip inside they do not train; without the linear layer, or "
        "with the skip, they do",
        {},
        "width 64, AG News, 400 steps of 32, one seed (there: LRA's texts)",
        accuracies,
    ),
    Claim(
        "SimpleTRON, Figure 5",
        "the skip raises the deviation of q kᵀ v in deep blocks, and so lets them train",
        {},
        "the same runs, at the end",
        deviations,
    ),
    Claim(
        "SimpleTRON, section 4",
        "AG News from BERT's weights, `simpletron_resl` (softmax): 6 layers 92.30 (92.70), 12: 92.70 (94.20)",
        {layers(depth): f"minilm-{depth}-layers-ag-news-simpletron-resl" for depth in (1, 2, 4)}
        | {"6 layers": "minilm-ag-news-simpletron-resl"},
        "MiniLM, 6,000 rows, one epoch (fewer layers: 4,000 rows, two epochs)",
    ),
    Claim(
        "SimpleTRON, section 4 and Figure 2 (c)",
        "queries, keys and values trained under `simpletron`, frozen and put back under softmax: the rest retrained "
        "reaches the vanilla Transformer",
        {
            "from scratch": "bert-scratch-2-layers-ag-news-softmax-from-simpletron-resl",
            "MiniLM": "minilm-ag-news-softmax-from-simpletron-resl",
        },
        "AG News: two layers of width 64 from scratch, and MiniLM's weights; the control is softmax with its own "
        "random or pretrained queries, keys and values frozen (there: the LRA benchmark from scratch)",
    ),
    Claim(
        "Modern Hopfield attention, Table 6",
        "CIFAR-100, ViT-T, one of α and α′ moved from 0.5: 72.13 at 0.5 and 0.5, α′ = 0 71.16, α = 0 69.89",
        {
            "0.5 and 0.5": "minilm-ag-news-modern-hopfield",
            "α = 0": "minilm-ag-news-modern-hopfield-0",
            "α′ = 0": "minilm-ag-news-modern-hopfield-1",
            "0.25 and 0.25": "minilm-ag-news-modern-hopfield-2",
            "0.75 and 0.75": "minilm-ag-news-modern-hopfield-3",
        },
        "MiniLM's weights on AG News, one epoch (there: from scratch)",
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
        "BeliefFormer, Tables 1 and 2",
        "more time than softmax: `belief` 1.3 % (evaluation, ViT) and 3.6 % (training, GPT-2), `belief_star` 3.8 % and "
        "9.1 %; more parameters: none, and 8.1 % and 5.7 %",
        {},
        "two layers of BERT-base on a CPU, 8 × 128 / 2 × 512 / 1 × 2,048 tokens; parameters of all twelve layers "
        "beside 109.5 million (there: whole models on one GPU)",
        overhead,
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
        result = "; ".join(
            f"{label} {_beside(run)}{_sign(run, known.values())}{_alone(run, mark)}" for label, run in known.items()
        )
        if len(known) < len(claim.runs):
            result += "; the rest not measured yet" if known else "not measured yet"
        rows.append((claim.paper, claim.says, result, claim.scale))
    return markdown(("paper", "it says", "measured, swapped (softmax)", "scale"), rows)


def _beside(run: RunResult) -> str:
    assert run.control is not None
    ours, theirs = run.converted.metrics[0], run.control.metrics[0]
    unit, digits = (100, 1) if ours.higher_is_better else (1, 3)
    return f"{unit * ours.mean:.{digits}f} ({unit * theirs.mean:.{digits}f})"


def _trained(run: RunResult, others: Iterable[RunResult]) -> bool:
    """False if the control reached far less than the controls of the other runs of the same claim."""
    if run.control is None or not run.control.metrics[0].higher_is_better:
        return True
    best = max(other.control.metrics[0].mean for other in others if other.control is not None)
    return run.control.metrics[0].mean >= TRAINED * best


def _sign(run: RunResult, others: Iterable[RunResult]) -> str:
    """What stands behind the figures: * as `_clear` says, or that they compare nothing."""
    if not _trained(run, others):
        return " (no test: the control did not train)"
    return " *" if _clear(run) else ""


def _alone(run: RunResult, mark: str) -> str:
    """The mark, if the run has one seed."""
    return f" {mark}" if mark and len(run.converted.seeds) == 1 else ""


def _clear(run: RunResult) -> bool:
    """The interval of the difference leaves 0 out, and all seeds agree on its sign."""
    assert run.control is not None
    pairs = zip(run.converted.metrics[0].values, run.control.metrics[0].values, strict=True)
    signs = {(ours > theirs) - (ours < theirs) for ours, theirs in pairs}
    return run.difference is not None and not run.difference.low <= 0 <= run.difference.high and len(signs) == 1


MEASURED, AGAINST, NOT_MEASURED, NO_FIGURES = "measured", "measured, against the paper", "not measured", "no figures"
HERE, OUTLIERS, SCRATCH, MEMORY, DYNAMICS = "", "outliers.md", "scratch.md", "memory.md", "dynamics.md"
SPEED, THEOREMS, LIMITS = "speed.md", "memory.md#theorems", "dynamics.md#theorems"
SIMPLE = "scratch.md#simpletrons-blocks"
PAIRS, RESIDUALS = "outliers.md#pairs-of-tokens", "outliers.md#theorem-52"
LARGE = "needs a GPU: the sizes of the paper"

# Every table and figure of the papers, and their theorems: what it shows, its status, and where its figures are, or why
# there are none.
COVERAGE: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "SimpleTRON": (
        ("Section 3", "the layer is of degree 3 in its input, as a test", MEASURED, SIMPLE),
        ("Table 1", "Long Range Arena: ListOps and text in small; matching not", MEASURED, HERE),
        ("Figure 1", "the layer", NO_FIGURES, ""),
        ("Figure 2 (a, b)", "curves of ListOps and matching: `recipes/deviation.py --recipe lra`", NOT_MEASURED, LARGE),
        (
            "Figure 2 (c)",
            "frozen queries, keys and values back under softmax: from scratch so, from MiniLM's weights not",
            MEASURED,
            SIMPLE,
        ),
        ("Figure 3", "training curves of 8 blocks, in small", AGAINST, SIMPLE),
        ("Figure 4", "the block with two skips", NO_FIGURES, ""),
        ("Figure 5", "deviation of the heads over the training, in small", AGAINST, SIMPLE),
        ("Section 4", "1 / √L, and the share of frozen weights, as tests", MEASURED, SIMPLE),
        ("Section 4", "AG News by depth, from scratch and from BERT", AGAINST, HERE),
        ("Section 4", "memory", MEASURED, SPEED),
    ),
    "Modern Hopfield attention": (
        ("Tables 1 and 2", "perplexity of GPT-2 and LLaMA, in small", MEASURED, HERE),
        ("Table 3", "ViT on CIFAR-10, in small; CIFAR-100 and others not", MEASURED, HERE),
        ("Table 4", "ViT-B on ImageNet-1K", NOT_MEASURED, LARGE),
        ("Table 5", "transfer of ViT from ImageNet-1K", NOT_MEASURED, LARGE),
        ("Table 6", "one of α and α′ moved; on pretrained weights", AGAINST, HERE),
        ("Table 7", "depth without residual connections, in small", AGAINST, HERE),
        ("Table 8", "rank collapse at the start", MEASURED, OUTLIERS),
        ("Tables 9 and 10", "settings: configurations `hopfield_gpt2`, `hopfield_vit_tiny` and others", NO_FIGURES, ""),
        ("Figure 1", "the layer", NO_FIGURES, ""),
        (
            "Figures 2 and 6 to 14",
            "cosines of pairs of tokens over the layers: pretrained models, nothing trained",
            AGAINST,
            PAIRS,
        ),
        ("Figures 3 to 5", "discretisations: the backward ones have no forward pass", NO_FIGURES, ""),
        (
            "Figures 15 to 22",
            "attention entropy over the layers: violins per layer, a dot per head, of pretrained models",
            MEASURED,
            PAIRS,
        ),
        ("Theorem 5.1", "double exponential decay without carried scores, as a test", MEASURED, RESIDUALS),
        ("Theorem 5.2", "the bound with carried scores, as a test; its power is another one", AGAINST, RESIDUALS),
        ("Lemmas D.1 and D.2", "the residual after one layer, as tests and in Table 8's ViT-T", MEASURED, RESIDUALS),
    ),
    "BeliefFormer": (
        ("Table 1", "parameters and time of ViT: here those of BERT-base", MEASURED, HERE),
        ("Table 2", "parameters and time of GPT-2: here those of BERT-base", MEASURED, HERE),
        ("Table 3", "ViT-Small on CIFAR-10, in small", MEASURED, HERE),
        ("Table 4", "repositories that were used", NO_FIGURES, ""),
        ("Figures 1 and 2", "the projection, and its code", NO_FIGURES, ""),
        ("Figure 3", "norms and angles of Δ W_o beside MH W_o, by `recipes/belief_geometry.py`", MEASURED, OUTLIERS),
        ("Figure 4", "ViT on ImageNet", NOT_MEASURED, LARGE),
        ("Figure 5", "GPT-2 on 5 billion tokens, in small", MEASURED, HERE),
    ),
    "OutEffHop": (
        (
            "Table 1",
            "outliers and 8 bits: STanHop-Net; BERT, OPT and ViT as conversions; from scratch by "
            "`recipes/table_1.py`, where OPT alone was run",
            MEASURED,
            HERE,
        ),
        ("Table 2", "STanHop-Net on ETTh1 at two horizons; other data not", MEASURED, HERE),
        ("Table 3", "the settings of Figure 7", NO_FIGURES, ""),
        ("Table 4", "resources of the trainings", NOT_MEASURED, LARGE),
        ("Figure 1", "an outlier, drawn", NO_FIGURES, ""),
        (
            "Figures 2 to 4",
            "largest norm over the training, of a small OPT: `OutlierCallback` logs it, `recipes/table_1.py` draws it",
            MEASURED,
            "outliers.md#while-a-small-opt-trains",
        ),
        ("Figure 5", "capacity of memories, and bags", AGAINST, MEMORY),
        ("Figure 6", "memories under noise", AGAINST, MEMORY),
        ("Figure 7", "ViT on CIFAR-10, in small", MEASURED, HERE),
        ("Remarks 2.1 and 2.3", "one slot per kind of outlier: `outeffhop` with `n`, as a test", MEASURED, THEOREMS),
        ("Lemma 2.1, Theorem 3.1", "the energy falls, the retrieval converges, as tests", MEASURED, THEOREMS),
        ("Theorem 3.2", "the upper bound of the error: not lower for all queries", AGAINST, THEOREMS),
        ("Corollary 3.2.1", "where the error is the smaller one, as a test", MEASURED, THEOREMS),
        ("Theorem 3.3", "separated patterns are stored, as a test; the constants of the bound not", MEASURED, THEOREMS),
        ("Theorem 3.4", "its Lemmas C.6 and C.7, as tests; the constants of the bound not", MEASURED, THEOREMS),
        (
            "Section 5",
            "future work: outliers that norms make, by a penalty while MiniLM and ViT-S are fine-tuned",
            MEASURED,
            "outliers.md#fine-tuned-under-a-penalty",
        ),
    ),
    "Self-attention dynamics": (
        ("Table of section 1.1", "four limits, as tests", MEASURED, LIMITS),
        ("Theorems 1 and 2", "as tests, with their conditions and without", MEASURED, LIMITS),
        ("Figures 1 and 2", "Theorems 1 and 2 by `dynamics`", MEASURED, DYNAMICS),
        ("Figures 3 and 4", "one head of ALBERT-xlarge; heads of a small ALBERT and of MiniLM", AGAINST, DYNAMICS),
        ("Figures 5 and 6", "all heads: a small ALBERT and MiniLM", MEASURED, DYNAMICS),
        ("Section 2.1.2", "an embedded paragraph: MiniLM", MEASURED, DYNAMICS),
        ("Section 2.2", "heads and tokens with random weights: `dynamics sweep`", MEASURED, DYNAMICS),
        ("Proposition 1", "the largest eigenvalue of several heads, as a test", MEASURED, LIMITS),
        ("Section 4, eq. 3 to 7", "the published scheme is forward Euler, as a test", MEASURED, LIMITS),
    ),
}


def coverage_table() -> str:
    """One row per table, figure or theorem of the papers, and below them how many rows have each status."""
    rows, count = [], Counter[str]()
    for paper, items in COVERAGE.items():
        for item, shows, status, where in items:
            count[status] += 1
            place = f"[{where.partition('.md')[0]}]({where})" if ".md" in where else where
            rows.append((paper, item, shows, status, place or ("above" if status != NO_FIGURES else "")))
    words = ", ".join(f"{count[status]} {status}" for status in (MEASURED, AGAINST, NOT_MEASURED, NO_FIGURES))
    table = markdown(("paper", "table, figure or theorem", "shows", "status", "where"), rows)
    return f"{table}\n\n{len(rows)} rows: {words}."
