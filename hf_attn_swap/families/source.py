"""Reads the source code of modules: what the forward of an attention module does with its arguments.

Releases of transformers rename arguments and attributes. So nothing is found by the name of an argument: the attention
function is found by its type, the first argument by its position, and the others by where the forward takes them.
The source is read once per class, before the model is changed. A module that cannot be swapped is therefore refused
when the model is patched, and not in the first forward pass.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from transformers import AttentionInterface

_OPERATIONS = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}
P = ParamSpec("P")
R = TypeVar("R")

# What the attention function of this package understands, or may ignore as transformers' SDPA function does.
KNOWN_KEYWORDS = frozenset(
    (
        *("query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "output_attentions"),
        *("softcap", "position_bias", "s_aux", "sinks"),
        *("sliding_window", "position_ids", "deterministic"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)


@dataclass(frozen=True, kw_only=True)
class InterfaceCall:
    """One call of the attention function in the forward of a module.

    Attributes:
        keywords: the keyword arguments of the call: the source of each expression, by the argument's name.
        passes_on: True if the forward passes its own `**kwargs` on to the attention function.
        mask: the parameter of the forward that is passed on as the mask and is used for nothing else, or None.
        given_mask: the source of the expression that is passed on as the mask; None if there is none.
    """

    keywords: dict[str, str]
    passes_on: bool
    mask: str | None
    given_mask: str | None


def _once_per_forward(read: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Keep what `read` finds in a class, for as long as the class has the same forward: programs may replace it."""
    results: dict[Any, R] = {}

    @wraps(read)
    def kept(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (getattr(cls, "forward", None), *args)
        if key not in results:
            results[key] = read(cls, *args, **kwargs)
        return results[key]

    return kept


def stock_class(module: nn.Module) -> Any:
    """The class of a module as transformers defines it, also where a swap or a wrapper has replaced the class."""
    return getattr(type(module), "stock_class", None) or type(module)


def is_core(cls: Any) -> bool:
    """True if the forward of this class asks transformers' `AttentionInterface` for the attention function."""
    return bool(_interfaces(cls))


@_once_per_forward
def interface_calls(cls: Any) -> tuple[InterfaceCall, ...]:
    """Every call of the attention function in the forward of this class. Empty if the class has no Python source."""
    return tuple(_described(call, cls) for call in _asking(cls))


def arguments(cls: Any) -> list[str]:
    """The names of the arguments of this class's forward, without `self`, in order; without `*args` and `**kwargs`."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    gathering = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in gathering]


@_once_per_forward
def unknown_keywords(cls: Any) -> tuple[str, ...]:
    """Arguments that the forward gives to the attention function, and that this package has no meaning for."""
    given = {name: value for call in interface_calls(cls) for name, value in call.keywords.items()}
    return tuple(name for name, value in given.items() if name not in KNOWN_KEYWORDS and value != "None")


@_once_per_forward
def asks_again(cls: Any) -> bool:
    """True if the forward of this class asks for the attention function several times in every call."""
    always = _always(cls)
    return sum(id(call) in always for call in _asking(cls)) > 1


@_once_per_forward
def mentions(cls: Any, path: str) -> bool:
    """True if the forward of this class reaches for `self.<path>`."""
    return f"self.{path}" in map(ast.unparse, _nodes(cls, ast.Attribute))


@_once_per_forward
def names_implementation(cls: Any) -> bool:
    """True if the forward of this class does something else if the attention implementation is called "sdpa".

    Under another name, such a module chooses keys by arguments that SDPA does not know (sparse attention).
    """
    return any(map(_is_for_sdpa, _nodes(cls, ast.Compare)))


@_once_per_forward
def slices_unmasked(cls: Any) -> bool:
    """True if a method of this class does something else if the attention implementation is called "sdpa".

    A model may drop tokens between two of its layers. It knows that SDPA takes no mask for causal order, from which the
    places of the other tokens could not be told. Under another name, it expects a mask.
    """
    try:
        nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
    except (OSError, TypeError):  # no Python source
        return False
    return any(map(_is_for_sdpa, nodes))


def _is_for_sdpa(node: ast.AST) -> bool:
    """True for a comparison of the attention implementation's name with "sdpa"."""
    return (
        isinstance(node, ast.Compare)
        and "_attn_implementation" in ast.unparse(node.left)
        and "'sdpa'" in ast.unparse(node.comparators[0])
    )


@_once_per_forward
def borrows_unless(cls: Any) -> tuple[str, bool] | None:
    """The attribute that decides whether the forward of this class gives keys to the cache, and the value if it does.

    A layer that does not takes the keys and values of another layer. None if no attribute decides this.
    """
    for node in _nodes(cls, ast.If):
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            if not _updates(part for statement in branch for part in ast.walk(statement)):
                continue
            for part in node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]:
                denied = isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
                named = part.operand if isinstance(part, ast.UnaryOp) and denied else part
                if (attribute := _own(named)) is not None:
                    return attribute, wanted is not denied
    return None


def _updates(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """The calls of a method `update` among these nodes, by which a cache takes keys and values."""
    calls = (node for node in nodes if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "update"]


@_once_per_forward
def mixes_mask(cls: Any) -> bool:
    """True if the forward of this class computes numbers that it adds to the scores by way of the mask."""
    values = [value for mask in _masks(cls) for value in _assigned(mask, cls)]
    return any(_is_sum(part) for value in values for part in ast.walk(value))


def _masks(cls: Any) -> set[str]:
    """The expressions that the forward of this class gives to the attention function as its mask."""
    return {call.given_mask for call in interface_calls(cls) if call.given_mask is not None}


def _is_sum(node: ast.AST) -> bool:
    """True for a sum, a product, or what a method of the module computes."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult))
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")


@_once_per_forward
def reads_mask(cls: Any) -> bool:
    """True if the forward of this class looks into its mask, and does not only hand it on."""
    masks, plain = _masks(cls), (ast.Name, ast.IfExp, ast.Constant)  # another name, or a choice of names
    names = {name for mask in masks for name in _origins(ast.parse(mask, mode="eval").body, cls)}
    if any(not isinstance(value, plain) for mask in masks for value in _assigned(mask, cls)):
        return True
    return any(_name(node.value) in names for node in _nodes(cls, (ast.Subscript, ast.Attribute)))


@_once_per_forward
def moves_windows(cls: Any) -> bool:
    """True if the forward of this class, a block, cuts its tokens into windows before the attention."""
    calls = map(ast.unparse, _nodes(cls, ast.Call))
    cuts = (call if ".reshape(" in call or ".view(" in call else call.partition("(")[0] for call in calls)
    return any("window" in call for call in cuts)


@_once_per_forward
def hands_keywords_on(cls: Any, child: str, index: int | None = None) -> bool | None:
    """True if the forward of this class gives its `**kwargs` to `self.<child>`; None if it is not seen to call it.

    Args:
        cls: the class of the parent.
        child: the name of a submodule, or of a list of modules.
        index: which module of the list; None for a submodule.
    """
    names = {f"self.{child}"}
    for node in [*_nodes(cls), *_nodes(cls)]:  # twice: a name may be bound before what it is bound to
        if isinstance(node, (ast.For, ast.comprehension)) and any(name in ast.unparse(node.iter) for name in names):
            names |= {target.id for target in ast.walk(node.target) if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).split("[")[0] in names:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    calls = [call for call in _nodes(cls, ast.Call) if _calls_one(call, names, index)]
    return any(_passes_on(call, cls) for call in calls) if calls else None


def _passes_on(call: ast.Call, cls: Any) -> bool:
    """True if a call in the forward of this class is given the forward's own `**kwargs`."""
    forward = _function(cls)
    kwargs = None if forward is None else forward.args.kwarg
    given = [keyword.value for keyword in call.keywords if keyword.arg is None]
    return kwargs is not None and any(_name(value) == kwargs.arg for value in given)


def _calls_one(call: ast.Call, names: set[str], index: int | None) -> bool:
    """True if a call is one of a module with one of these names, or of the list's module of this number."""
    if isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) in names:
        number = call.func.slice
        return index is None or not isinstance(number, ast.Constant) or number.value == index
    return ast.unparse(call.func) in names


@_once_per_forward
def cache_index(cls: Any) -> str | None:
    """The attribute that the forward gives to the cache's `update` as the number of its layer; None if it gives none.

    `cache.update(key, value, self.layer_idx)` has the attribute `layer_idx`, whatever the cache is called.
    """
    given = (_own(call.args[2]) for call in _updates(_nodes(cls)) if len(call.args) > 2)
    return next((attribute for attribute in given if attribute is not None), None)


@_once_per_forward
def updates_cache(cls: Any) -> bool:
    """True if the forward of this class gives keys and values to a cache."""
    return bool(_updates(_nodes(cls)))


@_once_per_forward
def other_states(cls: Any, key: str | None) -> tuple[str, ...]:
    """The arguments of the forward, beside the first, that it projects to keys by `self.<key>`.

    A module with such an argument attends to another sequence whenever the argument is given: it is called
    `encoder_hidden_states` or `key_value_states` in most models.
    """
    return tuple(name for name in projected(cls, key) if name != arguments(cls)[0])


@_once_per_forward
def projected(cls: Any, path: str | None) -> tuple[str, ...]:
    """The arguments of the forward whose tensors it gives to `self.<path>`; empty if the source does not show them."""
    names = {name for call in _calls(cls, path) if call.args for name in _origins(call.args[0], cls)}
    return tuple(name for name in _parameters(cls)[1:] if name in names)


@_once_per_forward
def called(cls: Any) -> frozenset[str]:
    """The submodules that the forward of this class calls: X of each `self.X(...)`."""
    return _submodules(_nodes(cls))


@_once_per_forward
def handed_on(cls: Any, child: str) -> tuple[tuple[str, str], ...]:
    """By which name the forward of this class gives each of its own arguments to `self.<child>`: (own, child's)."""
    own, keywords = _parameters(cls), [keyword for call in _calls(cls, child) for keyword in call.keywords]
    given = [(_name(keyword.value), keyword.arg) for keyword in keywords]
    return tuple((str(name), other) for name, other in given if name in own and other is not None)


@_once_per_forward
def returns_tuple(cls: Any) -> bool:
    """True if the forward of this class returns a tuple; False if it returns one tensor."""
    values = [node.value for node in _nodes(cls, ast.Return)]
    assigned = [node for value in values for node in (value, *_assigned(_name(value) or "", cls))]
    return any(isinstance(side, ast.Tuple) for node in assigned for side in (node, getattr(node, "left", None)))


@_once_per_forward
def passed_through(cls: Any, path: str | None) -> frozenset[str]:
    """The submodules that a tensor passes before the forward of this class gives it to `self.<path>`."""
    given = [call.args[0] for call in _calls(cls, path) if call.args]
    values = [*given, *(value for node in given for value in _assigned(_name(node) or "", cls))]
    return _submodules(part for value in values for part in ast.walk(value)) - {path}


def _submodules(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """X of each call `self.X(...)` among these nodes."""
    return frozenset(filter(None, (_own(node.func) for node in nodes if isinstance(node, ast.Call))))


def _origins(node: ast.AST, cls: Any, seen: frozenset[str] = frozenset()) -> set[str]:
    """The arguments of the forward that a tensor comes from, through names, choices, methods and sums.

    Of a sum, only the first term counts: the second is what positions or a norm add.
    """
    if isinstance(node, ast.Name):
        if node.id in seen:
            return set()
        given = {node.id}.intersection(_parameters(cls))
        return given.union(*(_origins(value, cls, seen | {node.id}) for value in _assigned(node.id, cls)))
    parts: list[ast.expr] = []
    match node:
        case ast.IfExp(body=one, orelse=other):
            parts = [one, other]
        case ast.BoolOp(values=values):
            parts = values
        case ast.BinOp(left=part) | ast.Subscript(value=part):
            parts = [part]
        case ast.Call(func=ast.Attribute(value=part)) if _name(part) != "self":
            parts = [part]
        case ast.Call(args=arguments_given):
            parts = arguments_given[:1]
    return set[str]().union(*(_origins(part, cls, seen) for part in parts))


@_once_per_forward
def scales(cls: Any, projections: tuple[str | None, ...]) -> tuple[ast.AST | None, ...]:
    """What the forward of this class multiplies its queries and keys by, behind their projections.

    Each factor is an expression, which `number` may be able to read. None stands for what is no plain factor: a product
    of two tensors, what a method of the module computes, or a factor that depends on a condition.

    Args:
        cls: the class of an attention module.
        projections: the paths from the module to the projections of its queries and keys.
    """
    factors: dict[int, ast.AST | None] = {}  # by the node: queries and keys pass some nodes together
    always, seen = _always(cls), set[str]()

    def follow(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            for value in _values(node.id, cls):
                follow(value)
        elif isinstance(node, ast.IfExp):
            follow(node.body)
            follow(node.orelse)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            turned = _is_number(node.left) and isinstance(node.op, ast.Mult)
            tensor, factor = (node.right, node.left) if turned else (node.left, node.right)
            inverse = ast.BinOp(ast.Constant(1.0), ast.Div(), factor) if isinstance(node.op, ast.Div) else factor
            factors[id(node)] = inverse if _is_number(factor) and id(node) in always else None
            follow(tensor)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("self.")
            if isinstance(node.func, ast.Attribute) and _name(node.func.value) != "self":
                if node.func.attr.startswith(("mul", "div")):
                    factors[id(node)] = None
                follow(node.func.value)
            elif name not in projections:
                method = _function(cls, name)
                if method is not None and any(isinstance(part, (ast.Mult, ast.Div)) for part in ast.walk(method)):
                    factors[id(node)] = None
                for given in node.args[:2]:  # a rotary embedding takes queries and keys, then its angles
                    follow(given)

    for call in _asking(cls):
        for node in (*call.args[1:3], *(part.value for part in call.keywords if part.arg in ("query", "key"))):
            follow(node)
    return tuple(factors.values())


def number(expression: ast.AST | None, module: nn.Module) -> float | None:
    """The value of an expression of numbers and of attributes of a module; None if it is no such expression."""
    match expression:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inside = number(operand, module)
            return None if inside is None else -inside
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            held = getattr(module, name, None)
            return float(held) if isinstance(held, (int, float)) else None
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            one, other = number(left, module), number(right, module)
            return None if one is None or other is None else float(_OPERATIONS[type(op)](one, other))
    return None


def _is_number(node: ast.AST) -> bool:
    """True if an expression consists of numbers and of attributes of the module."""
    known = (ast.Constant, ast.Attribute, ast.Name, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    parts = list(ast.walk(node))
    return all(isinstance(part, known) and (not isinstance(part, ast.Name) or part.id == "self") for part in parts)


def _values(name: str, cls: Any) -> Iterator[ast.AST]:
    """As `_assigned`, with what the name is assigned together with other names, and by an operator."""
    for node in _nodes(cls):
        if isinstance(node, ast.Assign) and any(
            _name(part) == name for target in node.targets for part in getattr(target, "elts", [target])
        ):
            yield node.value
        elif isinstance(node, ast.AugAssign) and _name(node.target) == name:
            yield ast.copy_location(ast.BinOp(ast.Name(name), node.op, node.value), node)


def _assigned(name: str, cls: Any) -> Iterator[ast.AST]:
    """Every expression that the forward of this class assigns to this name alone."""
    for node in _nodes(cls, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and name in map(_name, targets):
            yield node.value


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


@_once_per_forward
def given_other_states(parent: Any, child: str, core: Any, others: tuple[str, ...]) -> tuple[bool, bool] | None:
    """Whether the parent's forward calls `self.<child>` with the states of another sequence.

    Args:
        parent: the class of the parent.
        child: the name of the core in the parent.
        core: the class of the core.
        others: the arguments of the core that are the states of another sequence, see `other_states`.

    Returns:
        Whether such an argument is given; and whether what is given is surely there: an argument that the parent only
        passes on may be None. None means that the forward never calls the child.
    """
    calls, own = _calls(parent, child), _parameters(parent)[1:]
    if not calls:
        return None
    names = [_name(value) for call in calls for value in _states_given(call, core, others)]
    names = [name for name in names if name is None or name not in own[:1]]
    return bool(names), any(name not in own for name in names)


def _states_given(call: ast.Call, core: Any, others: tuple[str, ...]) -> Iterator[ast.AST]:
    """What a call gives for the arguments `others` of a core, by position or by name, if that is not plainly None."""
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    for name, value in [*zip(arguments(core), call.args, strict=False), *named]:
        if name in others and not (isinstance(value, ast.Constant) and value.value is None):
            yield value


@_once_per_forward
def learned_input(cls: Any, child: str) -> str | None:
    """The attribute of this module that its forward passes to `self.<child>`, or None.

    Such a module feeds its own parameter, and not a tensor of the caller, into the projection.
    """
    bound = {_name(node.targets[0]): node.value for node in _nodes(cls, ast.Assign)}
    for given in (call.args[0] for call in _calls(cls, child) if call.args):
        words = ast.unparse(bound.get(_name(given) or "", given)).split(".")
        if words[0] == "self" and len(words) > 1:
            return words[1]
    return None


@_once_per_forward
def _interfaces(cls: Any) -> frozenset[str]:
    """The global names in the forward of this class that stand for an `AttentionInterface`."""
    forward: Any = inspect.unwrap(cls.forward) if hasattr(cls, "forward") else None
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    used = code.co_names if code is not None else ()
    return frozenset(name for name in used if isinstance(names.get(name), AttentionInterface))


def _asking(cls: Any) -> list[ast.Call]:
    """The calls of the attention function in the forward of this class."""
    interfaces = _interfaces(cls)
    names = {name for node in _nodes(cls) for name in _bound_to(node, interfaces)}
    return [call for call in _nodes(cls, ast.Call) if _name(call.func) in names]


def _calls(cls: Any, path: str | None) -> list[ast.Call]:
    """The calls of `self.<path>` in the forward of this class; none if the path is None."""
    return [call for call in _nodes(cls, ast.Call) if ast.unparse(call.func) == f"self.{path}"]


def _always(cls: Any) -> set[int]:
    """The nodes in the forward of this class that run in every call, by their id."""
    forward = _function(cls)
    steps = [] if forward is None else forward.body
    return {id(node) for step in steps if not isinstance(step, ast.If) for node in ast.walk(step)}


def _parameters(cls: Any) -> list[str]:
    """The names of the positional arguments in the source of this class's forward, with `self`."""
    forward = _function(cls)
    return [] if forward is None else [argument.arg for argument in forward.args.args]


def _nodes(cls: Any, kinds: Any = ast.AST) -> list[Any]:
    """The nodes of these kinds in the forward of this class; none if the class has no Python source."""
    return [node for node in _walked(getattr(cls, "forward", None)) if isinstance(node, kinds)]


@cache
def _walked(function: Any) -> tuple[ast.AST, ...]:
    """The nodes of a function."""
    parsed = _parsed(function)
    return () if parsed is None else tuple(ast.walk(parsed))


def _function(cls: Any, method: str = "forward") -> ast.FunctionDef | None:
    """The parsed forward of a class, or another method; None if the class has no Python source of it."""
    return _parsed(getattr(cls, method, None))


@cache
def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):  # no Python source: built in, compiled, or no forward at all
        return None
    parsed = ast.parse(source).body[0]
    return parsed if isinstance(parsed, ast.FunctionDef) else None


def _bound_to(node: ast.AST, interfaces: frozenset[str]) -> list[str]:
    """The names that this statement gives to what one of the interfaces returns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    asked = node.value is not None and any(_name(inner) in interfaces for inner in ast.walk(node.value))
    return [target.id for target in targets if asked and isinstance(target, ast.Name)]


def _described(call: ast.Call, cls: Any) -> InterfaceCall:
    """The facts about one call of the attention function in the forward of this class."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    given = keywords.get("attention_mask", ast.unparse(call.args[4]) if len(call.args) > 4 else None)
    uses = [node for node in _nodes(cls, ast.Name) if node.id == given]
    return InterfaceCall(
        keywords=keywords,
        passes_on=_passes_on(call, cls),
        mask=given if given in _parameters(cls) and len(uses) == 1 else None,
        given_mask=None if given == "None" else given,
    )


def _own(node: ast.AST | None) -> str | None:
    """X of an expression `self.X`; None for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) and _name(node.value) == "self" else None


def _name(node: ast.AST | None) -> str | None:
    """The variable that an expression consists of; None for any other expression."""
    return node.id if isinstance(node, ast.Name) else None
