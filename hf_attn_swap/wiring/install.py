"""Puts swaps into a model, describes them in the config, and takes them out again.

The outermost `PreTrainedModel` holds one `Record` as the plain attribute `attn_swap_installation`. The record holds
the hooks and the replaced containers, but never the model itself. Deep copies and pickles of the model therefore
contain the record, and `del model` frees the model at once, without the garbage collector. `Installation` joins the
record and its model; a function that needs both makes a new `Installation`.

To find the attention modules of a model, the source of their classes is read. This takes 25 times as long as a walk
over all modules, so an `Installation` does it once, for one call of the package. It is not kept in the model: layers
can be removed, appended or moved between two calls, and only the same search would show it. What lives longer than a
call, such as a trainer or a teacher, keeps the model and makes a new `Installation` for each use. A call that makes
many of them, such as `convert`, searches once for all (`searched_once`).
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ..families import Site, sites, stock_class
from ..families.source import arguments, handed_on, returns_tuple, slices_unmasked
from ..layer.swap import Phase, Swap
from . import adapters, hooks, implementations, preconditions, seam
from .blocks import BLOCKS, Block, Facts, swapped_class
from .layers import Layer, layers_at, swaps_in
from .placed import Placed, encoder_of, orders_of, places_of, takes_keywords
from .positions import FromFirstSeen

ATTRIBUTE = "attn_swap_installation"
CONFIGS = "attn_swap_configs"  # an attribute of each module with a config: the config from before patching, and ours
SITES = "attn_swap_sites"  # an attribute of a root: the modules found, during a call that moves none
VERSION = 1
OF_A_SWAP = ("attn_swap", "attn_implementation", "_attn_implementation_internal", seam.MASKS, "auto_map")
OF_A_SAVE = (*OF_A_SWAP, "architectures", "dtype", "transformers_version", "_name_or_path")
MISSING = object()


def model_root(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model in `model`.

    Raises:
        ValueError: `model` is no module, holds no transformers model, or several beside each other.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(_no_module(model))
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise ValueError(f"{type(model).__name__} holds no transformers model; pass what from_pretrained returned.")
    inside = {id(module) for module in models[0].modules()}
    if outside := next((module for module in models if id(module) not in inside), None):
        raise ValueError(
            f"{type(model).__name__} holds several transformers models ({type(models[0]).__name__} and "
            f"{type(outside).__name__}); pass one of them."
        )
    return models[0]


def _no_module(given: Any) -> str:
    """The error for an argument that is no module: what to pass instead."""
    if isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        return (
            f"the model must be a loaded model, got the name {name!r}; load the model first, for example by "
            f"AutoModelForCausalLM.from_pretrained({name!r})."
        )
    if isinstance(inside := getattr(given, "model", None), nn.Module):
        return (
            f"the model must be a module, got a {type(given).__name__} around a {type(inside).__name__}; pass its "
            "attribute `model`, which changes in place."
        )
    return f"the model must be a module, got {type(given).__name__}; pass what from_pretrained returned."


def installation_of(root: PreTrainedModel) -> Installation | None:
    """The installation of this model, None if it is not patched.

    Raises:
        ValueError: only a part of the model is patched, or the model is a part of a patched model.
    """
    record = root.__dict__.get(ATTRIBUTE)
    if isinstance(record, Record):
        return Installation(root, record)
    for name, module in root.named_modules():
        if module.__dict__.get(ATTRIBUTE) is not None:
            raise ValueError(
                f"the part {name!r} is patched on its own; call unpatch_model on this part, then patch the whole model."
            )
    if any(isinstance(module, Swap) for module in root.modules()):
        raise ValueError(
            f"this {type(root).__name__} is part of a patched model; call this on the whole model. If its layers were "
            "copied from a patched model, call unpatch_model on that model before you copy them."
        )
    return None


@contextlib.contextmanager
def searched_once(root: PreTrainedModel) -> Iterator[None]:
    """Inside, the attention modules of this model are those found now. Nothing inside may add or move a layer."""
    root.__dict__[SITES] = tuple(sites(root))
    try:
        yield
    finally:
        root.__dict__.pop(SITES, None)


@dataclass
class Record:
    """The changes to one model that unpatching takes back.

    Attributes:
        handles: the handles of all hooks.
        containers: the modules whose class was replaced.
        loaded: True if the model was rebuilt from a converted checkpoint. There is no config from before patching then.
        shape: what `Installation.shape` gave when the config was last known to build this model.
        bases: by its name or folder, the block of each checkpoint that this model was loaded from or saved to.
    """

    handles: list[RemovableHandle] = field(default_factory=list)
    containers: list[nn.Module] = field(default_factory=list)
    loaded: bool = False
    shape: tuple[int, dict[str, Any]] | None = None
    bases: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Installation:
    """A patched model and its record. All swaps are put in, described in the config, and taken out by this class.

    Attributes:
        root: the outermost transformers model.
        record: the changes to the model.
    """

    root: PreTrainedModel
    record: Record

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every attention module of the model, swapped or not, cross-attention too. They are found once."""
        return self.root.__dict__.get(SITES) or tuple(sites(self.root))

    def numbered(self) -> tuple[Layer, ...]:
        """Every layer that can be swapped, swapped or not, in module order. The option `layers` counts these."""
        return layers_at(self.sites)

    def layers(self) -> tuple[Layer, ...]:
        """The swapped layers, in module order."""
        return tuple(layer for layer in self.numbered() if layer.swapped)

    def start(self, model: nn.Module) -> None:
        """Give a stock model its own copies of its configs, and an attention implementation under which swaps compute.

        This is `hf_attn_swap`, unless an engine builds the model and has set its own.

        Args:
            model: the model that the user passed: the root, or a wrapper around the root.

        Raises:
            ValueError: transformers cannot change the implementation of some attention module, or the installed
                transformers is not as this package needs it. The model is then unchanged.
        """
        preconditions.check()
        name = self.root.config._attn_implementation
        name = name if name is not None and implementations.accepted(name) else implementations.NAME
        _own_configs(model)
        _drop_other_code(self.root)
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and not module._supports_sdpa:
                setattr(module.config, seam.MASKS, seam.EAGER)
        self.root.set_attn_implementation(name)
        _name_copied_layers(self.root, self.sites, name)
        for site in self.sites:
            if site.core.config._attn_implementation != name:  # type: ignore[union-attr]  # every core has one
                self.remove(model)
                raise ValueError(
                    f"{site.path}: transformers does not let this model change its attention; use the stock attention "
                    "for this model."
                )
        self.root.__dict__[ATTRIBUTE] = self.record
        self.record.shape = self.shape()

    def put(self, swaps: Mapping[Layer, Swap]) -> None:
        """Attach a swap to each of these layers, and bring hooks, phases and config up to date.

        A layer that already has a swap loses this swap.

        Raises:
            ValueError: what a fit changed around a swap that leaves cannot be taken back, or an engine that builds the
                model cannot compute a swap. Nothing is changed then.
        """
        for layer, swap in swaps.items():
            implementations.check(layer.site.core, layer.path, swap)
        self._undo(layer for layer in swaps)
        for layer, swap in swaps.items():
            _detach(layer.site.core)
            layer.site.core.attn_swap = swap
        self._wire()
        self.refresh()

    def take_out(self, layers: Iterable[Layer]) -> None:
        """Remove the swaps of some layers, and bring hooks, phases and config up to date.

        Raises:
            ValueError: as in `put`.
        """
        layers = tuple(layers)
        self._undo(layers)
        for layer in layers:
            _detach(layer.site.core)
            del layer.site.core.attn_swap
        self._wire()
        self.refresh()

    @contextlib.contextmanager
    def temporarily(self, swaps: Mapping[Layer, Swap]) -> Iterator[None]:
        """Attach other swaps to these layers inside a `with` block. The config stays as it is.

        After the block, each layer holds its former child again, in the phase of its strength.
        """
        before = {layer: getattr(layer.site.core, "attn_swap", None) for layer in swaps}
        try:
            for layer, swap in swaps.items():
                _set_child(layer.site.core, swap)
            self._wire()
            yield
        finally:
            for layer, child in before.items():
                _set_child(layer.site.core, child)
            self._wire()
            self.refresh()

    def set_strength(self, strengths: Mapping[Layer, float]) -> None:
        """Set the strength of some swapped layers, and bring phases, buffers and the config's block up to date.

        This is the only way to change a strength. PEFT's copies of a swap get the strength of their layer.

        Args:
            strengths: a number from 0 to 1 for each layer.
        """
        for layer, strength in strengths.items():
            for swap in layer.copies:
                swap.compute_at(strength)
        self.refresh()

    @contextlib.contextmanager
    def strengths_kept(self) -> Iterator[None]:
        """After the `with` block, also after an error, each swapped layer has the strength from before."""
        before = {layer: layer.swap.strength for layer in self.layers()}
        try:
            yield
        finally:
            self.set_strength(before)

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside a `with` block, every swapped layer computes the stock attention. The strengths stay as they are."""
        phases = [(swap, swap.phase) for layer in self.layers() for swap in layer.copies]
        try:
            for swap, _ in phases:
                swap.phase = Phase.OFF
            yield
        finally:
            for swap, phase in phases:
                swap.phase = phase

    def refresh(self) -> None:
        """Bring the phases, the buffers and the config's block up to date with the swaps."""
        swaps = [swap for layer in self.layers() for swap in layer.copies]
        carrying = any(swap.carries and swap.strength > 0 for swap in swaps)
        for swap in swaps:
            swap.compute_at(swap.strength, never_off=carrying and swap.carries)
        before = self.root.config.__dict__.get("attn_swap")
        self.root.config.attn_swap = self.block()
        self.root.config.attn_implementation = implementations.NAME
        moved = any(
            swap.wiring is not None and swap.wiring.path != layer.path
            for layer in self.layers()
            for swap in layer.copies
        )
        if moved or (before is not None and before["modules"] != self.root.config.attn_swap["modules"]):
            self._wire()

    def settle(self) -> None:
        """Bring hooks, phases and config up to date with layers that were removed, appended or moved since."""
        placed = places_of(self.root, self.sites)
        if any(swap.wiring != place.wiring for place in placed for swap in place.swaps):
            self._wire()
        self.refresh()

    def stored(self, place: Any) -> None:
        """Note that the checkpoint of this name, or in this folder, has the swaps as they are now."""
        self.record.bases[os.path.normpath(place)] = copy.deepcopy(self.root.config.attn_swap)

    def shape(self) -> tuple[int, dict[str, Any]]:
        """What decides whether the config builds this model: the number of modules that can be swapped, and the config.

        Keys that every save changes, and the keys of a swap, are left out.
        """
        return len(self.numbered()), _architecture(self.root.config.to_dict())

    def block(self) -> dict[str, Any]:
        """What config.json says of the swaps in this model, with the layers numbered within this model."""
        groups: dict[str, dict[str, Any]] = {}
        for layer in self.layers():
            spec = layer.swap.spec()
            groups.setdefault(repr(spec), {**spec, "layers": []})["layers"].append(layer.number)
        return {"version": VERSION, "modules": len(self.numbered()), "swaps": list(groups.values())}

    def remove(self, model: nn.Module | None = None) -> None:
        """Turn the model into the stock model again. `model` is the wrapper around the root, if there is a wrapper.

        Raises:
            ValueError: as in `put`.
        """
        self._undo(self.layers())
        self._unwire()
        for site in self.sites:
            _detach(site.core)
            if hasattr(site.core, "attn_swap"):
                del site.core.attn_swap
        _stock_configs(self.root if model is None else model)
        self.root.__dict__.pop(ATTRIBUTE, None)
        if self.record.loaded:
            _forget(self.root)

    def drop(self, name: str) -> None:
        """Take the fits of this name out of all layers, with what they changed around their swaps.

        Raises:
            ValueError: as in `put`.
        """
        layers = self.layers()
        self._undo(layers, name)
        for swap in (swap for layer in layers for swap in layer.copies):
            swap.drop(name)
        self.refresh()

    def _undo(self, layers: Iterable[Layer], name: str | None = None) -> None:
        """Take back what fits, or those of one name, changed around swaps: fits or swaps are about to leave.

        Of PEFT's copies of a swap, the first one says what.

        Raises:
            ValueError: some of it cannot be taken back. Nothing is changed then.
        """
        fits = [(layer, fit) for layer in layers if layer.swapped for fit in layer.swap.fitted.values()]
        for write in [fit.undo(self.root, layer.path) for layer, fit in fits if name in (None, fit.name)]:
            write()

    def _wire(self) -> None:
        """Register every hook and replace every class that the attached swaps need, after removing the former ones."""
        self._unwire()
        placed = places_of(self.root, self.sites)
        layers: dict[int, nn.Module] = {}
        near: dict[int, list[tuple[RemovableHandle, bool]]] = {}
        for place in placed:
            if place.wiring is None:
                place.site.core.__dict__["attn_swap"] = None
                continue
            for swap in place.swaps:
                swap.wiring = place.wiring
            near.setdefault(id(place.stack), []).extend(self._hook(place))
            if place.layer is not None and takes_keywords(place.layer):
                layers[id(place.layer)] = place.layer
        for layer in layers.values():
            self._pre(layer, hooks.before_layer)
        for stack in {id(place.stack): place.stack for place in placed}.values():
            if id(stack) in near:
                self._pre(stack, hooks.KeepNext(tuple(near[id(stack)])))
            if takes_keywords(stack):
                self._pre(stack, hooks.before_stack)
                self.record.handles.append(stack.register_forward_hook(hooks.after_stack, with_kwargs=True))
            inside = [place for place in placed if place.stack is stack]
            adding = [place.site for place in inside if any("keys" in swap.changed for swap in place.swaps)]
            if adding and (hook := FromFirstSeen.of(stack, adding)) is not None:
                self._pre(stack, hook)
            encoder = encoder_of(stack, [place.site.container for place in inside])
            for order in orders_of(self.root, stack if encoder is None else encoder, inside):
                self._pre(stack if encoder is None else encoder, order)
            if encoder is not None and takes_keywords(encoder):
                self._pre(encoder, hooks.before_encoder)
                self.record.handles.append(encoder.register_forward_hook(hooks.after_encoder, with_kwargs=True))
        self.record.handles.append(self.root.register_state_dict_pre_hook(adapters.before_state_dict))
        self._note_masks(placed)

    def _note_masks(self, placed: list[Placed]) -> None:
        """Write into the config of each stack which masks it must get: the mask function is given this config alone."""
        models = [module for module in self.root.modules() if isinstance(module, PreTrainedModel)]
        whole = any(slices_unmasked(stock_class(model)) for model in models)
        stacks = [(id(place.stack.config), place) for place in placed]
        dense = {config for config, place in stacks if place.site.reads_mask}
        of_keys = {
            config
            for config, place in stacks
            if any(variant.masks_of_keys for swap in place.swaps for variant in swap.variants)
        }
        if of_keys:  # an outer model may make the masks of a stack inside
            of_keys.add(id(self.root.config))
        for config in {id(model.config): model.config for model in models}.values():
            if seam.kind_of_masks(config) == seam.EAGER:
                continue
            config.__dict__.pop(seam.MASKS, None)
            if whole:
                setattr(config, seam.MASKS, seam.WHOLE)
            elif id(config) in dense:
                setattr(config, seam.MASKS, seam.DENSE)
            elif id(config) in of_keys:
                setattr(config, seam.MASKS, seam.OF_KEYS)

    def _hook(self, placed: Placed) -> tuple[tuple[RemovableHandle, bool], ...]:
        """Register the hooks of one attention module, and replace the class of its container where no hook suffices.

        Returns:
            The handles, as `hooks.KeepNext` takes them.
        """
        site = placed.site
        block = BLOCKS.get(site.family.block)
        if site.family.block == "bert":
            before: Any = hooks.before_bert
        else:
            before = hooks.before_core_by_mask if site.by_mask else hooks.before_core
        writes = placed.swaps[0].writes
        after = hooks.after_core if writes and block is None else hooks.after_call
        last = site.container.register_forward_hook(after, with_kwargs=True)
        self.record.handles.append(last)
        handles = (self._pre(site.container, before), True), (last, False)
        if not writes or block is None:
            return handles
        stock = stock_class(site.container)
        facts = Facts(tuple(arguments(stock)), handed_on(stock, "self"), returns_tuple(stock))
        site.container.__class__ = swapped_class(stock, block, facts, hooks.finish, seam.attention_forward)
        self.record.containers.append(site.container)
        return handles

    def _pre(self, module: nn.Module, hook: Any) -> RemovableHandle:
        """Register a hook that runs before `module`."""
        self.record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self.record.handles[-1]

    def _unwire(self) -> None:
        """Remove every hook, and give every replaced container its stock class back.

        A layer that the user copied and appended has the hooks and the class of its original, which no record knows.
        """
        for handle in self.record.handles:
            handle.remove()
        for module in self.root.modules():
            _drop_hooks(module)
        for container in {*self.record.containers, *self.root.modules()}:
            if isinstance(container, Block):
                container.__class__ = stock_class(container)
        self.record.handles = []
        self.record.containers = []


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A config, with the configs inside, without the keys of a swap and those that every save changes."""
    return {
        key: _architecture(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in OF_A_SAVE
    }


def _set_child(core: nn.Module, child: nn.Module | None) -> None:
    """Make `child` the submodule `attn_swap` of a core. None removes the submodule."""
    core.__dict__.pop("attn_swap", None)
    core._modules.pop("attn_swap", None)
    if child is not None:
        core.attn_swap = child


def _drop_hooks(module: nn.Module) -> None:
    """Remove the hooks of `hooks.py` from a module."""
    for kept, with_keywords in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for number in [number for number, hook in kept.items() if getattr(hook, "__module__", None) == hooks.__name__]:
            del kept[number]
            with_keywords.pop(number, None)


def _detach(core: nn.Module) -> None:
    """Mark the swaps of a core as part of no model. They then compute nothing, and cannot use their cached states."""
    for swap in swaps_in(getattr(core, "attn_swap", None)):
        swap.wiring = None
        swap.phase = Phase.OFF
    core.__dict__.pop("attn_swap", None)


def _own_configs(model: nn.Module) -> None:
    """Give every module a copy of its config. Modules that shared a config share the copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            copied = copy.deepcopy(config, memo)
            module.__dict__[CONFIGS] = (config, copied)
            module.__dict__["config"] = copied


def _name_copied_layers(root: PreTrainedModel, attention_sites: Iterable[Site], name: str) -> None:
    """Set the attention implementation in configs that belong to no model, such as that of a layer made by deepcopy."""
    of_models = {id(module.config) for module in root.modules() if isinstance(module, PreTrainedModel)}
    for site in attention_sites:
        config = site.core.__dict__.get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in of_models:
            config._attn_implementation = name


def _drop_other_code(root: PreTrainedModel) -> None:
    """Let the config of a model that runs transformers' own code name no other code.

    Older repositories name both: `auto_map` says which of their files hold the model. Those files are not saved with a
    model that was built without them. Unpatching brings the former config back, and these names with it.
    """
    auto_map = root.config.__dict__.get("auto_map")
    if isinstance(auto_map, dict) and type(root).__module__.startswith("transformers."):
        root.config.auto_map = {
            name: value for name, value in auto_map.items() if not name.startswith(("AutoModel", "AutoConfig"))
        }


def _stock_configs(model: nn.Module) -> None:
    """Give every module its former config object back, with what the user has changed since.

    A wrapper around `model` may hold one of our copies. The content of each copy is therefore set to the content of the
    former config. A config that the user has put instead of a copy is left alone.
    """
    for module in model.modules():
        if CONFIGS in module.__dict__:
            stock, copied = module.__dict__.pop(CONFIGS)
            module.__dict__["config"] = stock
            for name, value in copied.__dict__.items():
                former = stock.__dict__.get(name, MISSING)
                if name not in OF_A_SWAP and not isinstance(value, PreTrainedConfig) and former != value:
                    stock.__dict__[name] = value
            copied.__dict__.clear()
            copied.__dict__.update(copy.deepcopy(stock.__dict__))


def _forget(root: PreTrainedModel) -> None:
    """Remove every trace from the configs of a model that was loaded converted, and set the default attention."""
    for module in root.modules():
        config = module.__dict__.get("config")
        if config is None:
            continue
        for name in ("attn_swap", "attn_implementation", seam.MASKS):
            config.__dict__.pop(name, None)
    try:
        root.set_attn_implementation("sdpa")
    except ValueError:  # an architecture without SDPA
        root.set_attn_implementation("eager")
