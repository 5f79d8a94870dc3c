"""Results are written by one process at a time, whole or not at all, and errors say where."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hf_attn_swap import writing
from hf_attn_swap.writing import check_writable, claimed, half_replaced, saved_whole, sibling, told_where
from tests.harness.process import python


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def fill(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"new {name}")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with claimed(out):
        with pytest.raises(ValueError, match=r"another process.*out"), claimed(out):
            pass
        with claimed(out, writes=False), claimed(tmp_path / "other"):
            pass
    with claimed(out):
        pass
    assert names(tmp_path) == [], "no lock stays, and no folder that was made for it"


def test_a_lock_inside(tmp_path: Path) -> None:
    """For a folder of work, such as a disk of its own, whose parent nobody else may write."""
    out = tmp_path / "out"
    with claimed(out, inside=True):
        assert names(tmp_path) == ["out", "out/.attn_swap-lock"]
        with pytest.raises(ValueError, match="another process writes into"), claimed(out, inside=True):
            pass
        with claimed(out):
            pass
        (out / "kept").touch()
    assert names(tmp_path) == ["out", "out/kept"]


def test_the_lock_of_a_process_that_was_killed_is_open(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from hf_attn_swap.writing import claimed\n"
        "with claimed(Path(sys.argv[1])): os._exit(9)"
    )
    assert python("-c", code, tmp_path / "out", check=False).returncode == 9
    assert names(tmp_path) == ["out.attn_swap-lock"]
    with claimed(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


def test_a_lock_that_was_removed_between_opening_and_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, path = writing.FileLock.acquire, sibling(tmp_path / "out", writing.LOCK)
    seen = []

    def acquire(self: writing.FileLock) -> None:
        real(self)
        seen.append(path.exists())
        if len(seen) == 1:
            path.unlink()

    monkeypatch.setattr(writing.FileLock, "acquire", acquire)
    with claimed(tmp_path / "out"):
        assert seen == [True, True]
        assert path.exists()


@pytest.mark.parametrize("there", [None, "empty", "empty and here"])
def test_a_result_takes_its_place(there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    if there is not None:
        out.mkdir()
    if there == "empty and here":
        monkeypatch.chdir(out)
        out = Path()
    with saved_whole(out) as part:
        fill(part, "config.json", "1_Pooling/config.json", "model.safetensors")
        assert not (out / "config.json").exists()
        assert part.parent == tmp_path
    assert names(tmp_path / "out") == ["1_Pooling", "1_Pooling/config.json", "config.json", "model.safetensors"]
    assert names(tmp_path)[0] == "out"
    assert not [name for name in names(tmp_path) if "." in name.partition("/")[0]], "nothing stays beside it"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="config"), saved_whole(tmp_path / "out") as part:
        (part / "config.json" / "new").write_text("")
    assert names(tmp_path) == []


def test_a_process_that_only_joins_writes_nothing(tmp_path: Path) -> None:
    with saved_whole(tmp_path / "out", writes=False) as part:
        assert part == sibling(tmp_path / "out", writing.SAVING)
    assert names(tmp_path) == []


def test_a_folder_that_is_full_keeps_its_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        ".git/HEAD",
        "mine",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    with saved_whole(out) as part:
        fill(part, "config.json", "model.safetensors")
        assert (out / "config.json").read_text() == "old"
    assert names(out) == [".git", ".git/HEAD", "config.json", "mine", "model.safetensors"]
    assert (out / "config.json").read_text() == "new config.json"
    assert names(tmp_path)[0] == "out"


def test_files_that_users_may_have_beside_a_folder_stay(tmp_path: Path) -> None:
    mine = ["out.lock", "out.saved/config.json", "out.saving/config.json"]
    fill(tmp_path, *mine, "out/config.json")
    assert not half_replaced(tmp_path / "out")
    with claimed(tmp_path / "out"), saved_whole(tmp_path / "out") as part:
        fill(part, "config.json")
    assert [(tmp_path / name).read_text() for name in mine] == [f"new {name}" for name in mine]


def test_which_weights_are_removed(tmp_path: Path) -> None:
    """Those that `from_pretrained` would read, and an adapter; a name of the user's own is nothing that it reads."""
    out = tmp_path / "out"
    mine = [
        "model_backup.safetensors",
        "pytorch_model_best.bin",
        "my_adapter_model.safetensors",
        "mine/model.safetensors",
    ]
    old = ["model.fp16.safetensors", "model-00001-of-00002.safetensors", "model.fp16-00001-of-00002.safetensors"]
    old += ["model.safetensors.index.json", "model.safetensors.index.fp16.json", "pytorch_model.bin"]
    old += ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "pytorch_model.fp16.bin"]
    old += ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
    fill(out, *mine, *old)
    with saved_whole(out) as part:
        fill(part, "config.json", "model.safetensors")
    assert names(out) == sorted([*mine, "mine", "config.json", "model.safetensors"])


@pytest.mark.parametrize("moves", range(3))
def test_killed_while_files_are_replaced(moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder does not load, and may be written again; the next result takes its place."""
    out, real, done = tmp_path / "out", writing.shutil.move, []
    fill(out, "config.json", "model.safetensors", "mine")

    def move(*given: Path) -> None:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(real(*given))

    with monkeypatch.context() as inside:
        inside.setattr(writing.shutil, "move", move)
        with pytest.raises(KeyboardInterrupt), saved_whole(out) as part:
            fill(part, "config.json", "model.safetensors", "tokenizer.json")
    assert half_replaced(out)
    assert not (out / "config.json").exists()
    with saved_whole(out) as part:
        fill(part, "config.json", "model.safetensors")
    assert not half_replaced(out)
    assert {"config.json", "mine", "model.safetensors"} <= set(names(out))


@pytest.mark.parametrize("path", ["file/out", "file", "file/a/b"])
def test_a_folder_that_cannot_be_made(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"{path} cannot be written.*Not a directory"):
        check_writable(tmp_path / path)
    with pytest.raises(OSError, match="cannot be written"), claimed(tmp_path / "file" / "out"):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"out cannot be written \(.*: Permission denied\)"):
        check_writable(tmp_path / "out")
    tmp_path.chmod(0o700)


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"),
    ],
    ids=str,
)
def test_a_full_disk(problem: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"/out cannot be written: .*Make room") as told,
        told_where(tmp_path / "out"),
        told_where(tmp_path / "out"),
    ):
        raise problem
    assert str(told.value).count("cannot be written") == 1


@pytest.mark.parametrize(
    "problem",
    [OSError(errno.ENOENT, "No such file"), RuntimeError("shapes"), SafetensorError("HeaderTooLarge"), KeyError()],
)
def test_other_errors_stay(problem: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(problem)) as told, told_where(tmp_path):
        raise problem
    assert told.value is problem


def test_threads_of_one_process(tmp_path: Path) -> None:
    refused = []

    def second() -> None:
        try:
            with claimed(tmp_path / "out"):
                pass
        except ValueError as problem:
            refused.append(problem)

    with claimed(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1
