"""Checks which part of the package may import which other part."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import hf_attn_swap

PACKAGE = Path(hf_attn_swap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parents[1]
NAME = PACKAGE.name
IDEAS = {f"variants.{path.stem}" for path in (PACKAGE / "variants").glob("*.py")} - {
    "variants.__init__",
    "variants.base",
}
INSIDE_A_LAYER = ("functional", "core", "kernels", "variants", "layer", "families")
INTERFACES = ("masking_utils", "integrations", "modeling_utils", "AttentionInterface", "AttentionMaskInterface")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that a file imports, at any depth; names imported from a package too."""
    inside = [NAME, *path.parent.relative_to(PACKAGE).parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


MODULES = {module_name(path) for path in FILES}


def own(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    modules = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != NAME:
            continue
        inner = parts[1:]
        while inner and ".".join(inner) not in MODULES:
            inner = inner[:-1]
        modules.add(".".join(inner))
    return modules


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {module_name(path): own(path) - {module_name(path)} for path in FILES}


PARTS = sorted({module.split(".")[0] for module in MODULES - {""}})  # folders, and the files of the root


def part_graph() -> dict[str, set[str]]:
    """The parts that each part imports."""
    parts: dict[str, set[str]] = {part: set() for part in PARTS}
    for module in MODULES - {""}:
        part = module.split(".")[0]
        parts[part] |= {name.split(".")[0] for name in graph()[module] - {""}} - {part}
    return parts


def below(part: str) -> set[str]:
    """Everything that a part imports, or that this imports in turn."""
    parts, known = part_graph(), set[str]()
    waiting = [part]
    while waiting:
        for other in parts[waiting.pop()] - known:
            known.add(other)
            waiting.append(other)
    return known


def test_no_circle() -> None:
    """Between folders, and between files: a package's `__init__`, which imports its members, is none of these."""
    for used in (part_graph(), {module: used - {""} for module, used in graph().items() if module}):
        TopologicalSorter(used).prepare()  # the error names the circle


def test_what_each_part_does_not_know() -> None:
    assert set().union(*map(below, INSIDE_A_LAYER)) <= set(INSIDE_A_LAYER)
    assert below("functional") == below("core") == below("text") == below("saved") == set()
    assert "variants" not in below("families") | below("kernels")
    assert "families" not in below("layer")
    assert "patch" not in below("wiring")
    assert not below("patch") & {"conversion", "analysis", "publish", "training", "loading", "measuring", "saving"}
    assert "conversion" not in below("measuring")
    assert "analysis" not in below("conversion") | below("publish")
    assert below("memory") == {"core", "functional"}
    users = {part for part, used in part_graph().items() if used & {"memory", "dynamics"}}
    assert not users, "the memory layers and the dynamics are rooms of their own"


def test_import_direction() -> None:
    wrong = [(module_name(path), what) for path in FILES for what in wrong_imports(path)]
    assert not wrong


def wrong_imports(path: Path) -> Iterator[str]:
    """What a file imports that it must not know."""
    module, used, foreign = (
        module_name(path),
        graph()[module_name(path)],
        {name for name in imports(path) if name.split(".")[0] != NAME},
    )
    part = module.split(".")[0]
    if part in INSIDE_A_LAYER or module == "wiring.blocks":
        known = {name for name in foreign if name.split(".")[0] == "transformers"}
        # A core is found by the type of what it asks for its attention function, and not by a name.
        allowed = {"transformers.AttentionInterface"} if module == "families.source" else set()
        if not known <= allowed:
            yield "only the seam knows transformers"
    if part == "functional" or part == "kernels":
        yield from used & IDEAS
    if part in ("conversion", "publish", "demo"):
        yield from used & {"wiring.seam", "wiring.hooks", "layer.compute", "functional"}  # these go through patch
    if module in ("publish.card", "analysis.plots"):
        yield from {name.split(".")[0] for name in used} & {"patch", "wiring", "layer", "families"}  # never a model
    above = {"recipes", "tests", "hf_attn_swap_cli"}
    yield from (name for name in foreign if name.split(".")[0] in above)
    if module not in ("wiring.seam", "families.source", "wiring.preconditions"):
        yield from (name for name in foreign if set(INTERFACES) & set(name.split(".")))  # the seam is one file


def test_nothing_imports_a_test_module() -> None:
    """What tests share lies in `tests/harness/`, or in a file of their folder that pytest does not collect."""
    for path in TESTS.rglob("*.py"):
        assert not re.search(r"^ *(from|import) [\w.]*\btest_\w+", path.read_text("utf-8"), re.M), path
