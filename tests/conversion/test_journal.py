"""The journal gives a second run what the first run wrote, and refuses what does not belong to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_attn_swap.conversion.journal import NAME, Journal, fingerprint
from tests.contract.harness import refused

SETTINGS = {"variant": "modern_hopfield", "layers": (0, 2), "options": {"alpha": 0.5}}
NUMBERS = {"a": 1 / 3, "b": [1, 2]}


def written(folder: Path) -> Journal:
    journal = Journal(folder, SETTINGS)
    assert journal.recall("swap") is None
    journal.write("swap", NUMBERS)
    tensors = {"w": torch.arange(4.0).view(2, 2).T, "half": torch.ones(2, dtype=torch.bfloat16) / 3}
    journal.write("distil 1.1", {"rows": 3}, tensors)
    return journal


def test_a_second_run_is_given_what_the_first_wrote(tmp_path: Path) -> None:
    written(tmp_path / "new" / "folder")
    again = Journal(tmp_path / "new" / "folder", SETTINGS)
    assert again.recall("swap") == NUMBERS
    assert again.recall("distil 1.1") == {"rows": 3}
    assert again.recall("next") is None
    tensors = again.load("distil 1.1")
    assert torch.equal(tensors["w"], torch.arange(4.0).view(2, 2).T)
    assert torch.equal(tensors["half"], torch.ones(2, dtype=torch.bfloat16) / 3)
    again.write("next", {})
    entries = json.loads((tmp_path / "new" / "folder" / NAME).read_text())["entries"]
    assert list(entries) == ["swap", "distil 1.1", "next"]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, SETTINGS)
    journal.write("x", {}, {"w": torch.ones(1)})
    assert journal.recall("y") is None
    assert not list(tmp_path.iterdir())


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "other", SETTINGS, writes=False)
    journal.write("x", {}, {"w": torch.ones(1)})
    assert not (tmp_path / "other").exists()


def test_a_write_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    """The journal of before stays whole until the new one is."""
    written(tmp_path)
    (tmp_path / f"{NAME}.part").write_text('{"settings": {"vari')
    (tmp_path / "tensors.part").write_bytes(b"\x10\x00")
    again = Journal(tmp_path, SETTINGS)
    assert again.recall("swap") == NUMBERS
    again.write("more", {}, {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["distil-1.1.safetensors", NAME, "more.safetensors"]


def test_a_crash_while_writing_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(tmp_path)

    def cut(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        journal.write("late", {})
    again = Journal(tmp_path, SETTINGS)
    assert list(again.entries) == ["swap", "distil 1.1"]


@pytest.mark.parametrize(
    "content", [b"", b'{"settings"', b"[]", b"null", b'{"settings": 3, "entries": {}}', b"\xff\xfe{"]
)
def test_a_damaged_journal_ends_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    with refused(f"{NAME} is damaged", "remove the folder to start again"):
        Journal(tmp_path, SETTINGS)


def test_another_conversion_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    before = (tmp_path / NAME).read_bytes()
    with refused("holds another conversion (layers, variant differ); name another folder, or remove it."):
        Journal(tmp_path, SETTINGS | {"variant": "belief", "layers": None})
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize("content", [None, b"\x10\x00"])
def test_missing_tensors_end_in_one_line(content: bytes | None, tmp_path: Path) -> None:
    journal = written(tmp_path)
    path = tmp_path / "distil-1.1.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with refused("distil-1.1.safetensors is missing or damaged", "remove the folder to start again"):
        journal.load("distil 1.1")


def test_fingerprint() -> None:
    torch.manual_seed(0)
    wide = torch.randn(300, 20)
    names = {fingerprint([wide]), fingerprint([wide + 1e-3]), fingerprint([wide.view(20, 300)]), fingerprint([])}
    names |= {fingerprint([wide, torch.ones(3)]), fingerprint([torch.empty(3, device="meta")])}
    assert len(names) == 6
    assert fingerprint([wide]) == fingerprint([wide.clone()])
    assert fingerprint([torch.ones(3, dtype=torch.bfloat16)]) != fingerprint([torch.zeros(3, dtype=torch.bfloat16)])
