"""Converts whole checkpoints: loads a model with its class, swaps the attention, saves model and tokenizer."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..layer.registry import canonical_name, parse, parse_options
from ..loading import read_block
from ..measuring.lm_head import names_head
from ..patch import patch_model
from ..saved import shim
from ..variants.base import VARIANTS
from ..writing import claimed, half_replaced, saved_whole, told_where

# Files of tokenizers and processors. They are copied unchanged, so no tokenizer or processor class has to load.
PREPROCESSOR_FILES = (
    "*token*.json",
    "*.jinja",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*processor_config.json",
    "bpe.codes",
    "chat_template.json",
    "modules.json",  # of sentence-transformers: which modules follow the model
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "merges.txt",
    "vocab.*",
)
MODULE_FILES = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors")  # the modules of sentence-transformers, such as a pooling
PREFIX = "AutoModelFor"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def patch_checkpoint(
    source: str,
    variant: str,
    out: Path,
    *,
    strength: float,
    layers: Sequence[int] | None,
    modules: str | None,
    options: dict[str, Any],
    task: str | None,
    overwrite: bool,
    notify: Callable[[str], None],
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> list[str]:
    """Load the model `source`, swap its attention, and save it in `out`. `notify` receives a line before each step.

    Returns:
        The names of the parameters that the checkpoint did not hold, such as those of a new task head.

    Raises:
        ValueError: the class, variant, option, layer or dtype is unknown, `out` is not an empty folder, or another
            command writes into it.
        OSError: `source` cannot be read, or `out` cannot be written.
    """
    refuse_full(out, overwrite, source)
    parse_options(parse(variant), options)  # checked before the weights load, which may take minutes
    check_dtype(dtype)
    hub = hub_arguments(revision, token)
    auto = model_class(read_config(source, **hub), task)
    with claimed(out):
        refuse_full(out, overwrite, source)  # again: another command may have ended in the meantime
        notify(f"loading {source} as {auto.__name__}")
        model, fresh = load_weights(auto, source, dtype, **hub)
        patch_model(model, variant, layers=layers, modules=modules, strength=strength, **options)
        notify(f"saving in {out}")
        with told_where(out), saved_whole(out) as folder:
            model.save_pretrained(folder)
            copied = copy_preprocessor(source, folder, **hub)
    words = ", ".join(copied) or "no tokenizer or image processor (the source has none)"
    notify(f"saved {canonical_name(variant)} with {words}")
    return fresh


def refuse_full(out: Path, overwrite: bool, source: str) -> None:
    """Refuse to write into something that is not an empty folder.

    Raises:
        ValueError: `out` is a file, a folder that is not empty and must not be overwritten, or the folder of the model
            that is read.
    """
    if out.exists() and out.resolve() == Path(source).resolve():
        raise ValueError(f"{out} is the folder of the model itself; name another one.")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not overwrite and not half_replaced(out))):
        raise ValueError(f"{out} exists and is not an empty folder; name another one, or pass --overwrite.")


def load_checkpoint(
    source: str,
    task: str | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> PreTrainedModel:
    """A saved model, stock or swapped, in evaluation mode.

    Args:
        source: name on the Hub, or folder.
        task: the AutoModel class; None takes the class that saved the model.
        device: such as "cpu" or "cuda"; None takes CUDA if there is one.
        dtype: the precision of the weights, one of `DTYPES`; "auto" is that of the checkpoint.
        revision: branch, tag or commit on the Hub.
        token: of the Hub, for a private model.

    Raises:
        ValueError: the class, device or dtype is unknown, there is no such folder, a file of weights is damaged, or
            the checkpoint has no head for the class.
        OSError: `source` cannot be read.
    """
    check_dtype(dtype)
    where = find_device(device)
    hub = hub_arguments(revision, token)
    auto = model_class(read_config(source, **hub), task)
    model, fresh = load_weights(auto, source, dtype, **hub)
    refuse_fresh_head(source, auto, fresh)
    ready: PreTrainedModel = model.to(where).eval()
    return ready


def refuse_fresh_head(source: str, auto: Any, fresh: Sequence[str]) -> None:
    """Refuse a class with a head whose weights transformers made anew.

    Args:
        source: the checkpoint.
        auto: the class that loaded it.
        fresh: the names of the weights that the checkpoint does not hold.

    Raises:
        ValueError: the class has a head, and weights are missing.
    """
    if fresh and names_head(auto.__name__):
        raise ValueError(
            f"{source} has no weights for {', '.join(fresh[:3])}: {auto.__name__} would run with random ones, and what "
            "it gives would say nothing; fine-tune the model first, or choose another class with --task."
        )


@contextlib.contextmanager
def damage_named(source: str) -> Iterator[None]:
    """Inside, the error of damaged weights names the model, which is a name on the Hub or a folder.

    Raises:
        ValueError: a safetensors file is damaged or incomplete.
    """
    try:
        yield
    except SafetensorError as problem:
        raise ValueError(
            f"{source}: the weights cannot be read ({problem}); a file is damaged or incomplete: download it again."
        ) from problem


def load_weights(auto: Any, source: str, dtype: str, **hub: Any) -> tuple[Any, list[str]]:
    """The model of a checkpoint, and the sorted names of the weights that transformers made anew.

    Raises:
        ValueError: a safetensors file is damaged or incomplete.
    """
    with damage_named(source):
        model, info = auto.from_pretrained(source, dtype=dtype, output_loading_info=True, **hub)
    return model, sorted(info["missing_keys"])


def processor_of(model: PreTrainedModel, source: str, hub: Mapping[str, Any]) -> Any:
    """The image processor of a checkpoint whose model takes images, or the tokenizer of any other.

    Raises:
        ValueError: the checkpoint has none.
    """
    images = model.main_input_name == "pixel_values"
    auto: Any = AutoImageProcessor if images else AutoTokenizer
    kind, option = ("image processor", "--processor") if images else ("tokenizer", "--tokenizer")
    missing = f"{source!r} has no {kind} that can be loaded; name one with {option}."
    try:
        processor = auto.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(missing) from problem
    if not images and len(processor) <= len(processor.all_special_ids):  # transformers makes up an empty tokenizer
        raise ValueError(missing)
    return processor


def other_processor(model: PreTrainedModel, source: str, hub: Mapping[str, Any]) -> Any:
    """The tokenizer or image processor of another checkpoint than the model's own.

    Raises:
        ValueError: the checkpoint has none, or its tokenizer has tokens that the model does not know.
    """
    processor = processor_of(model, source, hub)
    known = getattr(model.config.get_text_config(), "vocab_size", None)
    if model.main_input_name == "input_ids" and known is not None and len(processor) > known:
        raise ValueError(
            f"the tokenizer of {source!r} has {len(processor):,} tokens, and the model knows {known:,}; name the "
            "tokenizer that the model was made with."
        )
    return processor


def hub_arguments(revision: str | None, token: str | None) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say what is read on the Hub, and as whom; those that are not None."""
    given = {"revision": revision, "token": token}
    return {name: value for name, value in given.items() if value is not None}


def find_device(name: str | None) -> str:
    """The device of this name; without a name CUDA, or the CPU where there is no CUDA.

    Raises:
        ValueError: this machine, or this build of torch, has no such device.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).cpu()  # refuses "meta", too, which holds no values
    except (RuntimeError, AssertionError) as problem:  # a torch without CUDA raises an AssertionError
        reason = str(problem).strip().splitlines()[0]
        raise ValueError(f"the device {name!r} cannot be used here: {reason}") from problem
    return name


def check_dtype(name: str) -> None:
    """Refuse a precision that is not one of `DTYPES`.

    Raises:
        ValueError: names those that there are.
    """
    if name not in DTYPES:
        raise ValueError(f"--dtype takes {', '.join(DTYPES)}; got {name!r}.")


def skeleton(
    source: str, task: str | None = None, *, revision: str | None = None, token: str | None = None
) -> PreTrainedModel:
    """The model that a config describes, on the meta device: its modules without its weights."""
    config = read_config(source, **hub_arguments(revision, token))
    auto = model_class(config, task)
    with torch.device("meta"):
        model = auto.from_config(config) if hasattr(auto, "from_config") else auto._from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model


def read_config(source: str, **hub: Any) -> PreTrainedConfig:
    """The config of a folder or of a name on the Hub; `hub` may hold `revision` and `token`.

    Raises:
        ValueError: `source` is a path, and there is no such folder (without this check it would be looked up on the
            Hub as a name), or no model in it.
        OSError: there is no such model, or the Hub cannot be reached.
    """
    if Path(source).is_file():
        raise ValueError(f"{source} is a file; name the folder that save_pretrained wrote, or a model on the Hub.")
    if not Path(source).is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise ValueError(f"There is no folder {source!r}.")
    if Path(source).is_dir() and not (Path(source) / CONFIG_NAME).is_file():
        raise ValueError(
            f"The folder {source} holds no model: it has no {CONFIG_NAME}. Name a folder that save_pretrained wrote."
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **hub)
    except OSError as problem:
        if Path(source).is_dir():
            raise
        raise OSError(f"There is no folder {source!r}, and the Hub did not give it: {problem}") from problem
    return config


def model_class(config: PreTrainedConfig, task: str | None) -> Any:
    """The class that loads a checkpoint: the class that saved it, or the AutoModel class that the user names.

    Raises:
        ValueError: transformers has no such class, or the class does not fit this architecture.
    """
    if task is None:
        name = shim.stock_name((getattr(config, "architectures", None) or ["AutoModel"])[0])
        if not hasattr(transformers, name):
            raise ValueError(f"transformers has no class {name!r}; name an AutoModel class with --task.")
        return getattr(transformers, name)
    fitting = {_slug(auto.__name__): auto for auto in shim.auto_classes() if type(config) in auto._model_mapping}
    if _slug(task) not in fitting:
        known = ", ".join(sorted(auto.__name__ for auto in fitting.values()))
        raise ValueError(f"--task {task!r} does not fit {type(config).__name__}, which has {known}.")
    return fitting[_slug(task)]


def saved_block(folder: Path) -> dict[str, Any]:
    """The checked `attn_swap` of a saved model.

    Raises:
        ValueError: the folder holds no swapped model, or the block cannot be used.
    """
    path = folder / shim.CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no model: there is no {shim.CONFIG} in it.")
    config = json.loads(path.read_text(encoding="utf-8"))
    block = config.get("attn_swap") if isinstance(config, dict) else None
    if block is None:
        raise ValueError(f"{folder} holds no swapped attention; call patch_model before model.save_pretrained.")
    read_block(block)
    assert isinstance(block, dict)
    return block


def add_shim(folder: Path) -> list[str]:
    """Write the shim into the folder of a saved swapped model, and return the auto classes that load through it.

    Raises:
        ValueError: the folder holds no swapped model, or its model is loaded from code of its own.
    """
    saved_block(folder)
    files = shim.completed(folder, VARIANTS)
    if not files:
        raise ValueError(
            f"{folder}: this model runs code of its own, so it gets no shim; import hf_attn_swap before it is loaded."
        )
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted(name for name, value in json.loads(files[shim.CONFIG])[shim.KEY].items() if shim.is_ours(value))


def copy_preprocessor(source: str, out: Path, **hub: Any) -> list[str]:
    """Copy the files of the tokenizer and of the image or audio processor into `out`, and return their names.

    So are the files of the modules that sentence-transformers puts behind the model. `hub` may hold `revision` and
    `token`.
    """
    patterns = PREPROCESSOR_FILES + MODULE_FILES
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=list(patterns), **hub))
    names = sorted({path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern)})
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, out / name)
    return [name.as_posix() for name in names]


def _slug(name: str) -> str:
    short = name.removeprefix(PREFIX) if name.startswith(PREFIX) else name
    return short.replace("-", "").replace("_", "").lower()
