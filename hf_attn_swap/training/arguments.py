"""The arguments of every recipe. `HfArgumentParser` reads them from YAML files and the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.utils.import_utils import is_torch_xla_available

from .. import configurations
from ..conversion.stages import FineTune, Stage, read_stages
from ..layer.registry import parse as parse_variant
from ..layer.registry import parse_options
from ..publish.converted import identifier
from ..text.typed import parse_layers
from .scratch import json_object

CONTROL = "softmax"
DTYPES = ("float32", "bfloat16", "float16")
# What a file says of a model or of data that a later file or an option replaces. It is not true of the new ones.
OF_DATA = ("card_name", "dataset_config_name", "dataset_card_name", "train_data_card_name")
OF_SPLITS = ("train_split_name", "test_split_name", "second_test_split_name")
REPLACED = {
    "model_name_or_path": ("card_name", "base_model_card_name", "license"),
    "dataset_name": ("train_file", "test_file", *OF_DATA),
    "train_file": ("dataset_name", "max_train_samples", "max_eval_samples", *OF_DATA, *OF_SPLITS),
}


@dataclass(kw_only=True)
class ModelArguments:
    """The pretrained model, and the variant that replaces its attention.

    Raises:
        ValueError: the variant, an option or the precision is unknown, or a seed is named twice.
    """

    model_name_or_path: str = field(metadata={"help": "Name on the Hub, or folder, of the pretrained model."})
    base_model_card_name: str | None = field(
        default=None, metadata={"help": "Name of the model on the card, if --model_name_or_path is a folder."}
    )
    license: str | None = field(
        default=None,
        metadata={"help": "Licence on the card, as the Hub writes it; that of the base model's card if left out."},
    )
    variant: str = field(
        default=CONTROL, metadata={"help": "Variant, as patch_model takes it; softmax is the control."}
    )
    options: str = field(default="{}", metadata={"help": "Options of the variant, as JSON."})
    layers: str | None = field(default=None, metadata={"help": 'Layers to swap, as "0-5,7"; all if left out.'})
    seeds: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "Seeds; each one is a run, of the control too."}
    )
    label: str | None = field(default=None, metadata={"help": "Name of the run; the name of the variant if left out."})
    dtype: str = field(
        default=DTYPES[0], metadata={"help": f"Precision of the weights of a pretrained model: {', '.join(DTYPES)}."}
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ValueError(f"seeds must be one or more, all different, got {self.seeds}.")
        classes = parse_variant(self.variant)
        parse_options(classes, self.option_values)
        self.variant = "+".join(cls.name for cls in classes)
        parse_layers(self.layers)

    @property
    def option_values(self) -> dict[str, Any]:
        """The options as keyword arguments of `patch_model`."""
        return json_object(self.options, "--options")

    @property
    def published_name(self) -> str:
        """The name of the pretrained model on the card."""
        path = Path(self.model_name_or_path)
        if not path.is_dir():
            return self.model_name_or_path
        return self.base_model_card_name or identifier(path.resolve().name)

    @property
    def on_hub(self) -> bool:
        """False if the name on the card is only the name of a folder."""
        return self.base_model_card_name is not None or not Path(self.model_name_or_path).is_dir()

    @property
    def run_name(self) -> str:
        """The name of the run and of its folder."""
        return (self.label or self.variant).replace("+", "-").replace("_", "-")


@dataclass(kw_only=True)
class ConversionArguments:
    """The stages of a run, and what its fine-tuning leaves as it is. Without stages, the run fine-tunes and no more.

    Raises:
        ValueError: a stage cannot be read, or stands in a wrong place.
    """

    stages: list[str] = field(
        default_factory=list,
        metadata={"help": "Stages in their order, each a name or JSON: calibrate, distil, fine_tune."},
    )
    freeze: list[str] = field(
        default_factory=list, metadata={"help": "Projections that do not train: query, key, value, output."}
    )

    @property
    def plan(self) -> tuple[Stage, ...]:
        """The stages in the order in which a run takes them, the recipe's own training included."""
        return read_stages(self.stages) if self.stages else (FineTune(),)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps by name, in the order in which a run takes them; a fine-tuning that comes last is not named."""
        named = [stage.recorded for stage in self.plan]
        if named[-1:] == [FineTune().recorded]:
            named.pop()
        return tuple(named)

    def __post_init__(self) -> None:
        self.plan  # noqa: B018  # the stages are read here, and refused


@dataclass(kw_only=True)
class DataArguments:
    """The data: a set on the Hub, a folder with parquet or CSV files per split, or two files. Rows may have labels.

    A subclass names the columns that the model reads.

    Raises:
        ValueError: a size is below 1, or no data are named.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set to load: a name on the Hub, or a folder."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": 'Configuration of the set, such as a GLUE task; "" is none.'}
    )
    dataset_card_name: str | None = field(
        default=None, metadata={"help": "Name of the set on the card, if it is read from a folder or a file."}
    )
    train_data_card_name: str | None = field(
        default=None, metadata={"help": "What the training rows are, on the card, if they are not of that set."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "CSV, JSON lines or parquet, instead of --dataset_name."}
    )
    test_file: str | None = field(default=None, metadata={"help": "File of held-out rows."})
    train_split_name: str = field(default="train", metadata={"help": "Split to train on."})
    test_split_name: str = field(default="test", metadata={"help": "Split to measure on; it must have labels."})
    label_column_name: str = field(default="label", metadata={"help": "Column of the class."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Number of training rows to sample; all if left out."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Number of held-out rows, from the first; all if left out."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Number of tokens that are kept of a row."})
    metrics: list[str] = field(
        default_factory=lambda: ["accuracy"], metadata={"help": "Metrics; the first is the headline."}
    )

    def __post_init__(self) -> None:
        # An empty option on the command line removes the YAML file's configuration.
        self.dataset_config_name = self.dataset_config_name or None
        for name in ("max_train_samples", "max_eval_samples", "max_seq_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError("name the data by --dataset_name, or by --train_file and --test_file.")
        if (self.train_file is None) != (self.test_file is None):
            raise ValueError("--train_file and --test_file go together.")

    @property
    def input_columns(self) -> list[str]:
        """The columns that the model reads."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments on which the metrics depend: everything but the names for the card."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_card_name")}

    @property
    def published_name(self) -> str:
        """The name of the data set on the card."""
        if self.dataset_name is not None and not Path(self.dataset_name).exists():
            return self.dataset_name
        return self.dataset_card_name or identifier(Path(self.dataset_name or self.train_file or "").resolve().stem)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of the options, and keeps the lines of the description."""


@dataclass(kw_only=True)
class TextDataArguments(DataArguments):
    """Data with one column of text, or two."""

    text_column_names: list[str] = field(
        default_factory=lambda: ["text"], metadata={"help": "Columns of the text, one or a pair."}
    )

    @property
    def input_columns(self) -> list[str]:
        """The columns of the text."""
        return self.text_column_names


@dataclass(kw_only=True)
class ImageDataArguments(DataArguments):
    """Data with a column of images."""

    image_column_name: str = field(default="image", metadata={"help": "Column of the images."})

    @property
    def input_columns(self) -> list[str]:
        """The column of the images."""
        return [self.image_column_name]


@dataclass(kw_only=True)
class ScratchArguments:
    """The name of a study on its cards, and random weights in place of a checkpoint's."""

    card_name: str | None = field(
        default=None, metadata={"help": "Start of the run's name on its card; made of model and data if left out."}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Random weights instead of the checkpoint's."})
    config_overrides: str = field(
        default="{}", metadata={"help": 'Config values as JSON, such as {"num_hidden_layers": 2}.'}
    )


def parse(
    classes: Sequence[Any], argv: Sequence[str] | None = None, *, recipe: str | None = None, about: str | None = None
) -> tuple[Any, ...]:
    """Read one instance per dataclass, from YAML files and then from options. A later value replaces an earlier one.

    A later model, or later data, also replaces what earlier files say about theirs (`REPLACED`).

    Args:
        classes: dataclasses of `HfArgumentParser`.
        argv: YAML files or names of configurations that ship, then `--name value ...`; by default the arguments of the
            command line.
        recipe: the recipe among whose configurations names are looked up; None takes those of all recipes.
        about: what `--help` says above the options; by default the docstring of the script.

    Raises:
        SystemExit: with code 2, after one line that says what is wrong.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    count = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    parser = HfArgumentParser(
        tuple(classes),
        prog=f"hf-attn-swap train {recipe.replace('_', '-')}" if recipe else None,
        usage="%(prog)s [configuration or file.yaml ...] [--option value ...]",
        description=about or sys.modules["__main__"].__doc__,
        formatter_class=_Help,
    )
    try:
        files = [configurations.find(word, recipe) for word in words[:count]]
        words = [*_without_accelerator(classes), *_from_yaml(files, words[count:]), *words[count:]]
        return parser.parse_args_into_dataclasses(words)
    except (ValueError, OSError) as problem:
        parser.exit(2, f"error: {' '.join(str(problem).split())}\n")


def _from_yaml(paths: Sequence[Path], options: Sequence[str]) -> list[str]:
    """The values of the files as words, without those that a later file or an option replaces."""
    values: dict[str, Any] = {}
    typed = {word[2:].partition("=")[0].replace("-", "_"): None for word in options if word.startswith("--")}
    for source in [*(source for path in paths for source in configurations.read(path)), typed]:
        gone = {name for replacing, names in REPLACED.items() if replacing in source for name in names}
        values = {name: value for name, value in values.items() if name not in gone} | source
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(_word, value if isinstance(value, list) else [value])]
    return words


def _without_accelerator(classes: Sequence[Any]) -> list[str]:
    """On a machine with only a CPU, the words that tell `TrainingArguments` so: it refuses bf16 without them."""
    if TrainingArguments not in classes or torch.accelerator.is_available() or is_torch_xla_available():
        return []
    return ["--use_cpu", "true"]


def _word(value: Any) -> str:
    """A YAML value as a word of the command line; a mapping as JSON."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
