"""Writes results into folders: by one process at a time, whole or not at all, with errors that say where.

A result is saved beside its folder and then renamed. So a process that is killed, or a disk that is full, leaves
nothing that looks like a result. Beside a folder OUT may lie, while a command runs or after it was killed:

    OUT.attn_swap-lock    the lock of the command that writes; the system opens it when the process ends
                          (OUT/.attn_swap-lock, for a folder of work)
    OUT.attn_swap-saving  a result that is being saved
    OUT.attn_swap-saved   a whole result, while its files replace those of a folder that was there before

They are removed, so their names are such as no user gives: beside a folder `poetry` lies somebody's `poetry.lock`.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

LOCK, SAVING, SAVED = ".attn_swap-lock", ".attn_swap-saving", ".attn_swap-saved"
CONFIG = "config.json"  # without it, no library loads a folder as a model
# What `from_pretrained` reads as weights, of a precision such as fp16 too, and an adapter, which it would put on any
# model. Those of an earlier model must not stay beside new weights. Other files of weights are the user's.
WEIGHTS = (
    *("model.safetensors", "model.*.safetensors", "model-*-of-*.safetensors", "model.safetensors.index*.json"),
    *("pytorch_model.bin", "pytorch_model.*.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index*.json"),
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
)
FULL = (errno.ENOSPC, errno.EDQUOT)


def sibling(out: Path, ending: str) -> Path:
    """The path with the name of `out` and an ending."""
    whole = out.resolve()
    return whole.with_name(whole.name + ending)


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, or cannot be made, before any work for it. Nothing is left there.

    Raises:
        OSError: names the folder, and says what to do.
    """
    there = out.resolve()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as problem:
        reason = f"{there}: {problem.strerror or problem}"
        raise OSError(f"{out} cannot be written ({reason}); name another folder, or change who may write.") from None


@contextlib.contextmanager
def claimed(out: Path, *, writes: bool = True, inside: bool = False) -> Iterator[None]:
    """Inside, no other command writes into `out`.

    Args:
        out: the folder, which need not exist.
        writes: False in a process that writes nothing, such as the others beside the main process.
        inside: the lock lies in the folder, for files that are written there one by one. Else it lies beside the
            folder, as the result does until it is whole.

    Raises:
        ValueError: another command writes into it.
        OSError: it cannot be written.
    """
    if not writes:
        yield
        return
    path = out.resolve() / LOCK if inside else sibling(out, LOCK)
    for folder in (out, path.parent):
        check_writable(folder)
    new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
        while not path.exists():  # the command before removed it between the opening and the locking
            lock.release()
            lock.acquire()
    except Timeout:
        raise ValueError(f"another process writes into {out}; wait until it ends, or name another folder.") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            path.unlink()
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # it has files now
                path.parent.rmdir()


@contextlib.contextmanager
def saved_whole(out: Path, *, writes: bool = True) -> Iterator[Path]:
    """A new folder to save into. When the block ends it becomes `out`; after an error it is removed.

    In a folder that exists, files of the same names are replaced, and weights of an earlier model are removed. Until
    all files are there, it has no config.json.

    Args:
        out: the folder of the result.
        writes: False in a process that writes nothing itself, but calls the same functions.
    """
    part = sibling(out, SAVING)
    if writes:
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        if writes:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if writes:
        _put(part, out.resolve())


def half_replaced(out: Path) -> bool:
    """True if a process was killed while it replaced files in `out`: another run may write there again."""
    return sibling(out, SAVED).exists()


def _put(part: Path, out: Path) -> None:
    """Let a whole result take its place."""
    if not out.exists():
        part.rename(out)
        return
    whole = sibling(out, SAVED)
    shutil.rmtree(whole, ignore_errors=True)
    part.rename(whole)
    (out / CONFIG).unlink(missing_ok=True)
    for pattern in WEIGHTS:
        for old in out.glob(pattern):
            old.unlink()
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path == Path(CONFIG)):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(whole / path, out / path)
    shutil.rmtree(whole)


@contextlib.contextmanager
def told_where(out: Path) -> Iterator[None]:
    """Inside, the error of a full disk names the folder.

    Raises:
        OSError: no space is left for what is written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as problem:
        if (reason := _full(problem)) is None:
            raise
        raise OSError(f"{out} cannot be written: {reason}. Make room; the same command then goes on.") from problem


def _full(problem: Exception) -> str | None:
    """Why an error says that a disk is full; None if it is another error."""
    if isinstance(problem, OSError):
        return problem.strerror if problem.errno in FULL else None
    words = str(problem)
    if isinstance(problem, SafetensorError):
        return "no space is left" if any(f"os error {number}" in words for number in FULL) else None
    torch_writes = "PytorchStreamWriter" in words or "inline_container" in words
    return "no space is left, or the disk fails" if torch_writes else None
