"""Loads a converted model, and checks every weight and every downloaded file."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...saved import shim

LOADED = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json")
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "revision", "token")
SHA1, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
BLOCK_SIZE = 1 << 22


def from_pretrained(
    name_or_path: str | os.PathLike[str], auto_class: type[Any] | str | None = None, **kwargs: Any
) -> Any:
    """Load a converted model, or raise an error if any weight is missing, unexpected, of another shape, or damaged.

    Args:
        name_or_path: name on the Hub, or folder.
        auto_class: the class that loads the model, or the name of that class in transformers; by default the class that
            was saved.
        kwargs: as for `from_pretrained` of transformers, such as `revision`, `token`, `dtype`, `device_map`.

    Raises:
        ValueError: the checkpoint holds no swapped attention, the description of its swap cannot be used, its keys are
            not exactly the model's, or the checksum of a file is not the Hub's.
        OSError: the checkpoint cannot be read or downloaded.
    """
    for name in ("attn_implementation", "config", "ignore_mismatched_sizes"):
        if name in kwargs:
            raise ValueError(
                f"{name} would change or loosen what is loaded; leave it out, or use a class of transformers."
            )
    name = os.fspath(name_or_path)
    wants_info = kwargs.pop("output_loading_info", False)
    if not Path(name).is_dir():
        kwargs["revision"] = _download(name, kwargs)
    config = AutoConfig.from_pretrained(name, **{key: kwargs[key] for key in (*DOWNLOAD, "subfolder") if key in kwargs})
    block = getattr(config, "attn_swap", None)
    if block is None:
        raise ValueError(
            f"{name} holds no swapped attention (its config.json has no attn_swap); load it with a class of "
            "transformers, and swap it with patch_model."
        )
    cls = _model_class(config, auto_class)
    model, info = cls.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    _check_keys(model, info, name)
    return (model, info) if wants_info else model


def _check_keys(model: PreTrainedModel, info: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that does not hold exactly the model's weights.

    Raises:
        ValueError: names the weights that are missing, unexpected, or of another shape.
    """
    wrong = []
    for kind in ("missing", "unexpected", "mismatched"):
        found = info[f"{kind}_keys"]
        if found:  # a mismatched key comes as a tuple with its two shapes
            names = sorted(key if isinstance(key, str) else key[0] for key in found)
            wrong.append(f"{kind}: {', '.join(names)}")
    if wrong:
        raise ValueError(
            f"{name} does not hold exactly the weights of {type(model).__name__}; {'; '.join(wrong)}. Load the class "
            "that was saved, or use a class of transformers if new weights are wanted."
        )


def _model_class(config: PreTrainedConfig, auto_class: type[Any] | str | None) -> Any:
    """The class that loads the model.

    Raises:
        ValueError: the config names no class, or transformers has no model class of that name.
    """
    names = [auto_class] if auto_class is not None else getattr(config, "architectures", None) or []
    if not names:
        raise ValueError("the config names no architecture; pass auto_class, such as 'AutoModelForCausalLM'.")
    found = getattr(transformers, shim.stock_name(names[0]), None) if isinstance(names[0], str) else names[0]
    auto = isinstance(found, type) and found.__name__.startswith("AutoModel")
    if not auto and not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"{names[0]!r} is no model class of transformers; pass auto_class.")
    return found


def _download(name: str, kwargs: dict[str, Any]) -> str:
    """Download the files that are going to be loaded, check them against the Hub's checksums, and return the commit."""
    inner = f"{kwargs['subfolder']}/" if kwargs.get("subfolder") else ""
    settings = {key: kwargs[key] for key in DOWNLOAD if key in kwargs}
    snapshot = Path(snapshot_download(name, allow_patterns=[inner + pattern for pattern in LOADED], **settings))
    for path in sorted(snapshot.rglob("*")):
        if path.is_file() and any(fnmatch(path.relative_to(snapshot).as_posix(), inner + p) for p in LOADED):
            _check_sum(path, name)
    kwargs.pop("force_download", None)
    return snapshot.name


def _check_sum(path: Path, name: str) -> None:
    """Compare a file with its checksum on the Hub.

    In the cache a file is a link, and the target of the link is named after the checksum. A cache that holds copies
    instead of links has no checksums, so nothing is compared there.
    """
    if not path.is_symlink():
        return
    expected = path.readlink().name
    if SHA256.fullmatch(expected):
        actual = hashlib.sha256()
    elif SHA1.fullmatch(expected):
        actual = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return
    for block in _blocks(path):
        actual.update(block)
    if actual.hexdigest() != expected:
        for file in (
            path.resolve(),
            path.parent / path.readlink(),
            path,
        ):  # the target of the link may itself be a link
            file.unlink(missing_ok=True)
        raise ValueError(f"{path.name} of {name} was damaged on its way from the Hub, and removed; load it again.")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_SIZE):
            yield block
