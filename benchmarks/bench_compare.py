"""Measures what a change did: this tree against the tree of a commit, in one interleaved run.

`make bench-compare REF=<commit>`, or `python benchmarks/bench_compare.py <commit>`. The tree of the commit is put into
a temporary folder by `git worktree`. One process per tree computes, one at a time and in random order in each round.
A result is the median over rounds of the ratio of this tree's time to the commit's in the same round, with its
bootstrap 95 % interval: below 1, the change made it faster. The column "this tree again" is this tree in one more
process, and shows the noise. The models, and the code that takes the times, are those of this tree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench_models
import torch
from bench import WARM_UPS
from bench_figures import interval, summary
from bench_models import KINDS, MODELS

import hf_attn_swap
from hf_attn_swap import list_variants, patch_model

NOW, AGAIN, THEN = "this tree", "this tree again", "commit"
ROOT = Path(__file__).parents[1]


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="the commit to compare with")
    parser.add_argument("--variants", default=",".join(list_variants()))
    parser.add_argument("--models", default="bert,llama")
    parser.add_argument("--kinds", default="forward,train")
    parser.add_argument("--shapes", default="8x128,1x1024")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="", help="a file for the table's numbers, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def serve(given: argparse.Namespace) -> None:
    """Take times for the parent process: it sends one line of JSON per pass, and gets the seconds."""
    print(json.dumps({"package": hf_attn_swap.__file__, "variants": list_variants()}), flush=True)
    torch.set_num_threads(given.threads)
    held: dict[str, Any] = {}
    for line in sys.stdin:
        name, shape, variant, kind = json.loads(line)
        if held.get("of") != (name, shape, variant):
            held = {"of": (name, shape, variant), **prepared(name, shape, variant, given)}
        if kind == "decode" and "cache" not in held:
            held["cache"] = bench_models.filled(held["model"], held["given"])
        print(bench_models.seconds(held["model"], held["given"], kind, held.get("cache")), flush=True)


def prepared(name: str, shape: str, variant: str, given: argparse.Namespace) -> dict[str, Any]:
    """A swapped model and its inputs."""
    batch, length = map(int, shape.split("x"))
    dtype = getattr(torch, given.dtype)
    model = bench_models.build(name, length, given.layers, given.width).to(given.device, dtype)
    inputs = bench_models.inputs(name, batch, length, given.device, dtype)
    return {"model": patch_model(model, variant), "given": inputs}


class Worker:
    """A process that computes with the package of one tree."""

    def __init__(self, tree: Path, arguments: list[str]) -> None:
        command = [sys.executable, __file__, *arguments, "--worker"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, cwd=tree, **pipes)
        hello = json.loads(self.answer())
        if not Path(hello["package"]).resolve().is_relative_to(tree.resolve()):
            self.process.communicate()
            sys.exit(f"error: the process for {tree} imported {hello['package']}.")
        self.variants = set(hello["variants"])

    def answer(self) -> str:
        """The next line that the process prints."""
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        return line or sys.exit("error: a process that takes times ended; its own message stands above.")

    def seconds(self, *what: str) -> float:
        """The time of one pass of (model, shape, variant, kind)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(what)}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()


@contextmanager
def tree_of(ref: str) -> Iterator[Path]:
    """The files of a commit, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), ref)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def measure(workers: dict[str, Worker], what: tuple[str, str, str], given: argparse.Namespace) -> dict[str, Any]:
    """The row of one model, shape and variant."""
    row: dict[str, Any] = dict(zip(("model", "shape", "variant"), what, strict=True))
    for kind in bench_models.kinds_of(what[0], given.kinds):
        times: dict[str, list[float]] = {name: [] for name in workers}
        for turn in range(-WARM_UPS, given.rounds):
            for name in random.sample(list(workers), len(workers)):
                taken = workers[name].seconds(*what, kind)
                times[name] += [taken] if turn >= 0 else []
        row |= summary(kind, times[NOW], times[THEN])
        noise = [own / other for own, other in zip(times[AGAIN], times[NOW], strict=True)]
        row[f"{kind}_noise_95"] = interval(noise)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    from hf_attn_swap.text.table import markdown  # here, because an older tree, which never prints, may lack it

    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    lines = []
    for row in rows:
        cells = []
        for kind in kinds:
            if kind not in row:
                cells += ["", ""]
                continue
            (low, high), (least, most) = row[f"{kind}_95"], row[f"{kind}_noise_95"]
            cells += [f"{row[kind]:.2f} [{low:.2f}, {high:.2f}]", f"[{least:.2f}, {most:.2f}]"]
        lines.append([f"{row['model']} {row['shape']}", row["variant"], *cells])
    titles = [title for kind in kinds for title in (KINDS[kind], AGAIN)]
    return markdown(["model, batch x length", "attention", *titles], lines)


def main() -> None:
    given = options()
    if given.worker:
        serve(given)
        return
    unknown = [each for each in (*given.models.split(","), *given.kinds.split(",")) if each not in (*MODELS, *KINDS)]
    if unknown:
        sys.exit(f"error: unknown {', '.join(unknown)}; models: {', '.join(MODELS)}; kinds: {', '.join(KINDS)}.")
    try:
        ref = git("rev-parse", "--verify", "--short=12", f"{given.ref}^{{commit}}")
    except subprocess.CalledProcessError:
        sys.exit(f"error: {given.ref!r} is no commit of this repository; call make bench-compare REF=<commit>.")
    with ExitStack() as stack:
        trees = {NOW: ROOT, AGAIN: ROOT, THEN: stack.enter_context(tree_of(ref))}
        workers = {name: stack.enter_context(Worker(tree, sys.argv[1:])) for name, tree in trees.items()}
        shared = set.intersection(*(worker.variants for worker in workers.values()))
        asked = given.variants.split(",")
        wanted = [name for name in asked if set(name.split("+")) <= shared]
        if left := [name for name in asked if name not in wanted]:
            print(f"Not in both trees, so not measured: {', '.join(left)}.")
        cells = [(m, s, v) for m in given.models.split(",") for s in given.shapes.split(",") for v in wanted]
        rows = [measure(workers, cell, given) for cell in cells]
    print(f"Time of this tree as a ratio to {ref}, on {given.device}:\n\n{table(rows)}")
    if given.out:
        Path(given.out).write_text(f"{json.dumps({'options': vars(given), 'rows': rows}, indent=2)}\n", "utf-8")


if __name__ == "__main__":
    main()
