"""Mutation testing: one small fault at a time in a copy of the tree, and the fast tests that belong to the file.

    pip install cosmic-ray
    python tests/mutation/run.py mutants.sqlite --count 200              # samples, runs, prints; run again to go on
    python tests/mutation/run.py mutants.sqlite --report                 # what was caught, what survived, as diffs
    python tests/mutation/run.py other.sqlite --count 30 --only kernels  # files whose path holds this
    python tests/mutation/run.py mutants.sqlite --again                  # the survivors, with the tests of today

Operators and session are cosmic-ray's. Places are drawn at random and then one fault of each, because a place may have
a dozen. Faults that change annotations alone are no faults, and left out. A copy of the tree lies beside the session,
and stays as it was when the session began; `--again` brings the tests up to date. Faults go into a copy of that. Each
mutant runs in a fork of a process that has imported everything but the project.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_attn_swap"
COPIED = (PACKAGE, f"{PACKAGE}_cli", "tests", "recipes", "benchmarks")
LIMIT = 150.0  # seconds, or five times what the tests take without a fault: an endless loop counts as caught
PASSED, HUNG = 0, -1


@dataclass(frozen=True)
class Stage:
    """One call of pytest: paths, and an expression that chooses among their tests."""

    paths: tuple[str, ...]
    keyword: str = ""


def stage(*paths: str, keyword: str = "") -> Stage:
    """Paths below tests/."""
    return Stage(tuple(f"tests/{path}" for path in paths), keyword)


FORMULAS = stage("contract/test_functional_formulas.py")
NORMALIZERS = stage("contract/test_functional_normalizers.py")
KERNELS = stage("kernels/test_kernels.py")
WEIGHTED = stage("kernels/test_weighted.py")
OPERATORS = stage("kernels/test_weighted.py", keyword="learns or calls or exported")
SUMS = stage("kernels/test_passes.py", keyword="llama and not flash")
SOFTMAX_N = stage("kernels/test_kernels.py", keyword="softmax_n")
HOPFIELD = stage("kernels/test_kernels.py", keyword="carried or long or low or alive")
FLASHLESS = stage("kernels/test_passes.py", keyword="flash and bert")
PASSES = stage("kernels/test_passes.py", keyword="not flash and not (albert or gpt2 or opt or vit)")
DOUBLE_BACKWARD = stage("kernels/test_double_backward.py")
RECORDED = stage("kernels/test_transforms.py", keyword="bert")
DEEP = "(bert or llama) and not albert"  # the two families that the contract's grid is deep on
MASKS = stage("contract/test_masks.py", keyword=f"({DEEP}) and (float_mask or see_nothing)")
MIXED = stage("contract/test_packed_and_sliding.py", keyword="full_and_sliding")
CARRYING = stage("contract/test_values.py", "contract/test_masks.py", keyword=f"modern_hopfield and ({DEEP})")
CACHED = stage("contract/test_generation.py", keyword="llama and not +")
CARRIED_REFUSALS = stage("contract/test_refusals_carried.py")
LINEAR = stage("contract/test_states.py", "contract/test_linear_state.py")
SINK = stage("contract/test_sink.py")
BIASED = stage("generic/test_generic.py", keyword="(gemma2 or t5) and (swapped or fused)")
ARGUMENTS = stage("contract/test_refusals_arguments.py")
BY_KIND = stage("contract/test_options_by_kind.py")
NAMES = stage("contract/test_names.py")
STRENGTHS = stage("contract/test_strength.py", keyword="layer_at_zero")
STRENGTH_DTYPE = stage("contract/test_strength_dtype.py")
DAMAGED = stage("lifecycle/test_damaged.py")
SWAP = stage("layer/test_swap.py")
A_NEW_FIT = stage("lifecycle/test_a_new_fit.py", keyword=f"not lives or ({DEEP})")

FEW = "not (albert or gpt2 or opt or vit)"
ABSORB = stage("conversion/test_absorb.py")
CALIBRATE = stage("conversion/test_calibrate.py", keyword="bert or llama or not (every_variant or least or training)")
DISTIL = stage(
    "conversion/test_distillation.py", keyword="formula or padding or (learned and bert) or relative or inputs"
)
DISTIL_MORE = stage("conversion/test_distillation.py", keyword="left_out or more_than or (dropout and bert)")
LOSSES = stage("conversion/test_losses.py")
MERGE = stage("conversion/test_merge.py", keyword="not saved and (llama or gpt2 or not merged)")
READING = stage("conversion/test_reading.py")
ROWS = stage("conversion/test_rows.py", "conversion/test_batches.py")
SCALE = stage("conversion/test_value_scale.py", keyword=f"{FEW} and not architectures")
SMOOTH = stage("conversion/test_smooth.py", keyword=f"not (way_back or found) or (({DEEP}) and (gated or found))")
TEACHER = stage("conversion/test_teacher.py", keyword=FEW)

STEPS = stage("conversion/test_run.py")
STAGES = stage("training/test_stages.py", keyword="not control")
SPENT = stage(
    "conversion/test_convert.py",
    keyword="tokens or steps or images or unequal or diverged or best_measured or quarters",
)
CHOSEN = stage("conversion/test_convert.py", keyword="group or share or budget")
PLANNED = stage("conversion/test_convert.py", keyword="settings or stages or linear or half")
REPORTED = stage("conversion/test_convert.py", keyword="report")
REFUSED = stage("conversion/test_convert.py", keyword="refus or another or error or modes or mixed or rows")
LEAVES = stage("conversion/test_convert_leaves.py", keyword="not compiled")
RESUMED = stage("conversion/test_convert_resumed.py", keyword="killed_after or lost")
ABSORBED = stage("conversion/test_convert_absorb.py")
BITS = stage("conversion/test_quantize.py")
RECALLED = stage("conversion/test_convert_recall.py")
BY_HEADS = stage("conversion/test_convert_heads.py")

# By file, or by folder for files that are not named: the narrowest and fastest tests first, as the first failure ends.
TESTS: dict[str, tuple[Stage, ...]] = {
    "functional/": (FORMULAS, NORMALIZERS, stage("memory/test_layers.py", "memory/test_promises.py")),
    "functional/linear.py": (FORMULAS, stage("kernels/test_linear.py")),
    "functional/sparse.py": (NORMALIZERS,),
    "core/call.py": (stage("core/test_call.py"), MIXED, CACHED, CARRIED_REFUSALS),
    "core/checks.py": (DAMAGED,),
    "core/kind.py": (BY_KIND,),
    "core/masks.py": (stage("core/test_masks.py"), MASKS, MIXED, LINEAR),
    "core/options.py": (ARGUMENTS, BY_KIND),
    "layer/calibration.py": (MERGE, CALIBRATE, A_NEW_FIT),
    "layer/compute.py": (SWAP, MASKS, SINK, LINEAR, CARRIED_REFUSALS, BIASED, SUMS, OPERATORS),
    "layer/fitted.py": (A_NEW_FIT,),
    "layer/registry.py": (ARGUMENTS, BY_KIND, NAMES),
    "layer/smoothing.py": (SMOOTH,),
    "layer/swap.py": (RECORDED, SWAP, STRENGTHS, STRENGTH_DTYPE, CARRIED_REFUSALS, SINK, A_NEW_FIT),
    "layer/value_scale.py": (SCALE, A_NEW_FIT),
    "kernels/": (KERNELS, PASSES, CARRYING),
    "kernels/blocks.py": (WEIGHTED,),
    "kernels/carried.py": (HOPFIELD, stage("kernels/test_devices.py"), PASSES, CARRYING),
    "kernels/dispatch.py": (PASSES, stage("kernels/test_cuda.py"), HOPFIELD, RECORDED),
    "kernels/hopfield.py": (HOPFIELD, PASSES, DOUBLE_BACKWARD),
    "kernels/linear.py": (stage("kernels/test_linear.py"), FORMULAS, DOUBLE_BACKWARD),
    "kernels/normalizers.py": (WEIGHTED,),
    "kernels/extra_kv.py": (SINK,),
    "kernels/softmax_n.py": (SOFTMAX_N, stage("kernels/test_cuda.py"), SINK, FLASHLESS, DOUBLE_BACKWARD),
    "kernels/stock_softmax.py": (SOFTMAX_N, stage("kernels/test_cuda.py")),
    "kernels/thresholds.py": (WEIGHTED,),
    "kernels/double_backward.py": (DOUBLE_BACKWARD,),
    "kernels/weighing.py": (WEIGHTED,),
    "kernels/formula.py": (stage("contract/test_score_mod.py"),),
    "kernels/weighted.py": (WEIGHTED, DOUBLE_BACKWARD),
    "kernels/windows.py": (stage("kernels/test_windows.py"),),
    "text/typed.py": (ARGUMENTS, stage("cli/test_arguments.py")),
    "conversion/calibrate.py": (CALIBRATE, MERGE, SPENT),
    "conversion/config.py": (stage("conversion/test_engine_form.py"), PLANNED, STAGES, LOSSES, REFUSED),
    "conversion/convert.py": (REFUSED, LEAVES, REPORTED, RECALLED),
    "conversion/distill.py": (stage("conversion/test_training.py"), SPENT, CHOSEN, STAGES),
    "conversion/distributed.py": (stage("conversion/test_processes.py"),),
    "conversion/journal.py": (stage("conversion/test_journal.py", "conversion/test_snapshot.py"), STEPS),
    "conversion/losses.py": (DISTIL, LOSSES, TEACHER),
    "conversion/quantize.py": (BITS,),
    "conversion/replay.py": (stage("conversion/test_replay.py"),),
    "conversion/report.py": (stage("conversion/test_sensitivity.py"), REPORTED, CHOSEN, BITS, RECALLED),
    "conversion/half_precision.py": (stage("conversion/test_half_precision.py"),),
    "conversion/rows.py": (ROWS, READING, LEAVES, REFUSED),
    "conversion/run.py": (STEPS, CHOSEN, RESUMED),
    "conversion/sensitivity.py": (stage("conversion/test_sensitivity.py"), CHOSEN, RECALLED, BY_HEADS),
    "conversion/sink.py": (ABSORB, ABSORBED),
    "conversion/smooth.py": (SMOOTH,),
    "conversion/trainable.py": (TEACHER, LEAVES, REFUSED),
    "conversion/trainer.py": (DISTIL, DISTIL_MORE, TEACHER, stage("conversion/test_progress.py")),
    "conversion/value_scale.py": (SCALE,),
    "memory/": (stage("memory/test_layers.py", "memory/test_promises.py"),),
    "memory/stanhop.py": (stage("memory/test_stanhop.py"),),
    "core/probe.py": (stage("memory/test_stanhop.py", keyword="eight_bits"),),
    "training/metrics.py": (stage("training/test_metrics.py", "training/test_publish.py"),),
    "training/stages.py": (STAGES,),
}
SCOPE = ("functional", "core", "layer", "kernels", "conversion", "memory", "training/metrics.py")


def tests_of(path: Path) -> tuple[Stage, ...]:
    """The stages of one file of the package, given from the package's root; none if the table lacks it."""
    folders = (f"{folder.as_posix()}/" for folder in path.parents)
    return next((TESTS[name] for name in (path.as_posix(), *folders) if name in TESTS), ())


def sources(tree: Path) -> list[Path]:
    """Every file to put faults into."""
    found: list[Path] = []
    for part in SCOPE:
        place = tree / PACKAGE / part
        found += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [path for path in found if path.name != "__init__.py" or path.parent.name == "functional"]


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """The syntax tree as text, without annotations: none is evaluated."""
    try:
        return ast.dump(_WithoutAnnotations().visit(ast.parse(source)))
    except SyntaxError:
        return "no Python"


def run_tests(tree: Path, stages: tuple[Stage, ...], limit: float, log: Path) -> int:
    """Pytest's exit status in a fork, HUNG if it was ended; what it printed is in `log`."""
    child = os.fork()
    if child == 0:
        _in_child(tree, stages, log)
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return HUNG
        time.sleep(0.05)


def _in_child(tree: Path, stages: tuple[Stage, ...], log: Path) -> None:
    status = 70  # of an error outside the tests
    try:
        os.setsid()  # so that a hung child is ended with all that it started
        sys.dont_write_bytecode = True  # a fault of the same size in the same second would not be seen
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        import pytest

        plain = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line"]
        plain += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # its plugins are imported before it starts
        for each in stages:
            status = int(pytest.main([*plain, "-k", each.keyword, *each.paths]))
            if status:
                break
        names = (name for name in sys.modules if name.split(".")[0] not in (PACKAGE, "tests", "__main__", "conftest"))
        log.with_suffix(".modules").write_text("\n".join(names))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def warm(tree: Path, paths: list[Path], log: Path) -> dict[Stage, float]:
    """Run the files' tests without a fault, which must pass, and import here what they imported of other packages.

    Returns:
        The seconds that each stage took.
    """
    known: dict[Stage, float] = {}
    for path in paths:
        for each in tests_of(path.relative_to(PACKAGE)):
            if each in known:
                continue
            start = time.monotonic()
            status = run_tests(tree, (each,), 6 * LIMIT, log)
            if status != PASSED:
                sys.exit(f"without a fault, {each} ends with {status}:\n{log.read_text()[-2000:]}")
            for name in log.with_suffix(".modules").read_text().splitlines():
                with contextlib.suppress(ImportError, AttributeError):  # parts of others import in one order alone
                    importlib.import_module(name)
            known[each] = time.monotonic() - start
            print(f"{' '.join(each.paths)} -k '{each.keyword}': {known[each]:.0f} s without a fault", flush=True)
    return known


def copy_folder(root: Path, tree: Path, name: str) -> None:
    """One folder of the project, in place of the one that is there."""
    shutil.rmtree(tree / name, ignore_errors=True)
    shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))


def copy_tree(root: Path, tree: Path) -> None:
    """What the tests of the package need."""
    for name in COPIED:
        copy_folder(root, tree, name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, tree / name)


def begin(database: object, tree: Path, only: str, count: int, seed: int) -> None:
    """Fill a session with every fault, and skip all but the sample."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    init([path for path in sources(tree) if only in path.relative_to(tree).as_posix()], database, {})
    places = defaultdict(list)
    for item in database.work_items:
        (fault,) = item.mutations
        places[(str(fault.module_path), fault.start_pos, fault.end_pos)].append(item)
    generator = random.Random(seed)
    drawn = generator.sample(sorted(places), len(places))
    chosen: set[str] = set()
    for place in drawn:
        item = generator.choice(sorted(places[place], key=lambda each: each.mutations[0].operator_name))
        if len(chosen) < count and changes(item.mutations[0]):
            chosen.add(item.job_id)
    skipped = [item.job_id for item in database.work_items if item.job_id not in chosen]
    database.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    print(f"{len(chosen)} of {len(chosen) + len(skipped)} faults at {len(places)} places", flush=True)


def mutated(fault: object) -> tuple[str, str | None]:
    """The source of a file without and with a fault."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = fault.module_path.read_text()
    operator = get_operator(fault.operator_name)(**fault.operator_args)
    return source, mutate_code(source, operator, fault.occurrence)


def changes(fault: object) -> bool:
    """False for a fault in an annotation."""
    source, other = mutated(fault)
    return other is not None and meaning(source) != meaning(other)


def survivors(database: object) -> list[object]:
    """The faults of the sample that no test caught."""
    from cosmic_ray.work_item import TestOutcome

    return [item for item, result in database.completed_work_items if result.test_outcome is TestOutcome.SURVIVED]


def go_on(database: object, tree: Path, log: Path, pending: list[object]) -> None:
    """Run these faults, and keep the results in place of earlier ones."""
    paths = {item.job_id: item.mutations[0].module_path.relative_to(tree) for item in pending}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        copy_tree(tree, scratch)
        known = warm(scratch, sorted(set(paths.values())), log)
        for number, item in enumerate(pending, 1):
            stages = tests_of(paths[item.job_id].relative_to(PACKAGE))
            limit = max(LIMIT, 5 * sum(known[each] for each in stages))
            result, words = tried(item.mutations[0], paths[item.job_id], scratch, limit, log)
            database.set_result(item.job_id, result)
            print(f"{number}/{len(pending)} {words}", flush=True)


def tried(fault: object, path: Path, scratch: Path, limit: float, log: Path) -> tuple[object, str]:
    """The result of one fault, and the line to print."""
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    source, other = mutated(fault)
    start = time.monotonic()
    (scratch / path).write_text(other)
    status = run_tests(scratch, tests_of(path.relative_to(PACKAGE)), limit, log)
    (scratch / path).write_text(source)
    diff = "\n".join(difflib.unified_diff(source.splitlines(), other.splitlines(), lineterm="", n=1))
    first = next((line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    words = "ended after the time limit" if status == HUNG else first
    outcome = TestOutcome.SURVIVED if status == PASSED else TestOutcome.KILLED
    result = WorkResult(worker_outcome=WorkerOutcome.NORMAL, output=words, test_outcome=outcome, diff=diff)
    name = "survived" if status == PASSED else "caught"
    operator = fault.operator_name.partition("/")[2]
    took = time.monotonic() - start
    return result, f"{name} {path}:{fault.start_pos[0]} {operator} {took:.0f} s {words}"


def finished(database: object) -> Iterator[tuple[object, object]]:
    """Faults of the sample and their results."""
    for item in database.completed_work_items:
        item, result = item
        if result.test_outcome is not None:
            yield item.mutations[0], result


def report(database: object) -> None:
    """How many were caught, by folder, and each survivor as file, line and diff."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for fault, result in finished(database):
        folder = fault.module_path.parent.name
        counts[folder][result.is_killed] += 1
        if not result.is_killed:
            changed = [line for line in result.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
            print(f"{folder}/{fault.module_path.name}:{fault.start_pos[0]}", *changed, sep="\n    ")
    for folder, (survived, caught) in sorted(counts.items()):
        print(f"{folder}: {caught} of {survived + caught} caught ({caught / (survived + caught):.0%})")
    survived, caught = (sum(each) for each in zip(*counts.values(), strict=True)) if counts else (0, 0)
    print(f"all: {caught} of {survived + caught} caught")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path, help="cosmic-ray's SQLite file; its tree and log lie beside it")
    parser.add_argument("--count", type=int, default=100, help="faults to draw when the session begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path holds this")
    parser.add_argument("--again", action="store_true", help="run the survivors, with the tests as they are now")
    parser.add_argument("--report", action="store_true", help="print what is known, and run nothing")
    chosen = parser.parse_args()
    from cosmic_ray.work_db import WorkDB, use_db

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun = chosen.session.exists()
    with use_db(str(chosen.session), WorkDB.Mode.open if begun else WorkDB.Mode.create) as database:
        if not chosen.report:
            tree = chosen.session.with_suffix(".tree").resolve()
            if not begun:
                copy_tree(ROOT, tree)
                begin(database, tree, chosen.only, chosen.count, chosen.seed)
            if chosen.again:
                copy_folder(ROOT, tree, "tests")
            pending = survivors(database) if chosen.again else list(database.pending_work_items)
            go_on(database, tree, chosen.session.with_suffix(".log").resolve(), pending)
        report(database)


if __name__ == "__main__":
    main()
