"""What a patched model carries: its own config, the hooks, the swapped containers, and the way back.

One `Installation` per model, on the outermost `PreTrainedModel`, as the plain attribute `attn_swap_installation`.
It holds modules and handles only, so deep copies and pickles of the model take it along.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.swap import Swap
from ..families import Site, sites, stock_class
from . import hooks, seam
from .blocks import BLOCKS, swapped_class

ATTRIBUTE = "attn_swap_installation"
VERSION = 1


def model_root(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model in `model`.

    Raises:
        ValueError: there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model; pass what from_pretrained returned.")


def installation_of(root: PreTrainedModel) -> Installation | None:
    """The installation of this model, None if it is not patched.

    Raises:
        ValueError: only a part of it is patched, or it is a part of a patched model.
    """
    own = root.__dict__.get(ATTRIBUTE)
    if isinstance(own, Installation):
        return own
    for name, module in root.named_modules():
        if module.__dict__.get(ATTRIBUTE) is not None:
            raise ValueError(
                f"the part {name!r} is patched on its own; call unpatch_model on it, then patch the whole."
            )
    if any(_is_swap(getattr(site.core, "attn_swap", None)) for site in sites(root)):
        raise ValueError(f"this {type(root).__name__} is part of a patched model; call this on the whole model.")
    return None


def _is_swap(child: object) -> bool:
    return isinstance(child, nn.Module)


@dataclass
class Installation:
    """The way back, for one model.

    Attributes:
        root: the outermost transformers model.
        configs: every module that has a config, with the object it had.
        handles: of all hooks.
        containers: modules whose class was swapped.
        loaded: the model was rebuilt from a converted checkpoint, so there is no stock config object to return to.
    """

    root: PreTrainedModel
    configs: list[tuple[nn.Module, PreTrainedConfig]]
    handles: list[RemovableHandle] = field(default_factory=list)
    containers: list[nn.Module] = field(default_factory=list)
    loaded: bool = False

    @classmethod
    def start(cls, model: nn.Module, root: PreTrainedModel, *, loaded: bool = False) -> Installation:
        """Give the model its own copy of its config, shared by its submodules as before, and our attention.

        Raises:
            ValueError: some attention module could not be switched to our attention; the model is unchanged then.
        """
        memo: dict[int, Any] = {}
        configs: list[tuple[nn.Module, PreTrainedConfig]] = []
        for module in model.modules():
            config = module.__dict__.get("config")
            if isinstance(config, PreTrainedConfig):
                configs.append((module, config))
                module.__dict__["config"] = copy.deepcopy(config, memo)
        installation = cls(root=root, configs=configs, loaded=loaded)
        root.set_attn_implementation(seam.NAME)
        for site in sites(root):
            if site.core.config._attn_implementation != seam.NAME:  # type: ignore[union-attr]  # every core has one
                installation.remove()
                raise ValueError(f"{site.path}: transformers does not let this model change its attention.")
        root.__dict__[ATTRIBUTE] = installation
        return installation

    def wire(self) -> None:
        """Put every hook and class in place for the swaps that are attached; anything there before goes first."""
        self._unwire()
        found = sites(self.root)
        stacks = _stacks(self.root, found)
        orders: dict[int, int] = {}
        layers: dict[int, nn.Module] = {}
        highest: dict[int, Any] = {}  # by stack, the last swap that carries scores
        for site, stack in zip(found, stacks, strict=True):
            swap = getattr(site.core, "attn_swap", None)
            if not _is_swap(swap):
                site.core.__dict__["attn_swap"] = None
                continue
            for each in _each(swap):
                self._describe(each, site)
                if each.carries:
                    each.order = None if site.family.shared else orders.setdefault(id(stack), 0)
            if any(each.carries for each in _each(swap)):
                orders[id(stack)] = orders.get(id(stack), 0) + 1
                highest[id(stack)] = swap
            self._hook(site, next(_each(swap)))
            if any(each.carries or each.wants_residual for each in _each(swap)):
                layer = layer_of(self.root, site.path)
                layers[id(layer)] = layer
        for swap in highest.values():
            for each in _each(swap):
                each.last = each.order is not None
        for layer in layers.values():
            self._pre(layer, hooks.before_layer)
        for stack in {id(stack): stack for stack in stacks if _takes_keywords(stack)}.values():
            self._pre(stack, hooks.before_stack)
            self.handles.append(stack.register_forward_hook(hooks.after_stack, with_kwargs=True))

    @staticmethod
    def _describe(swap: Swap, site: Site) -> None:
        names = list(inspect.signature(type(site.container).forward).parameters)[1:]
        swap.cache_position = next((names.index(name) for name in seam.CACHES if name in names), None)
        kinds = getattr(site.core.config, "layer_types", None) or ()
        swap.uniform, swap.last = len(set(kinds)) <= 1, False
        swap.mask_position = names.index("attention_mask") if "attention_mask" in names else None
        swap.folded_path = site.family.output if swap.keeps_projection else site.family.value
        swap.dropout_path = site.family.dropout if site.family.block == "core" else None

    def _hook(self, site: Site, swap: Swap) -> None:
        block = BLOCKS.get(site.family.block)
        self._pre(site.container, hooks.before_bert if site.family.block == "bert" else hooks.before_core)
        if not swap.writes:
            return
        if block is None:
            self.handles.append(site.container.register_forward_hook(hooks.after_core, with_kwargs=True))
            return
        stock = stock_class(site.container)
        site.container.__class__ = swapped_class(stock, block, hooks.finish, seam.attention_forward)
        self.containers.append(site.container)

    def _pre(self, module: nn.Module, hook: Any) -> None:
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _unwire(self) -> None:
        for handle in self.handles:
            handle.remove()
        for container in self.containers:
            container.__class__ = stock_class(container)
        self.handles, self.containers = [], []

    def swaps(self) -> dict[int, list[Swap]]:
        """By layer number, the swap of each swapped layer (several where PEFT keeps copies)."""
        usable = [site for site in sites(self.root) if site.usable]
        children = {index: getattr(site.core, "attn_swap", None) for index, site in enumerate(usable)}
        return {index: list(_each(child)) for index, child in children.items() if _is_swap(child)}

    def refuse_merged(self, what: str, layers: Iterable[int] | None = None) -> None:
        """Guard what a merged calibration makes wrong.

        Raises:
            ValueError: one of these layers (None: any) has a calibration in its weights.
        """
        swapped = self.swaps()
        wanted = swapped if layers is None else layers
        if merged := [index for index in wanted if index in swapped and swapped[index][0].merged is not None]:
            raise ValueError(
                f"layers {merged} cannot be {what}: a calibration was merged into their weights, which are no longer "
                "the pretrained ones; load the model from before the merge."
            )

    def refresh(self) -> None:
        """Make phases, buffers and the config's block say what the strengths are."""
        swapped = self.swaps()
        carrying = any(swap.carries and swap.strength > 0 for group in swapped.values() for swap in group)
        for group in swapped.values():
            for swap in group:
                swap.set_strength(swap.strength, never_off=carrying and swap.carries)
        groups: dict[str, dict[str, Any]] = {}
        for index, group in swapped.items():
            spec = group[0].spec()
            groups.setdefault(repr(spec), {**spec, "layers": []})["layers"].append(index)
        count = sum(site.usable for site in sites(self.root))
        self.root.config.attn_swap = {"version": VERSION, "modules": count, "swaps": list(groups.values())}
        self.root.config.attn_implementation = seam.NAME

    def remove(self) -> None:
        """Put the stock model back."""
        self._unwire()
        for site in sites(self.root):
            if hasattr(site.core, "attn_swap"):
                del site.core.attn_swap
        for module, config in self.configs:
            module.__dict__["config"] = config
        self.root.__dict__.pop(ATTRIBUTE, None)
        if self.loaded:
            _forget(self.root)


def _each(child: Any) -> Iterator[Swap]:
    return (module for module in child.modules() if isinstance(module, Swap))


def _forget(root: PreTrainedModel) -> None:
    """Make a model that was loaded converted a stock one: no block, and transformers' default attention."""
    for config in {id(c): c for module in root.modules() if (c := module.__dict__.get("config")) is not None}.values():
        for name in ("attn_swap", "attn_implementation"):
            config.__dict__.pop(name, None)
    try:
        root.set_attn_implementation("sdpa")
    except ValueError:  # an architecture without SDPA
        root.set_attn_implementation("eager")


def _stacks(root: PreTrainedModel, found: list[Site]) -> list[PreTrainedModel]:
    """For each site, the nearest transformers model around it: its layers share one forward pass."""
    models = {name: module for name, module in root.named_modules() if isinstance(module, PreTrainedModel)}
    parts = [[".".join(site.path.split(".")[:end]) for end in range(site.path.count("."), -1, -1)] for site in found]
    return [next((models[name] for name in prefixes if name in models), root) for prefixes in parts]


def layer_of(root: nn.Module, path: str) -> nn.Module:
    """The block around a core: its nearest ancestor in a list of modules, or the core itself."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if parts[end - 1].isdigit():
            return root.get_submodule(".".join(parts[:end]))
    return root.get_submodule(path)


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
