"""What was measured of which variant in which family, from the records and from the walk over all architectures."""

from __future__ import annotations

from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import canonical_name
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.text.table import markdown

from .architectures import known
from .model_names import called
from .runs import has_card, link, recorded

# The model type of what a record calls its base model. A control that was fine-tuned here is of its pretrained type.
MODEL_TYPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "bert": "bert",
    "facebook/dinov2-small": "dinov2",
    "gpt2": "gpt2",
    "gpt2-bytes-imdb-softmax": "gpt2",
    "llama": "llama",
    "minilm-distilled-stsb-softmax": "bert",
    "opt": "opt",
    "opt-bytes-imdb-softmax": "opt",
    "patchtst": "patchtst",
    "rxn4chemistry/rxnmapper": "albert",
    "sentence-transformers/all-MiniLM-L6-v2": "bert",
    "vit": "vit",
}
TASKS = {
    "text-classification": "texts",
    "text-generation": "next token",
    "fill-mask": "hidden tokens",
    "image-classification": "images",
    "time-series-forecasting": "series",
}


def matrix_table() -> str:
    """A row per variant, a column per family: the tasks that were measured, or what the walk says, or a dash."""
    runs: dict[tuple[str, str], list[RunResult]] = {}
    for run in recorded():
        for component in {canonical_name(component.name) for swap in run.swaps for component in swap.components}:
            runs.setdefault((component, MODEL_TYPES[run.base.name]), []).append(run)
    walked = known()
    families = sorted(set(MODEL_TYPES.values()))
    lines = []
    for variant in list_variants():
        cells = (_tasks(runs.get((variant, family), [])) or walked.get((family, variant), "–") for family in families)
        lines.append((f"[`{variant}`](../variants/{variant}.md)", *cells))
    return markdown(("variant", *(called(family) for family in families)), lines)


def _tasks(runs: list[RunResult]) -> str:
    """Each task once, with a link to its run: one with a card, or else the first."""
    chosen: dict[str, RunResult] = {}
    for run in sorted(runs, key=lambda run: (not has_card(run), len(run.swaps[0].components))):
        chosen.setdefault(run.task, run)
    return ", ".join(f"[{TASKS[task]}]({link(run)})" for task, run in chosen.items())
