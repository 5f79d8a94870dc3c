"""Writes a converted model as an ordinary model of transformers, which other programs run without this package.

A window in whole layers and sinks with constant scores are what some classes of transformers have (`targets.py`).
What is linear goes into the weights: calibrations, and the values of sinks. Then a process without this package loads
the folder, and its logits are compared with those of the converted model.
Axes: B batch, L token, H head, G key/value head, D head width.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..conversion.calibrate import merge_calibration
from ..core.kind import Kind
from ..families import stock_class
from ..layer.fitted import HEADS
from ..measuring.batches import max_positions
from ..patch import need_installation
from ..variants.stock_form import StockForm
from ..wiring.layers import Layer
from ..writing import saved_whole, told_where
from .targets import NO_SINK, TARGETS, Target, config_for, same_class, windows_of

EXACT = 1e-4  # the largest difference of the logits in fp32, as a share of the largest logit
ROWS, LENGTH = 2, 64  # of the text that is compared
READ = {"read", "write"}  # places behind the heads, which the plugin for vLLM computes


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `export` wrote.

    Attributes:
        folder: the folder.
        architecture: the class of transformers that loads it.
        windows: the number of layers with a window.
        sinks: the number of layers with a sink.
        difference: the largest difference of the logits in fp32, as a share of the largest logit.
    """

    folder: Path
    architecture: str
    windows: int
    sinks: int
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.architecture}, {self.windows} layers with a window, {self.sinks} with a sink; the "
            f"logits differ by {self.difference:.1e} of the largest."
        )


def export(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Exported:
    """Write a converted model as an ordinary folder of transformers, which vLLM, llama.cpp and others load.

    The folder has no trace of this package. The model stays as it is; it is copied twice in memory, once in fp32.

    Args:
        model: a patched language model with causal order. `outeffhop`, `sink` with constant scores, `window` without
            first tokens in whole layers, `softmax`, and their compositions can leave; calibrations and smoothed
            weights too.
        folder: a path that does not exist.
        tokenizer: its tokenizer, saved beside it.

    Returns:
        What was written.

    Raises:
        ValueError: the folder exists; the model is not patched, has adapters or rounded weights, or reads no tokens;
            a layer computes what no class of transformers computes; or the loaded folder gives other logits. Nothing
            is written then.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists; name a folder that does not exist.")
    exported, forms = stock_model(model)
    root = need_installation(model).root
    window = max((form.window for form in forms if form.window is not None), default=0)
    with tempfile.TemporaryDirectory() as work, told_where(folder), saved_whole(folder) as part:
        exported.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        difference = _compare(root, part, Path(work), window, _bound(root, forms))
    return Exported(
        folder=folder,
        architecture=type(exported).__name__,
        windows=sum(form.window is not None for form in forms),
        sinks=sum(form.score is not None for form in forms),
        difference=difference,
    )


def stock_model(model: nn.Module) -> tuple[PreTrainedModel, tuple[StockForm, ...]]:
    """A model of transformers that should compute the same as a converted model, which stays as it is.

    Returns:
        The model, and what each of its layers has beside ordinary attention.

    Raises:
        ValueError: as `export`.
    """
    installation = need_installation(model)
    root = installation.root
    _check(root, installation.numbered())
    forms = {layer.path: _form(layer) for layer in installation.numbered()}
    try:
        windows = windows_of(root.config, list(forms.values()))
    except ValueError as problem:
        raise ValueError(f"{type(root).__name__} cannot be exported: {problem}.") from None
    made = _as_stock(_folded(root, forms), forms, windows)
    both = zip(forms.values(), windows, strict=True)
    return made, tuple(replace(form, window=window) for form, window in both)


def _check(root: PreTrainedModel, layers: Iterable[Layer]) -> None:
    """Refuse a model whose weights are not all here as plain matrices, and one that is no causal model of one text.

    Raises:
        ValueError: it is such a model.
    """
    name = type(root).__name__
    decoder = all(layer.site.kind is Kind.DECODER for layer in layers) and not root.config.is_encoder_decoder
    if root.main_input_name != "input_ids" or not decoder:
        raise ValueError(f"{name} is no causal model of one text, and only such models can be exported.")
    if getattr(root, "hf_quantizer", None) is not None or any(hasattr(part, "base_layer") for part in root.modules()):
        raise ValueError(
            f"{name} has adapters or rounded weights; call merge_and_unload, or export before the weights are rounded."
        )
    if any(parameter.is_meta for parameter in root.parameters()):
        raise ValueError(f"{name} has offloaded weights; load it whole to export it.")


def _form(layer: Layer) -> StockForm:
    """What a layer has beside ordinary attention, on the CPU.

    Raises:
        ValueError: no class of transformers computes the layer.
    """
    if not layer.swapped or layer.swap.strength == 0:
        return StockForm()
    swap = layer.swap
    forms = []
    for variant in swap.variants:
        try:
            forms.append(variant.stock_form(swap.strength))
        except ValueError as problem:
            kept = (
                "vLLM runs it with the plugin of this package"
                if set(swap.changed) <= READ
                else "run it by transformers"
            )
            raise ValueError(f"{layer.path} cannot be exported: {problem}; {kept}.") from None
    if swap.strength < 1 and any(fit.place == HEADS for fit in swap.fitted.values()):
        raise ValueError(f"{layer.path} is calibrated, and folded at strength 1 alone; call set_strength(model, 1.0).")
    window = next((form.window for form in forms if form.window is not None), None)
    return reduce(StockForm.with_sink_of, forms, StockForm(window=window))


@torch.no_grad()
def _folded(root: PreTrainedModel, forms: Mapping[str, StockForm]) -> PreTrainedModel:
    """A copy of the model in which calibrations, the values of sinks and the factors of scores are in the weights.

    Where a projection has no bias to take what is folded, it gets one, of zeros.
    """
    model: PreTrainedModel = copy.deepcopy(root)
    layers = [layer for layer in need_installation(model).numbered() if layer.swapped]
    calibrated = [layer for layer in layers if any(fit.place == HEADS for fit in layer.swap.fitted.values())]
    for layer in calibrated:
        _with_bias(layer.site.container, layer.site.family.output)
    if calibrated:
        merge_calibration(model)
    for layer in layers:
        if layer.swap.sharpness != 1:
            for parameter in _projection(layer.site.core, layer.site.family.query).parameters():
                parameter.mul_(layer.swap.sharpness)
        if (value := forms[layer.path].value) is not None:
            site, sizes = layer.site, layer.swap.geometry
            output = _with_bias(site.container, site.family.output)
            projection = _with_bias(site.core, site.family.value)
            grouped = value.view(sizes.kv_heads, -1, sizes.head_dim)
            if not torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
                raise ValueError(
                    f"{site.path} cannot be exported: its heads share values, but with {'+'.join(layer.swap.names)} "
                    "each has a sink of its own; convert it with one of them alone."
                )
            projection.bias.sub_(grouped[:, 0].flatten().to(projection.bias))
            output.bias.add_(
                (output.weight.double() @ value.flatten().to(output.weight.device).double()).to(output.bias)
            )
    return model


def _projection(module: nn.Module, path: str | None) -> nn.Linear:
    """A projection.

    Raises:
        ValueError: it is no plain matrix.
    """
    projection = None if path is None else module.get_submodule(path)
    if not isinstance(projection, nn.Linear):
        raise ValueError(
            f"{type(module).__name__} keeps no plain matrix that could take a calibration, a sink's value or beta."
        )
    return projection


def _with_bias(module: nn.Module, path: str | None) -> nn.Linear:
    """A projection, with a bias.

    Raises:
        ValueError: it is no plain matrix.
    """
    projection = _projection(module, path)
    if getattr(projection, "bias", None) is None:  # torch's types know no Linear without a bias
        projection.bias = nn.Parameter(projection.weight.new_zeros(projection.out_features))
    return projection


def _as_stock(model: PreTrainedModel, forms: Mapping[str, StockForm], windows: Sequence[int | None]) -> PreTrainedModel:
    """A model of the first class that has a place for every weight, every window and every sink.

    Raises:
        ValueError: there is none.
    """
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".attn_swap." not in name}
    sinks, heads = any(form.score is not None for form in forms.values()), model.config.num_attention_heads
    reasons = []
    if not sinks and (config := same_class(model, windows)) is not None:
        try:
            with torch.device("meta"):
                made = stock_class(model)(config)
            return _built(model, made, weights)
        except ValueError as problem:
            reasons.append(str(problem))
    for target in TARGETS:
        if sinks and target.sinks is None:
            continue
        try:
            return _built(model, _empty(model, target, windows, weights), weights | _scores(target, forms, heads))
        except ValueError as problem:
            reasons.append(f"{target.model_type}: {problem}")
    what = "sinks" if sinks else "these windows"
    raise ValueError(
        f"no class of transformers computes this {stock_class(model).__name__} with {what} ({'; '.join(reasons)}); "
        "run it by transformers."
    )


def _empty(
    model: PreTrainedModel, target: Target, windows: Sequence[int | None], weights: Mapping[str, Tensor]
) -> PreTrainedModel:
    """A model of a target without values."""
    projections = {path for layer in need_installation(model).numbered() for path in _projections(layer)}
    config = config_for(target, model.config, windows, biased=any(f"{path}.bias" in weights for path in projections))
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return made


def _projections(layer: Layer) -> set[str]:
    """The paths of the four projections of an attention module that applies its own W_o."""
    family = layer.site.family
    return {f"{layer.path}.{path}" for path in (family.query, family.key, family.value, family.output) if path}


def _scores(target: Target, forms: Mapping[str, StockForm], heads: int) -> dict[str, Tensor]:
    """The scores of the sinks by the names of the target's parameters; very small ones in layers without a sink."""
    if target.sinks is None:
        return {}
    none = torch.full((heads,), NO_SINK)
    scores = {path: none if form.score is None else form.score for path, form in forms.items()}
    return {f"{path}.{target.sinks}": score.clone() for path, score in scores.items()}  # no tensor for two layers


def _built(model: PreTrainedModel, made: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model like `made`, with these weights and with zeros for biases that the source does not have.

    Raises:
        ValueError: a weight has no place, or a place has no weight.
    """
    places = made.state_dict()
    filled = {}
    for name, place in places.items():
        if name not in weights and not name.endswith(".bias"):
            raise ValueError(f"it has {name}, which the model has not")
        given = weights[name] if name in weights else torch.zeros(place.shape)
        if given.shape != place.shape:
            raise ValueError(f"its {name} is {tuple(place.shape)}, that of the model {tuple(given.shape)}")
        filled[name] = given.to(model.dtype)
    if rest := sorted(weights.keys() - places.keys()):
        raise ValueError(f"it has no place for {rest[0]}")
    load: Any = type(made).from_pretrained  # its types know no model without a name
    loaded: PreTrainedModel = load(None, config=made.config, state_dict=filled, dtype=model.dtype)
    if loaded.can_generate():
        loaded.generation_config = copy.deepcopy(model.generation_config)
    loaded.eval()
    return loaded


def _bound(root: PreTrainedModel, forms: Sequence[StockForm]) -> float:
    """The largest difference that is rounding: in half precision, weights into which something is folded round anew."""
    fits = (fit for layer in need_installation(root).layers() for fit in layer.swap.fitted.values())
    sharp = any(layer.swapped and layer.swap.sharpness != 1 for layer in need_installation(root).layers())
    folded = sharp or any(form.value is not None for form in forms) or any(fit.place == HEADS for fit in fits)
    return max(EXACT, torch.finfo(root.dtype).eps) if folded else EXACT


def _compare(root: PreTrainedModel, folder: Path, work: Path, window: int, bound: float) -> float:
    """The largest difference of the logits of a folder, in a process without this package, as a share of the largest.

    Raises:
        ValueError: the folder cannot be loaded there, or its logits differ by more than the bound.
    """
    length = min(max(LENGTH, 2 * window), max_positions(root) or sys.maxsize)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(root.config.vocab_size, (ROWS, length), generator=generator)
    given, result = work / "inputs.safetensors", work / "logits.safetensors"
    save_file({"input_ids": ids}, given)
    program = Path(__file__).with_name("reload.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", program, folder, given, result],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no word of why"]
        raise ValueError(f"a process without this package cannot load what was exported: {last[0]}")
    got = load_file(result)["logits"]
    wide = copy.deepcopy(root).float().cpu().eval()
    with torch.no_grad():
        wanted = wide(input_ids=ids, use_cache=False, return_dict=True)[0]
    difference = float((got - wanted).abs().max() / wanted.abs().max())
    if not difference <= bound:
        half = (
            "" if root.dtype == torch.float32 else "; in float32 less is rounded: load the model so (--dtype float32)"
        )
        raise ValueError(
            f"the exported model gives other logits: they differ by {difference:.1e} of the largest, more than "
            f"{bound:g}; nothing was written{half}."
        )
    return difference
