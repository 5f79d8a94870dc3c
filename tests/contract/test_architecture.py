"""Checks which module of the package may import which other module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_attn_swap

PACKAGE = Path(hf_attn_swap.__file__).parent
ROOT = PACKAGE.parent
CLI = ROOT / "hf_attn_swap_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
NAME = PACKAGE.name
VARIANT_BASE, FAMILY_BASE, DISPATCH = "variants.base", "families.base", "kernels.dispatch"
IDEAS = {f"variants.{path.stem}" for path in (PACKAGE / "variants").glob("*.py")} - {"variants.__init__", VARIANT_BASE}
KERNELS = {f"kernels.{path.stem}" for path in (PACKAGE / "kernels").glob("*.py")} - {"kernels.__init__"}
# What the lower half may import from the package; everything above it is held by the rules below.
MAY = {
    "functional": {"functional.linear", "functional.sparse"},
    "functional.linear": set(),
    "memory": {"functional", "memory.layers"},
    "memory.layers": {"functional"},
    "core": set(),
    "core.masks": set(),
    "core.kind": set(),
    "core.call": {"core.masks"},
    "core.options": set(),
    "core.table": set(),
    VARIANT_BASE: {"core.call", "core.kind", "core.options", "kernels.dispatch", "kernels.weighing"},
    "kernels": set(),
    "kernels.dispatch": {
        *("core.call", "core.masks", "functional.linear"),
        *("kernels", "kernels.linear", "kernels.linear_fla", "kernels.softmax_n"),
    },
    "variants": IDEAS,
    "core.compute": {
        *("core.call", "core.masks", VARIANT_BASE),
        *("kernels", "kernels.dispatch", "kernels.weighing", "kernels.weighted"),
    },
    "core.registry": {"core.kind", "core.options", "variants", VARIANT_BASE},
    "core.calibration": {"core.call"},
    "core.value_scale": {"core.call"},
    "tested": set(),
    "core.typed": set(),
    "core.swap": {
        *("core.call", "core.calibration", "core.compute", "core.masks", "core.registry"),
        *("core.value_scale", "kernels.dispatch", VARIANT_BASE),
    },
    "wiring": set(),
    "wiring.blocks": set(),
    "wiring.cache": {"functional.linear"},
    FAMILY_BASE: {"core.call", "families.source"},
    "families.source": set(),
    "wiring.seam": {"core.call", "core.compute", "core.masks", "core.registry", "core.swap"},
    "wiring.hooks": {"core.call", "core.swap", "families", "families.source", "wiring.cache", "wiring.seam"},
    "wiring.preconditions": {"wiring.cache"},
    "wiring.plan": {"core.swap", "families", "families.source", "wiring"},
    **{
        idea: {"functional", "functional.linear", "kernels", *KERNELS, VARIANT_BASE}
        | {"core.call", "core.kind", "core.masks", "core.options"}
        for idea in IDEAS
    },
    **{
        kernel: {"core.call", "functional", "functional.linear", "kernels", *KERNELS} for kernel in KERNELS - {DISPATCH}
    },
}
BELOW_PATCH = {*MAY, "wiring.install", "families"}
ABOVE_PATCH = {
    *("loading", "saving", "describe", "doctor", "cli", "demo", "conversion", "configurations", "training"),
    *("analysis", "quantization", "dynamics", "publish"),
}
PATCHED = ("PreTrainedModel", "PreTrainedConfig")
INTERFACES = ("masking_utils", "integrations", "modeling_utils", "AttentionInterface", "AttentionMaskInterface")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything a file imports, at any depth; names imported from a package too."""
    inside = (
        [NAME, *module_name(path).split(".")]
        if path.name == "__init__.py"
        else [NAME, *module_name(path).split(".")[:-1]]
    )
    inside = [part for part in inside if part]
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
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != NAME:
            continue
        inner = parts[1:]
        while inner and ".".join(inner) not in MODULES:
            inner = inner[:-1]
        found.add(".".join(inner))
    return found


GRAPH = {module_name(path): own(path) - {module_name(path)} for path in FILES}


def outside(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] != NAME}


@pytest.mark.parametrize("module", sorted(MAY))
def test_lower_half_imports_only_what_is_below_it(module: str) -> None:
    assert GRAPH[module] <= MAY[module]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_import_direction(path: Path) -> None:
    module, used, foreign = module_name(path), GRAPH[module_name(path)], outside(path)
    group = module.split(".")[0]
    heads = {name.split(".")[0] for name in used}
    if group in ("functional", "kernels", "variants", "families", "core") or module == "wiring.blocks":
        known = {name for name in foreign if name.split(".")[0] == "transformers"}
        # A core is found by the type of what it asks for its attention function, and not by a name.
        allowed = {"transformers.AttentionInterface"} if module == "families.source" else set()
        assert known <= allowed, "only the seam knows transformers"
    if group == "families":
        assert not used & IDEAS, "families know no variant"
    if group == "variants":
        assert "families" not in heads, "variants know no family"
    if module in BELOW_PATCH or group in BELOW_PATCH:
        assert "patch" not in used
        assert not heads & ABOVE_PATCH
    if module == "patch":
        assert not heads & (ABOVE_PATCH - {"describe"})
    if group in ("conversion", "analysis", "publish", "demo"):
        inner = {"wiring.seam", "wiring.hooks", "core.compute", "functional"}
        assert not used & inner or group == "analysis", "these go through patch"
    if module in ("publish.card", "analysis.plots"):
        known = {name.split(".")[0] for name in used - {"core", "core.table"}}
        assert not known & (BELOW_PATCH | {"patch"}), "reads results, never a model"
    if group != "cli":
        assert "cli" not in heads
        assert not any(name.split(".")[0] == CLI.name for name in foreign), "the command line is above the package"
    if module not in ("wiring.seam", "families.source", "wiring.preconditions"):
        assert not any(part in name.split(".") for name in foreign for part in INTERFACES), "the seam is one file"
    assert not any(name.split(".")[0] in ("recipes", "tests") for name in foreign)


def test_no_import_cycles() -> None:
    """Files only: a package's `__init__` imports its members, and members import the base beside it."""
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module in done:
            return
        for other in sorted(GRAPH.get(module, set()) - {""}):
            visit(other, (*trail, module))
        done.add(module)

    for module in sorted(MODULES - {""}):
        visit(module, ())


def test_one_place_changes_a_transformers_class() -> None:
    changed = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Attribute) and getattr(t.value, "id", "") in PATCHED for t in targets):
                changed[module_name(path)] = True
    assert set(changed) == {"loading"}


@pytest.mark.parametrize("path", [*FILES, *sorted(CLI.glob("*.py"))], ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_start_with_a_docstring_and_swallow_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module starts with one sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            assert not (silent and broad)


def test_no_catch_all_modules() -> None:
    assert not {"utils", "common", "helpers", "misc"} & {path.stem for path in FILES}
