"""Reads the source code of modules: how a module calls the attention function, and how its parent calls the module.

The source is read once per class, before the model is changed. A module that cannot be swapped is therefore refused
when the model is patched, and not in the first forward pass.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

OTHERS = ("encoder_hidden_states", "key_value_states", "encoder_states", "context_states")


@dataclass(frozen=True, kw_only=True)
class InterfaceCall:
    """One call of the attention function in the forward of a module.

    Attributes:
        keywords: the keyword arguments of the call: the source of each expression, by the argument's name.
        passes_on: True if the forward passes its own `**kwargs` on to the attention function.
        mask: the parameter of the forward that is passed on as the mask and is used for nothing else, or None.
    """

    keywords: dict[str, str]
    passes_on: bool
    mask: str | None


@cache
def interface_calls(cls: Any) -> tuple[InterfaceCall, ...]:
    """Every call of the attention function in the forward of this class. Empty if the class has no Python source."""
    forward = _function(cls)
    if forward is None:
        return ()
    names = {name for node in ast.walk(forward) for name in _bound_to_interface(node)}
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call) and _name(node.func) in names]
    return tuple(_described(call, forward) for call in calls)


@cache
def built_by_implementation(cls: Any) -> bool:
    """True if the constructor of this class chooses submodules by the name of the attention implementation.

    Such a model could be patched, but transformers has no submodule for the name `hf_attn_swap`. A saved swap could
    therefore not be loaded.
    """
    try:
        return "_attn_implementation](" in inspect.getsource(cls.__init__)
    except (OSError, TypeError):  # no Python source: built in, or compiled
        return False


@cache
def given_other_states(parent: Any, child: str) -> bool | None:
    """True if the parent's forward calls `self.<child>` with the states of another sequence.

    None means that the forward never calls the child. A decoder layer can have two modules of one class: it calls the
    first with its own states, and the second with the states of the encoder. This function tells them apart. For a
    child without such a sibling the answer has no meaning, because a container may pass on an argument that is always
    None.
    """
    forward = _function(parent)
    if forward is None:
        return None
    calls = [
        node for node in ast.walk(forward) if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{child}"
    ]
    if not calls:
        return None
    return any(_given(keyword) for call in calls for keyword in call.keywords)


@cache
def learned_input(cls: Any, child: str) -> str | None:
    """The attribute of this module that its forward passes to `self.<child>`, or None.

    Such a module feeds its own parameter, and not a tensor of the caller, into the projection.
    """
    forward = _function(cls)
    if forward is None:
        return None
    bound = {
        node.targets[0].id: node.value
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{child}" and node.args:
            name = _name(node.args[0])
            words = ast.unparse(bound.get(name or "", node.args[0])).split(".")
            if words[0] == "self" and len(words) > 1:
                return words[1]
    return None


def _given(keyword: ast.keyword) -> bool:
    """True if this argument passes the states of another sequence."""
    empty = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
    return keyword.arg in OTHERS and not empty and _name(keyword.value) != "hidden_states"


def _function(cls: Any) -> ast.FunctionDef | None:
    """The parsed forward of a class; None if the class has no Python source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError, AttributeError):  # no Python source: built in, compiled, or no forward at all
        return None
    found = ast.parse(source).body[0]
    return found if isinstance(found, ast.FunctionDef) else None


def _bound_to_interface(node: ast.AST) -> list[str]:
    """The names that this statement gives to what `get_interface(...)` returns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    asked = node.value is not None and "get_interface(" in ast.unparse(node.value)
    return [target.id for target in targets if asked and isinstance(target, ast.Name)]


def _described(call: ast.Call, forward: ast.FunctionDef) -> InterfaceCall:
    """The facts about one call of the attention function."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    kwargs = forward.args.kwarg
    passes_on = any(
        keyword.arg is None and kwargs is not None and _name(keyword.value) == kwargs.arg for keyword in call.keywords
    )
    given = keywords.get("attention_mask", ast.unparse(call.args[4]) if len(call.args) > 4 else None)
    parameters = {argument.arg for argument in forward.args.args}
    uses = [node for node in ast.walk(forward) if _name(node) == given]
    mask = given if given in parameters and len(uses) == 1 else None
    return InterfaceCall(keywords=keywords, passes_on=passes_on, mask=mask)


def _name(node: ast.AST | None) -> str | None:
    """The variable that an expression consists of; None for any other expression."""
    return node.id if isinstance(node, ast.Name) else None
