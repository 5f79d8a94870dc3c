"""The file of a study that grows run by run: what it holds is not run again, if it was made with the same options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_attn_swap.layer.registry import canonical_name
from hf_attn_swap.publish.results import versions

Record = dict[str, Any]


def open_record(path: Path, options: dict[str, Any], runs: Any) -> Record:
    """Read the file of a study, or begin a new record.

    Args:
        path: the file; its folder is made.
        options: what the figures depend on. Of `model` and `data`, the last part of the name counts, so that a record
            holds no path of a machine.
        runs: an empty collection, for a new record.

    Raises:
        SystemExit: the file was made with other options.
    """
    values = {**options, **{name: Path(options[name]).name for name in ("model", "data")}}
    values |= _canonical(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {"options": values, "runs": runs}
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    kept = record["options"] = record["options"] | _canonical(record["options"])
    changed = {name for name in {*values, *kept} if values.get(name) != kept.get(name)}
    if changed:
        raise SystemExit(
            f"error: {path} was made with another {', '.join(sorted(changed))}; name another file by --out."
        )
    return record


def _canonical(options: dict[str, Any]) -> dict[str, Any]:
    """The variant among the options, if there is one, under its canonical name: an older record has an older name."""
    return {"variant": canonical_name(options["variant"])} if "variant" in options else {}


def save_record(path: Path, record: Record) -> None:
    """Write the file, with the versions of the packages."""
    path.write_text(json.dumps(record | {"versions": versions()}, indent=1) + "\n", encoding="utf-8")
