"""The workflows can be read, and what they and the pages tell `make` to do exists."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def commands(job: dict[str, Any]) -> Iterator[str]:
    """What the steps of a job run, once for each combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    lists = {name: values for name, values in matrix.items() if name not in ("include", "exclude")}
    for chosen in itertools.product(*lists.values()):
        words = dict(zip(lists, map(str, chosen), strict=True))
        for step in job.get("steps", ()):
            yield re.sub(r"\${{ matrix\.(\w+) }}", lambda found, words=words: words[found[1]], step.get("run", ""))


def check(targets: set[str]) -> None:
    """Let `make` work out what it would do for these targets: it fails if one does not exist."""
    done = subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    lines = [line for job in jobs.values() for command in commands(job) for line in command.splitlines()]
    assert not [line for line in lines if "matrix." in line]
    check({target[1] for line in lines if (target := re.match(r"\s*make (\S+)", line))} | {"help"})
    files = {name for line in lines for name in re.findall(r"python (\S+\.py)", line)}
    assert all((ROOT / name).is_file() for name in files)


def test_the_environments_of_the_workflows() -> None:
    """The ordinary workflow tests all versions that are released, the canary those that are new."""
    matrix = {
        path.stem: set(job["strategy"]["matrix"]["transformers"])
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        if "transformers" in job.get("strategy", {}).get("matrix", {})
    }
    assert matrix == {"ci": {"oldest", "middle", "newest"}, "canary": {"newest", "pre", "main"}}


def test_all_shards_run() -> None:
    """Each of the parts runs, and their number is the one in the command."""
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]["test"]
    shards = {shard[1] for command in commands(job) if (shard := re.search(r"--shard (\S+?)\"", command))}
    assert shards == {f"{part}/{len(shards)}" for part in range(1, len(shards) + 1)}


def test_pages() -> None:
    check({target for path in PAGES for target in re.findall(r"`make ([a-z][\w-]*)", path.read_text("utf-8"))})
