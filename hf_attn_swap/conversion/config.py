"""What a conversion is asked for, checked; and how a model of its kind and size is distilled if nobody says."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ..layer.calibration import FITS
from ..layer.registry import canonical_keys, parse
from ..measuring.lm_head import names_head
from ..measuring.lost import Lost, predicts_next
from ..text.tokenizer import own_tokenizer
from ..text.typed import refuse_name
from ..variants.base import Variant
from ..variants.outeffhop import OutEffHop
from ..variants.sink import Sink
from ..variants.softmax import Softmax
from ..variants.window import Window
from .losses import Losses
from .trainable import BODY

SMALL = 60_000_000  # an encoder with fewer parameters trains its weights, a larger one trains adapters
MIDDLE = 500_000_000  # the same for a language model that becomes linear: 24 bytes per parameter while it trains
STATIC, DYNAMIC = "static", "dynamic"  # ranges of 8-bit inputs
RANK = 16  # of the adapters of an encoder
HALF = (
    "the weights are in {dtype}, so adapters train; load the model in float32 to train all weights, which loses less "
    "when a language model becomes linear."
)
ENGINE = "engine"
SCORES = ("score", "score_value")  # kinds of `sink` that leave
FULL_HEADS = "full_heads"


@dataclass(frozen=True, kw_only=True)
class Distil(Losses):
    """Distillation without labels, by these losses; the teacher is the original model.

    Attributes:
        epochs: passes over the training rows, in a recipe.
        tokens: the budget in tokens, in place of `epochs`.
        learning_rate: the highest learning rate.
        rank: the rank of LoRA adapters on all linear layers, which are merged at the end; None trains `trainable`.
        trainable: the parts that train without adapters, as in `DistillationTrainer`; "body" is everything but the
            embeddings.
        batch: rows per training step and process; None takes the recipe's.

    Raises:
        ValueError: a value is out of range, or would have no effect beside the others.
    """

    name: ClassVar[str] = "distil"
    epochs: float = 1.0
    tokens: int | None = None
    learning_rate: float = 1e-4
    rank: int | None = None
    trainable: tuple[str, ...] = ("body",)
    batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.trainable
        object.__setattr__(self, "trainable", (given,) if isinstance(given, str) else tuple(given))
        for name in ("epochs", "tokens", "learning_rate", "rank", "batch"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"distil: {name} must be above 0, got {value!r}.")
        if self.tokens is not None and self.epochs != Distil.epochs:
            raise ValueError("distil: give tokens or epochs, not both.")
        if self.rank is not None and self.trainable != (BODY,):
            raise ValueError("distil: with a rank, adapters train; leave out trainable, or the rank.")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The arguments of `convert`, under the same names, or those of `quantize`.

    `variant` gets its full name, and `layers` is None for all layers. Without `stages`, `for_model` chooses one.

    Attributes:
        quantized: the result is in 8-bit integers, and part of the tokens trains with rounding.
        inputs: how the inputs of 8-bit matrices are rounded: by "static" ranges, or by "dynamic" ones, per token.

    Raises:
        ValueError: an argument is out of range or unknown, or two of them contradict each other. Shares are numbers:
            the command line alone reads texts such as "2%".
    """

    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    processor: Any = None
    tokens: int = 0
    eval_tokens: int | None = None
    max_loss: float | None = None
    min_recall: float | None = None
    recall_distance: int | None = None
    layers: Any = "auto"
    modules: str | None = None
    heads: str | None = None
    keep: float = 0.0
    fit: str | None = "auto"
    absorb: bool = True
    stages: Sequence[Distil] = ()
    low_memory: bool = False
    length: int = 256
    target: str | None = None
    quantized: bool = False
    inputs: str = STATIC

    def __post_init__(self) -> None:
        refuse_name(self.processor, "processor")
        if self.inputs not in (STATIC, DYNAMIC):
            raise ValueError(f"inputs is {STATIC!r} or {DYNAMIC!r}, got {self.inputs!r}.")
        self._check_numbers()
        self._check_target()
        self._check_heads()
        if self.fit not in ("auto", None, *FITS):
            raise ValueError(f'fit is "auto", None or one of {", ".join(FITS)}, got {self.fit!r}.')
        layers = None if isinstance(self.layers, str) and self.layers == "auto" else self.layers
        canonical = {
            "variant": "+".join(cls.name for cls in parse(self.variant)),
            "processor": own_tokenizer(self.processor),
            "layers": list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else layers,
            "stages": tuple(self.stages or ()),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        if self.stages:
            self._check_stages()

    def for_model(self, root: PreTrainedModel) -> ConvertConfig:
        """The same, with the stage that suits a model if none was given."""
        if self.stages:
            return self
        return dataclasses.replace(self, stages=[default_distil(root, self.variant, low_memory=self.low_memory)])

    @property
    def distil(self) -> Distil:
        """How the model is distilled; see `for_model`."""
        return self.stages[0]

    @property
    def reserved(self) -> int:
        """The tokens for the training with rounding: half of them, or all if the attention stays stock attention."""
        if not self.quantized:
            return 0
        return self.tokens if set(parse(self.variant)) <= {Softmax, Sink} else self.tokens // 2

    @property
    def budgeted(self) -> bool:
        """True if there is a budget for the loss, or for recall."""
        return self.max_loss is not None or self.min_recall is not None

    def allows(self, lost: Lost) -> bool:
        """True if there is a budget, and a loss is within it."""
        return self.budgeted and lost.within(self.max_loss, self.min_recall)

    def settings(self) -> dict[str, Any]:
        """All that decides about the result, for the journal."""
        chosen = {
            option.name: getattr(self, option.name) for option in dataclasses.fields(self) if option.name != "processor"
        }
        chosen["options"] = canonical_keys(self.options) if "+" in self.variant else self.options
        return chosen | {"stages": [dataclasses.asdict(self.distil)]}

    def _check_numbers(self) -> None:
        shares: dict[str, tuple[Any, str]] = {
            "max_loss": (self.max_loss, "0.02 is 2 %"),
            "min_recall": (self.min_recall, "0.97 is 97 %"),
        }
        for name, (value, example) in shares.items():
            if value is not None and not (isinstance(value, Real) and 0 < float(value) <= 1):
                raise ValueError(f"{name} is a share above 0 and at most 1 ({example}), got {value!r}.")
        keep: Any = self.keep
        if not (isinstance(keep, Real) and 0 <= float(keep) < 1):
            raise ValueError(f"keep is the share of layers that stay as they are, from 0 to below 1, got {keep!r}.")
        counts: dict[str, tuple[Any, int, str]] = {
            "tokens": (self.tokens, 0, "300_000 (0 trains nothing)"),
            "eval_tokens": (self.eval_tokens, 1, "32_768"),
            "recall_distance": (self.recall_distance, 1, "2_000"),
        }
        for name, (value, least, example) in counts.items():
            if value is not None and not (isinstance(value, Integral) and int(value) >= least):
                raise ValueError(f"{name} must be a whole number, {least} or more, such as {example}, got {value!r}.")

    def _check_target(self) -> None:
        """Take the form of the variant that other programs run, if the result is for them."""
        if self.target is None:
            return
        if self.target != ENGINE:
            raise ValueError(f"target is {ENGINE!r} or None, got {self.target!r}.")
        if self.heads is not None:
            raise ValueError(
                f"target={ENGINE!r} converts whole layers; leave heads out (keep= leaves layers as they are)."
            )
        variant, options = engine_form(self.variant, self.options)
        object.__setattr__(self, "variant", variant)
        object.__setattr__(self, "options", options)

    def _check_heads(self) -> None:
        """Refuse a choice of heads that has nothing to choose."""
        if self.heads is None:
            return
        if self.heads != "auto":
            raise ValueError(
                f'heads is "auto" or None, got {self.heads!r}; to name the heads of a layer, use patch_model(model, '
                f"variant, layers=..., {FULL_HEADS}=...)."
            )
        classes = parse(self.variant)
        name = by_heads(classes)
        if not self.keep:
            raise ValueError(
                'heads="auto" chooses the heads that keep all keys: give their share, such as keep=0.5 '
                "(in a shell --keep 0.5)."
            )
        if FULL_HEADS in (self.options if len(classes) == 1 else canonical_keys(self.options).get(name, {})):
            raise ValueError(f'heads="auto" chooses {FULL_HEADS}; leave one of them out.')

    def _check_stages(self) -> None:
        """Refuse stages that a conversion does not take."""
        if len(self.stages) > 1 or not isinstance(self.distil, Distil):
            raise ValueError("stages takes one Distil: fit= names the fit, and a Trainer reads labels.")
        if self.distil.tokens is not None or self.distil.epochs != Distil.epochs:
            raise ValueError("convert's tokens are the budget of its Distil; leave out the stage's tokens and epochs.")
        if self.low_memory and self.distil.rank is None:
            raise ValueError("low_memory trains adapters; give the Distil stage a rank, such as 16.")


def default_distil(root: PreTrainedModel, variant: str, *, low_memory: bool = False) -> Distil:
    """How a model of this kind and size is distilled to a variant.

    Weights in half precision do not train: small steps would be lost in rounding. Adapters train then, and where memory
    is short.

    Measured on SmolLM2, ViT-S and MiniLM; docs/mathematics.md, section Conversion.
    """
    whole = root.dtype == torch.float32
    size = root.num_parameters()
    if predicts_next(root):
        linear = any(cls.replaces for cls in parse(variant))
        if linear and size <= MIDDLE and not low_memory:
            if whole:
                return Distil(learning_rate=3e-4)
            warnings.warn(HALF.format(dtype=root.dtype), stacklevel=6)
        return Distil(rank=32, learning_rate=7e-4)
    name = type(root).__name__
    forecasts = root.main_input_name == "past_values"
    headless = not names_head(name) or "QuestionAnswering" in name or forecasts  # gives no logits
    logits = 0.0 if headless else 1.0
    if root.main_input_name == "pixel_values" or size > SMALL or not whole or low_memory:
        return Distil(rank=RANK, learning_rate=5e-4, logits=logits, hidden=1.0, batch=16)
    return Distil(learning_rate=1e-4, logits=logits, hidden=1.0, batch=16)


def by_heads(classes: Iterable[type[Variant]]) -> str:
    """The name of the variant among these that can leave heads as they are.

    Raises:
        ValueError: none can.
    """
    classes = tuple(classes)
    for cls in classes:
        if FULL_HEADS in {field.name for field in dataclasses.fields(cls.Options)}:
            return cls.name
    names = "+".join(cls.name for cls in classes)
    raise ValueError(f"{names} changes all heads of a layer; heads are chosen for a variant with {FULL_HEADS}: window.")


def engine_form(variant: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The variant and its options in the form that leaves.

    A window has no first tokens, and a sink beside it takes their place. A sink has a score and a value.

    Args:
        variant: the name that the user gave.
        options: the options that the user gave, as `patch_model` takes them.

    Raises:
        ValueError: the variant, or an option, cannot leave.
    """
    classes = parse(variant)
    if others := [cls.name for cls in classes if cls not in (Softmax, OutEffHop, Sink, Window)]:
        raise ValueError(
            f"target={ENGINE!r}: no class of transformers computes {'+'.join(others)}; leave target out, and see which "
            "variants the plugin for vLLM runs."
        )
    given = canonical_keys(options) if len(classes) > 1 else {classes[0].name: dict(options)}
    names = [cls.name for cls in classes]
    if Window in classes:
        window = given.setdefault(Window.name, {})
        if window.setdefault("sinks", 0) or window.get("full_heads"):
            raise ValueError(
                f"target={ENGINE!r}: a window has no first tokens and is the same in all heads of a layer; leave out "
                "sinks and full_heads (keep= leaves whole layers as they are)."
            )
        if not {Sink, OutEffHop} & set(classes):
            names.insert(0, Sink.name)
    if Sink.name in names and given.setdefault(Sink.name, {}).setdefault("kind", SCORES[1]) not in SCORES:
        raise ValueError(f"target={ENGINE!r}: the kind of a sink is {' or '.join(map(repr, SCORES))}.")
    if len(names) == 1:
        return names[0], given[names[0]]
    return "+".join(names), {name: chosen for name, chosen in given.items() if chosen}
