"""Runs a variant and its softmax control over all seeds, writes one record and one card of all, prints the metrics."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, ModelCard
from transformers import TrainingArguments

from ..publish.card import render
from ..publish.converted import LONGEST_NAME, identifier
from ..publish.hub import push_folder
from ..publish.results import (
    RESULTS_FILE,
    SCRATCH,
    BaseModel,
    Budget,
    DataSet,
    Interval,
    Measured,
    Metric,
    RunResult,
    read_swaps,
)
from ..text.bar import visible
from ..writing import check_writable
from .arguments import CONTROL, ConversionArguments, DataArguments, ModelArguments, TextDataArguments, parse
from .metrics import LOWER_IS_BETTER, OUTLIERS, paired_interval
from .run import TRAINED, Outcome, Task, run

PAIRED = "95 %, paired bootstrap over the held-out rows (1,000 draws), mean over seeds; it does not hold their spread"
FEWEST_BLOCKS = 10
HUB_SECONDS = 10.0
ONE_SEED = "One seed: another would change the difference to the control."
SMALL = "A small budget, the same for the control: it compares attentions, and is not the best this model can do."


def compare(
    build: Callable[[], Task],
    about: About,
    model: ModelArguments,
    data: DataArguments,
    conversion: ConversionArguments,
    training: TrainingArguments,
) -> RunResult | None:
    """Run the variant and the softmax control for every seed, write the record and the card, and print the metrics.

    With `push_to_hub`, the first seed's model is published with the card of the whole run.

    Args:
        build: a function that reads and checks the data. It is called before anything is trained.
        about: the sentences of the card.
        model: the pretrained model and the variant. With the variant softmax, the control runs alone.
        data: the data to train and to measure on.
        conversion: the conversion steps of the variant. The control only freezes the same projections.
        training: the budget and the folder, the same for the variant and the control.

    Returns:
        The record. In a run of several processes, every process but the first returns None.

    Raises:
        SystemExit: with one line, if data, options, folders or packages do not fit.
    """
    transformers.utils.logging.set_verbosity_error()
    control = replace(model, variant=CONTROL, options="{}", layers=None, label=None)
    alone = model.run_name == control.run_name
    try:
        if training.push_to_hub and training.hub_model_id is None:
            raise ValueError("--push_to_hub needs --hub_model_id, the name on the Hub, such as me/bert-belief.")
        check_writable(Path(training.output_dir or "runs"))
        task = build()
        plain = ConversionArguments(freeze=conversion.freeze)
        controls = [run(task, control, plain, training, seed) for seed in model.seeds]
        outcomes = controls if alone else [run(task, model, conversion, training, seed) for seed in model.seeds]
    except (ValueError, OSError, ImportError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    if training.process_index:
        return None
    sibling, steps = ([], ()) if alone else (controls, conversion.steps)
    result = publish(outcomes, sibling, about, model, data, training, steps=steps, scratch=bool(task.scratch))
    seeds = ", ".join(map(str, model.seeds))
    for metric in result.converted.metrics:
        print(f"{result.name}: {metric.name} {metric.mean:.4f} (seeds {seeds})")
    if result.difference is not None:
        mean, low, high = result.difference.mean, result.difference.low, result.difference.high
        print(f"difference to the softmax control: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    if training.push_to_hub:
        print(push_run(model, training))
    return result


def launch(
    own: type[Any],
    build: Callable[[ModelArguments, Any, Any], Task],
    about: Callable[[Any], About],
    argv: Sequence[str] | None = None,
    *,
    keep_columns: bool = False,
    recipe: str | None = None,
    data: type[DataArguments] = TextDataArguments,
) -> None:
    """Run a recipe from its command line: read the arguments, and compare.

    Args:
        own: dataclass of the recipe's own arguments.
        build: a function that makes the task from the arguments of model and data and the recipe's own.
        about: a function that makes the sentences of the card from the recipe's own arguments.
        argv: see `parse`.
        keep_columns: True keeps the columns of the data that the model does not take, because a transform of the data
            reads them when a row is used.
        recipe: the recipe's name, if it ships with the package and has configurations there.
        data: dataclass of the arguments of the data.
    """
    classes = (ModelArguments, data, ConversionArguments, own, TrainingArguments)
    model, rows, conversion, mine, training = parse(
        classes, argv, recipe=recipe, about=sys.modules[build.__module__].__doc__
    )
    training.remove_unused_columns = training.remove_unused_columns and not keep_columns
    training.disable_tqdm = training.disable_tqdm or not visible()
    compare(lambda: build(model, rows, mine), about(mine), model, rows, conversion, training)


def push_run(model: ModelArguments, training: TrainingArguments) -> str:
    """Publish the first seed's model with the card of the whole run, and return the address of the commit."""
    assert training.hub_model_id is not None
    folder = Path(training.output_dir or "runs") / model.run_name
    trained = folder / f"seed-{model.seeds[0]}" / TRAINED
    return push_folder(
        trained,
        training.hub_model_id,
        results=folder / RESULTS_FILE,
        private=bool(training.hub_private_repo),
        revision=training.hub_revision,
        token=training.hub_token,
    ).commit_url


# -- The record --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class About:
    """What a card says besides metrics.

    Attributes:
        prefix: start of the run's name; None makes it of the names of the model and of the data.
        task: pipeline tag of the Hub.
        auto_class: the class of transformers that loads the model, or a class of a recipe with the recipe's file, such
            as "lra.Matcher".
        intended_use: what the model is for.
        block: number of neighbouring held-out rows that are similar, and that a bootstrap must draw together.
        language: codes of the languages; empty if there is no text.
    """

    prefix: str | None
    task: str
    auto_class: str
    intended_use: str
    block: int = 1
    language: tuple[str, ...] = ("en",)


def publish(
    converted: Sequence[Outcome],
    control: Sequence[Outcome],
    about: About,
    model: ModelArguments,
    data: DataArguments,
    training: TrainingArguments,
    *,
    steps: Sequence[str] = (),
    scratch: bool = False,
) -> RunResult:
    """Write `results.json` and `README.md` of a run into its folder, next to the folders of its seeds.

    Args:
        converted: one outcome per seed.
        control: the control's outcomes of the same seeds, in the same order; empty in the record of the control.
        about: the sentences of the card.
        model: the pretrained model and the variant.
        data: the data that were trained and measured on.
        training: the budget.
        steps: of the conversion, by name.
        scratch: the weights were random.
    """
    first, relation = converted[0], SCRATCH if scratch else "finetune"
    modules, swaps = read_swaps(json.loads(first.swap))
    told = [f"The training rows are of {data.train_data_card_name}."] if data.train_data_card_name else []
    study = about.prefix or title(model, data)
    result = RunResult(
        name=f"{study}-{model.run_name}",
        study=study,
        base=BaseModel(
            name=model.published_name,
            revision=None,
            relation=relation,
            auto_class=about.auto_class,
            on_hub=scratch or model.on_hub,
        ),
        modules=modules,
        swaps=swaps,
        parameters_added=first.parameters_added,
        conversion=(*first.conversion, *told),
        steps=tuple(steps),
        task=about.task,
        data=_data(data, first),
        converted=_measured(converted),
        control=_measured(control) if control else None,
        difference=_difference(converted, control, about.block) if control else None,
        cost=None,
        budget=_budget(data, training, first),
        versions=first.versions,
        hardware=first.hardware,
        wall_seconds=sum(outcome.wall_seconds for outcome in converted),
        intended_use=about.intended_use,
        limits=tuple(_limits(converted, about)),
        license=model.license or (None if scratch else base_license(model)),
        language=about.language,
    )
    folder = Path(training.output_dir or "runs") / model.run_name
    result.save(folder / RESULTS_FILE)
    (folder / "README.md").write_text(render(result), encoding="utf-8")
    return result


def title(model: ModelArguments, data: DataArguments) -> str:
    """The names of the model and of the data, without their owners, as the start of a run's name."""
    names = [name.rpartition("/")[2] for name in (model.published_name, data.published_name)]
    whole = "-".join([*names, data.dataset_config_name or ""])
    return identifier(whole[: LONGEST_NAME - len(f"-{model.run_name}")])


def base_license(model: ModelArguments) -> str | None:
    """The licence that the pretrained model's card states: in its folder, or on the Hub. None without such a card."""
    path = Path(model.model_name_or_path, "README.md")
    card: Any = {}
    with contextlib.suppress(Exception):  # no card, no network, no YAML: many types of errors
        if path.is_file():
            card = ModelCard.load(path).data
        elif model.on_hub:
            card = HfApi().model_info(model.published_name, timeout=HUB_SECONDS).card_data or {}
    stated = card.get("license")
    return stated if isinstance(stated, str) else None


def _data(data: DataArguments, first: Outcome) -> DataSet:
    return DataSet(
        name=data.published_name,
        config=data.dataset_config_name,
        revision=None,
        rows={data.train_split_name: first.rows["train"], data.test_split_name: first.rows["test"]},
        evaluated=data.test_split_name,
    )


def _budget(data: DataArguments, training: TrainingArguments, first: Outcome) -> Budget:
    return Budget(
        steps=first.steps,
        batch_size=training.train_batch_size * training.world_size * training.gradient_accumulation_steps,
        sequence_length=data.max_seq_length,
        learning_rate=training.learning_rate,
        optimizer=str(training.optim.value if hasattr(training.optim, "value") else training.optim),
    )


def _measured(outcomes: Sequence[Outcome]) -> Measured:
    metrics = [
        Metric(
            name=name,
            higher_is_better=not name.startswith(LOWER_IS_BETTER),
            values=tuple(outcome.metrics[name] for outcome in outcomes),
        )
        for name in outcomes[0].metrics
    ]
    return Measured(
        seeds=tuple(outcome.seed for outcome in outcomes),
        metrics=tuple(metric for metric in metrics if metric.name not in OUTLIERS),
        outliers=tuple(metric for metric in metrics if metric.name in OUTLIERS) or None,
        wall_seconds=sum(outcome.wall_seconds for outcome in outcomes),
    )


def _limits(converted: Sequence[Outcome], about: About) -> Iterator[str]:
    if len(converted) == 1:
        yield ONE_SEED
    if (rows := len(converted[0].references)) < FEWEST_BLOCKS * about.block and about.block > 1:
        yield f"No interval: {rows:,} held-out rows hold fewer than {FEWEST_BLOCKS} blocks of {about.block:,} alike."
    yield SMALL


def _difference(converted: Sequence[Outcome], control: Sequence[Outcome], block: int) -> Interval | None:
    """The headline metric's difference to the control, paired row by row.

    Returns None if rows are drawn in blocks and there are fewer than ten blocks: the interval would be too narrow.

    Raises:
        ValueError: the converted model and the control were not measured on the same rows.
    """
    if any(outcome.references != converted[0].references for outcome in (*converted, *control)):
        raise ValueError("the converted model and its control were not measured on the same rows; run both again.")
    if (blocks := len(converted[0].references) // block) < FEWEST_BLOCKS and block > 1:
        return None
    mean, low, high = paired_interval(
        next(iter(converted[0].metrics)),
        [outcome.predictions for outcome in converted],
        [outcome.predictions for outcome in control],
        converted[0].references,
        block=block,
    )
    of = PAIRED if block == 1 else PAIRED.replace("rows", f"rows in {blocks} blocks of {block:,}", 1)
    return Interval(mean=mean, low=low, high=high, of=of)
