"""`python -m docs.notebook` runs recipes/quickstart.ipynb without a network, and keeps its outputs in the file.

The model and the sentences are those that the extra `demo` installs. The model's weights are those that the notebook
takes from the Hub, byte for byte; the sentences are the same data set's training part, in the same order.
The program also writes the badge, whose address comes from `pyproject.toml`, into the notebook and README.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NOTEBOOK = ROOT / "recipes" / "quickstart.ipynb"
BADGE = re.compile(r"^\[!\[Open in Colab\].*$", re.MULTILINE)
FINGERPRINT = "outputs_of"  # in the notebook's metadata: the fingerprint of the code that gave the outputs
CELL_SECONDS = 1200


def badge() -> str:
    """The Markdown that opens the notebook in Colab.

    Raises:
        ValueError: `pyproject.toml` names no repository on GitHub, where Colab reads notebooks from.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    result = re.search(r'^Repository = "https://github\.com/([^"]+)"', text, flags=re.MULTILINE)
    if result is None:
        raise ValueError('pyproject.toml needs a line Repository = "https://github.com/owner/name" in [project.urls].')
    page = f"https://colab.research.google.com/github/{result[1]}/blob/main/{NOTEBOOK.relative_to(ROOT).as_posix()}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({page})"


def with_badge(text: str) -> str:
    """The text with the badge's line anew.

    Raises:
        ValueError: the text has not exactly one badge.
    """
    changed, count = BADGE.subn(badge(), text)
    if count != 1:
        raise ValueError(f"the text has {count} badges; it needs exactly one line that starts [![Open in Colab].")
    return changed


def code(notebook: Any) -> list[Any]:
    """The cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fingerprint(notebook: Any) -> str:
    """A SHA-256 of all code, from which the outputs are known to be those of this code."""
    sources = [cell.source for cell in code(notebook)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def offline(folder: Path) -> dict[str, str]:
    """Write the packaged sentences into a folder, and return the settings that make the notebook read only packages."""
    from hf_attn_swap.demo import packaged_model, packaged_rows

    folder.mkdir()
    with (folder / "train.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *packaged_rows()])
    return {"QUICKSTART_MODEL": packaged_model(), "QUICKSTART_DATA": str(folder)}


def run(folder: Path, settings: dict[str, str]) -> Any:
    """Run the notebook inside a folder, with these environment variables, and return it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        coalesce_streams=True,  # else the number of outputs depends on when each line came
        record_timing=False,
        resources=where,
    )
    client.execute(env={**os.environ, **settings})
    return notebook


def main() -> None:
    """Write the notebook with its outputs, and both badges."""
    import nbformat

    README.write_text(with_badge(README.read_text(encoding="utf-8")), encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        notebook = run(Path(name), offline(Path(name, "sentences")))
    notebook.cells[0].source = with_badge(notebook.cells[0].source)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        FINGERPRINT: fingerprint(notebook),
    }
    NOTEBOOK.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
