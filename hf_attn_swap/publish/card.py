"""Writes the model card of a run from its `results.json`, without a network, and one table of many runs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from ..text.table import markdown
from .results import RESULTS_FILE, SCRATCH, AppliedSwap, BaseModel, Metric, RunResult

TEMPLATE = Path(__file__).with_name("card_template.md.jinja")
PAPERS = Path(__file__).with_name("papers.bib")
BARE = """# {name}

A model whose attention was swapped by hf_attn_swap: {swaps}. No results were published with it.

It needs `pip install hf-attn-swap`. After `import hf_attn_swap`, load it as every model of Transformers, by
`from_pretrained("{repo_id}")`; without the import, Transformers refuses to load it rather than run another attention.
"""
TAG = "hf-attn-swap"
VARIANT_TAG = "attn-swap:"
SCRATCH_TAG = "from-scratch"
PLACEHOLDER_OWNER = "your-name"
RECALL = "recall_after_"  # begins the name of a metric; the number of tokens follows
COMMANDS_FILE = "commands.txt"
COLUMNS = (
    *("run", "base model", "attention", "layers", "strength", "data", "metric"),
    *("converted", "softmax control", "difference", "seeds", "cost"),
)


def render(result: RunResult, repo_id: str | None = None, commands: Sequence[str] = ()) -> str:
    """The model card of a run, as the text of its README.md.

    Args:
        result: the run.
        repo_id: the model's name on the Hub, for the lines that load the model; a placeholder if None.
        commands: the command that makes the model again and the command that publishes it, for a clone of the
            repository. A line that starts with # is a comment. Without commands, the card says nothing of them.

    Raises:
        ValueError: the package has no citation for a paper of the run.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _cell
    recipe, _, loader = result.base.auto_class.rpartition(".")
    papers = dict.fromkeys(component.paper for swap in result.swaps for component in swap.components)
    processor = None
    if "image" in result.task:
        processor = "AutoImageProcessor"
    elif result.language:
        processor = "AutoTokenizer"
    text: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        result=result,
        metadata=card_data(result).to_yaml(),
        repo_id=repo_id or f"{PLACEHOLDER_OWNER}/{result.name}",
        swaps=[(swap, layers_text(swap, result.modules)) for swap in result.swaps],
        metrics=_comparison(result, "metrics"),
        recalled=[metric.name for metric in result.converted.metrics if metric.name.startswith(RECALL)],
        outliers=_comparison(result, "outliers"),
        processor=processor,
        scratch=result.base.relation == SCRATCH,
        beside=_beside(result),
        base=_base(result.base),
        recipe=recipe,
        loader=loader,
        figure=number,
        commands=commands,
        citations=dict.fromkeys(entry for paper in papers for entry in bibtex(paper)),
    )
    return text


def commands_beside(results: str | Path) -> list[str]:
    """The lines of the file `commands.txt` beside a results.json; none if there is no such file."""
    path = Path(results).with_name(COMMANDS_FILE)
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def bare_card(swaps: Sequence[AppliedSwap], modules: int, repo_id: str) -> str:
    """The card of a model without results, which says what runs in the model and how to load the model."""
    variants = dict.fromkeys(VARIANT_TAG + swap.variant for swap in swaps)
    data = ModelCardData(library_name="transformers", tags=[TAG, *variants])
    words = "; ".join(
        f"**{swap.variant}** at strength {swap.strength:g} (layers: {layers_text(swap, modules)})" for swap in swaps
    )
    text = BARE.format(name=repo_id.split("/")[-1], swaps=words, repo_id=repo_id)
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def card_data(result: RunResult) -> ModelCardData:
    """The metadata at the head of the card."""
    variants = dict.fromkeys(swap.variant for swap in result.swaps)
    seeds, scratch = len(result.converted.seeds), result.base.relation == SCRATCH
    based = result.base.on_hub and not scratch
    on_hub = "/" in result.data.name  # the name of a user's file has none, and is no data set of the Hub
    return ModelCardData(
        language=list(result.language) or None,
        license=result.license,
        library_name="transformers",
        pipeline_tag=result.task,
        base_model=result.base.name if based else None,
        base_model_relation=result.base.relation if based else None,
        datasets=[result.data.name] if on_hub else None,
        metrics=[metric.name for metric in result.converted.metrics],
        tags=[TAG, *(VARIANT_TAG + variant for variant in variants), *([SCRATCH_TAG] if scratch else [])],
        model_name=result.name,
        eval_results=[
            EvalResult(
                task_type=result.task,
                dataset_type=result.data.name,
                dataset_name=result.data.name,
                dataset_config=result.data.config,
                dataset_split=result.data.evaluated,
                dataset_revision=result.data.revision,
                metric_type=metric.name,
                metric_name=f"{metric.name} ({'one seed' if seeds == 1 else f'mean of {seeds} seeds'})",
                metric_value=float(f"{metric.mean:.6g}"),
            )
            for metric in result.converted.metrics
        ]
        if on_hub
        else None,
    )


def table(folder: str | Path) -> str:
    """One Markdown table of all runs in a folder, a row for every metric of every run.

    Raises:
        ValueError: the folder holds no results, or some results cannot be read.
    """
    paths = sorted(Path(folder).glob(f"*/{RESULTS_FILE}"))
    if not paths:
        raise ValueError(f"no {RESULTS_FILE} in any folder of {folder}; a run writes one into a folder of its own.")
    rows: list[Sequence[str]] = []
    for path in paths:
        result = RunResult.load(path)
        swaps = result.swaps
        shown = "README.md" if path.with_name("README.md").is_file() else RESULTS_FILE
        head = [
            f"[{result.name}]({path.parent.name}/{shown})",
            result.base.name,
            result.variant,
            "; ".join(layers_text(swap, result.modules) for swap in swaps),
            ", ".join(dict.fromkeys(f"{swap.strength:g}" for swap in swaps)),
            " ".join(filter(None, (result.data.name, result.data.config, result.data.evaluated))),
        ]
        tail = [str(len(result.converted.seeds)), f"× {result.cost.ratio:.3g}" if result.cost else "not measured"]
        for name, ours, beside, difference in _comparison(result, "metrics"):
            theirs = beside if result.stock is None else f"{beside} (base model)"
            rows.append((*head, name, ours, theirs, difference, *tail))
    return markdown(COLUMNS, rows) + "\n"


def layers_text(swap: AppliedSwap, modules: int) -> str:
    """The layers of a swap as text, such as "0-5, 7 of 12"."""
    layers = sorted(swap.layers)
    if len(layers) == modules:
        return f"all {modules}"
    starts = [layer for layer in layers if layer - 1 not in swap.layers]
    ends = [layer for layer in layers if layer + 1 not in swap.layers]
    runs = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"{', '.join(runs)} of {modules}"


def number(mean: float, spread: float | None = None, *, sign: bool = False) -> str:
    """A figure as text, with its spread if there is one. The spread decides the number of printed digits."""
    plus = "+" if sign else ""
    if not spread:
        return f"{mean:{plus}.4g}" + (" ± 0" if spread == 0 else "")
    digits = max(0, 1 - math.floor(math.log10(spread)))
    if digits > 6:
        return f"{mean:{plus}.4g} ± {spread:.2g}"
    return f"{mean:{plus}.{digits}f} ± {spread:.{digits}f}"


def _beside(result: RunResult) -> str | None:
    """The heading of the column beside the converted model; None if there is nothing beside it."""
    if result.control is not None:
        return "softmax control"
    return None if result.stock is None else "base model"


def _base(base: BaseModel) -> str:
    """The name of the base model, with a link if it is a name on the Hub."""
    return f"[`{base.name}`](https://huggingface.co/{base.name})" if base.on_hub else f"`{base.name}`"


def _comparison(result: RunResult, kind: str) -> list[tuple[str, str, str, str]]:
    """One row per metric: name and better direction, the converted model's value, that beside it, the difference."""
    rows = []
    ours: Sequence[Metric] = getattr(result.converted, kind) or ()
    beside = result.control or result.stock
    theirs: Sequence[Metric] = getattr(beside, kind, None) or ()
    for index, metric in enumerate(ours):
        name = f"{metric.name} ({'higher' if metric.higher_is_better else 'lower'} is better)"
        other = theirs[index] if theirs else None
        control = "none" if other is None else number(other.mean, other.spread)
        paired = beside is not None and beside.seeds == result.converted.seeds
        difference = "" if other is None else _difference(metric, other, paired=paired)
        if result.difference is not None and metric is result.converted.metrics[0]:
            difference += f" [{result.difference.low:+.3g}, {result.difference.high:+.3g}]"
        rows.append((name, number(metric.mean, metric.spread), control, difference))
    return rows


def _difference(ours: Metric, theirs: Metric, *, paired: bool) -> str:
    if not paired:
        return number(ours.mean - theirs.mean, sign=True)
    by_seed = [a - b for a, b in zip(ours.values, theirs.values, strict=True)]
    return number(statistics.fmean(by_seed), statistics.stdev(by_seed) if len(by_seed) > 1 else None, sign=True)


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def bibtex(paper: str) -> list[str]:
    """The BibTeX entries of the papers that a variant names, such as "OutEffHop (Hu et al., 2024)".

    Raises:
        ValueError: no entry matches the name.
    """
    entries = re.findall(r"^% ([^\n]+)\n(@.*?^\})", PAPERS.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    cited = [entry for words, entry in entries if words in paper]
    if not cited:
        raise ValueError(f"no citation for the paper {paper!r}; known are {', '.join(words for words, _ in entries)}.")
    return cited
