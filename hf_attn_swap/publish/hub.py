"""Publish a converted model with its card and its tokenizer or image processor, in one commit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from transformers import PreTrainedModel

from ..layer.registry import build_options, get_variant
from ..saved import shim
from ..text.typed import refuse_name
from ..variants.base import VARIANTS
from ..writing import WEIGHTS
from .card import bare_card, render
from .checkpoint import saved_block
from .results import RESULTS_FILE, AppliedSwap, RunResult, read_swaps

CARD = "README.md"
# The files of a folder that are published: weights as safetensors, and files that cannot hold programs.
PUBLISHED = ("*.safetensors", "*.json", "*.jinja", "*.md", "*.model", "*.spm", "*.tiktoken", "*.txt", "bpe.codes")


def push(
    model: PreTrainedModel,
    repo_id: str,
    *,
    results: RunResult | str | Path | None = None,
    tokenizer: Any = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Publish a converted model, its card and its tokenizer or image processor, in one commit.

    Args:
        model: the converted model; its weights are published as safetensors.
        repo_id: "owner/name". The repository is created if it does not exist.
        results: a run, or the path of its results.json. The card is rendered from the run. Without results, a card
            that the repository already has stays; a repository without a card gets a short card that says how to load
            the model.
        tokenizer: tokenizer or image processor.
        private: True refuses to publish into a repository that everybody can read.
        revision: branch, created if it does not exist; the main branch if None.
        token: token of the Hub; the stored token if None.

    Raises:
        ValueError: the model is not swapped, the results describe another model, or the repository is public although
            `private` is True.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"push takes a transformers model, got {type(model).__name__}; merge or unwrap it first.")
    if tokenizer is not None:
        refuse_name(tokenizer, "tokenizer")
    if getattr(model.config, "attn_swap", None) is None:
        raise ValueError("this model's attention is not swapped; call patch_model first, or model.push_to_hub.")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return push_folder(folder, repo_id, results=results, private=private, revision=revision, token=token)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    results: RunResult | str | Path | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Publish a saved converted model, in one commit. The results become the card.

    Files that could hold programs (pickled weights, code) are left out. The one exception is the shim, with the
    files of the user's own variants: they are published as this process has them, whatever the folder holds.

    Args:
        folder: the saved model.
        repo_id: as for `push`.
        results: a run, or the path of its results.json. By default the results.json in the folder, if there is one.
        private: as for `push`.
        revision: as for `push`.
        token: as for `push`.

    Raises:
        ValueError: as for `push`, or the folder holds no converted model.
    """
    files, swaps, modules = files_to_publish(folder, repo_id, results)
    api = HfApi(token=token)
    info = _repository(api, repo_id, private=private, revision=revision)
    there = [file.rfilename for file in info.siblings or []]
    if CARD not in files and CARD not in there:
        files[CARD] = bare_card(swaps, modules, repo_id).encode()
    stale = [name for name in there if name not in files and any(fnmatch(name, pattern) for pattern in WEIGHTS)]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()),
        *(CommitOperationDelete(path_in_repo=name) for name in stale),
    ]
    title = f"Upload {', '.join(dict.fromkeys(swap.variant for swap in swaps))} model with hf_attn_swap"
    return api.create_commit(repo_id, operations, commit_message=title, revision=revision, parent_commit=info.sha)


def files_to_publish(
    folder: str | Path, repo_id: str, results: RunResult | str | Path | None = None
) -> tuple[dict[str, bytes | Path], tuple[AppliedSwap, ...], int]:
    """What `push_folder` publishes; nothing is sent.

    Args:
        folder: as for `push_folder`.
        repo_id: as for `push`; it stands in the card.
        results: as for `push_folder`.

    Returns:
        The files by their names in the repository: their content, or the path of it; the swaps; and the
        number of attention modules. A card is among the files if there are results.

    Raises:
        ValueError: the folder holds no converted model, or the results describe another model.
    """
    folder = Path(folder)
    if results is None and (folder / RESULTS_FILE).is_file():
        results = folder / RESULTS_FILE
    run = results if results is None or isinstance(results, RunResult) else RunResult.load(results)
    if run is None or run.swapped:
        modules, swaps = read_swaps(saved_block(folder))
    else:
        modules, swaps = run.modules, run.swaps
    files = _weights(folder)
    if run is not None:
        if (run.modules, _essence(run.swaps)) != (modules, _essence(swaps)):
            raise ValueError(f"the results are of another model: of {run.variant}, with other layers or options.")
        files |= {RESULTS_FILE: run.to_json().encode(), CARD: render(run, repo_id).encode()}
    return files, swaps, modules


def _weights(folder: Path) -> dict[str, bytes | Path]:
    """The files of a folder that are published."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and _published(path.relative_to(folder)))
    files: dict[str, bytes | Path] = {path.relative_to(folder).as_posix(): path for path in paths}
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"{folder} holds no safetensors; save the model with model.save_pretrained.")
    return files | shim.completed(folder, VARIANTS)


def _repository(api: HfApi, repo_id: str, *, private: bool, revision: str | None) -> ModelInfo:
    """The repository and branch to push to, created where they are missing."""
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise ValueError(f"{repo_id} exists and everybody can read it; make it private first, or name another one.")
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.model_info(repo_id, revision=revision)


def _published(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and any(fnmatch(path.name, pattern) for pattern in PUBLISHED)


def _options(variant: str, given: Mapping[str, Any]) -> str:
    return json.dumps(asdict(build_options(get_variant(variant), given)), sort_keys=True)


def _essence(swaps: Sequence[AppliedSwap]) -> Any:
    """The parts on which two descriptions of a model must agree. The wording of formulas is left out: it may change.

    Options that one of them leaves out, because it is older than they are, have their defaults.
    """
    return {
        (tuple(sorted(swap.layers)), swap.strength, part.name, _options(part.name, part.options))
        for swap in swaps
        for part in swap.components
    }
