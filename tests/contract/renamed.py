"""Writes transformers' own modelling files again with other names, as a later release may have them.

`renamed("llama", {"cache": "memory"}, tmp_path)` is the module `modeling_llama`, in which the attention class calls its
argument `cache` by the name `memory`, and every caller in the file follows.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import Cache

from hf_attn_swap.families import FAMILIES

CALLED = {"bert": "self.self", "gpt2": "self.attn", "llama": "self.self_attn", "opt": "self.self_attn"}  # by its caller


def core_of(family: str) -> str:
    """The class name of a family's attention module."""
    return next(family_class.core for family_class in FAMILIES.values() if family_class.name == family)


def modelling(family: str) -> ModuleType:
    """The module of transformers with the models of a family."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def arguments_of(family: str) -> list[str]:
    """The names of the arguments of the attention's forward, without `self` and `kwargs`."""
    core = getattr(modelling(family), core_of(family))
    parameters = list(inspect.signature(core.forward).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]


def cache_argument(family: str) -> str | None:
    """The argument that is annotated as a cache, or None: its name differs between releases of transformers."""
    core = getattr(modelling(family), core_of(family))
    annotated = inspect.signature(core.forward).parameters.items()
    return next((name for name, parameter in annotated if Cache.__name__ in str(parameter.annotation)), None)


class _Rename(ast.NodeTransformer):
    """Gives arguments and attributes of one class, and of its callers in the file, other names."""

    def __init__(
        self, family: str, arguments: Mapping[str, str], attributes: Mapping[str, str], keywords: Mapping[str, str]
    ) -> None:
        self.core, self.called = core_of(family), CALLED.get(family, "self.attention")
        self.arguments, self.attributes, self.keywords = arguments, attributes, keywords
        self.inside: list[str] = []
        self.count = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self.inside == [self.core] and node.name == "forward":
            node.decorator_list = []  # they name the arguments that are deprecated
            self.inside.append("forward")
            self.generic_visit(node)
            self.inside.pop()
            return node
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        if self.inside == [self.core, "forward"]:
            node.arg = self._changed(self.arguments, node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        if self.inside == [self.core, "forward"]:
            node.id = self._changed(self.arguments, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        owner = ast.unparse(node.value)
        if (owner == "self" and self.inside[:1] == [self.core]) or (owner == "module" and not self.inside):
            node.attr = self._changed(self.attributes, node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        target = ast.unparse(node.func)
        if self.inside[:1] != [self.core] and target == self.called:
            for keyword in node.keywords:
                keyword.arg = self._changed(self.arguments, keyword.arg)
        if self.inside[:1] == [self.core] and target == "attention_interface":
            for keyword in node.keywords:
                keyword.arg = self._changed(self.keywords, keyword.arg)
        return node

    def _changed(self, names: Mapping[str, str], name: Any) -> Any:
        self.count += name in names
        return names.get(name, name)


def renamed(
    family: str,
    folder: Path,
    *,
    arguments: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    keywords: Mapping[str, str] | None = None,
) -> ModuleType:
    """The family's modelling file with other names, as a module beside the original.

    Args:
        family: the name of the family.
        folder: where the new source is written; `inspect` reads it there.
        arguments: new names of arguments of the attention's forward.
        attributes: new names of attributes of the attention module.
        keywords: new names of the arguments that the forward gives to the attention function.
    """
    source = modelling(family)
    assert source.__file__ is not None
    tree = ast.parse(Path(source.__file__).read_text("utf-8"))
    change = _Rename(family, arguments or {}, attributes or {}, keywords or {})
    tree = ast.fix_missing_locations(change.visit(tree))
    assert change.count, "nothing in the file has such a name"
    path = folder / f"modeling_{family}.py"
    path.write_text(ast.unparse(tree), encoding="utf-8")
    name = f"{source.__name__}_renamed"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # transformers reads the source of a model's module there
    spec.loader.exec_module(module)
    return module
