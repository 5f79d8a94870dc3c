"""The options of the demo, which are checked when they are built."""

from dataclasses import dataclass
from pathlib import Path

from ..layer.registry import canonical_name

CONTROL = "softmax"
DEFAULT_VARIANTS = ("belief", "modern_hopfield", "simpletron_resl")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What one demo converts, on which data, and for how long.

    Args:
        variants: names as `patch_model` takes them, kept as canonical names; the first variant is saved and loaded
            again.
        model: name on the Hub or folder of a pretrained encoder; None takes the MiniLM that the extra installs.
        dataset: name on the Hub or folder of a labelled text set; None takes rotten_tomatoes from the extra.
        config: configuration of `dataset`, such as a GLUE task.
        text_column: column of `dataset` with the text.
        label_column: column of `dataset` with the class.
        test_split: split of `dataset` to measure on; it must have labels.
        train_size: number of labelled sentences that the control is fine-tuned on, in one pass.
        test_size: number of held-out sentences.
        tokens: the budget of each conversion, as `convert` takes it.
        max_loss: the largest loss, as `convert` takes it; None converts all layers.
        batch_size: sentences per step of the fine-tuning.
        learning_rate: peak of the fine-tuning's linear schedule, which warms up over the first 10 % of the steps.
        max_length: number of tokens that are kept of a sentence.
        seed: seed of the sample, of the new head, and of the order of the batches.
        out: folder for the saved model, its tokenizer and `demo.json`.

    Raises:
        ValueError: a size, the learning rate or the loss is out of its range, or a variant is missing or named twice.
    """

    variants: tuple[str, ...] = DEFAULT_VARIANTS
    model: str | None = None
    dataset: str | None = None
    config: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    test_split: str = "test"
    train_size: int = 1600
    test_size: int = 1000
    tokens: int = 32_000
    max_loss: float | None = None
    batch_size: int = 16
    learning_rate: float = 1e-4
    max_length: int = 64
    seed: int = 0
    out: Path = Path("attn-swap-demo")

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size", "tokens", "batch_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}.")
        if self.max_loss is not None and not self.max_loss > 0:
            raise ValueError(f"max_loss must be above 0 (0.02 is 2 %), got {self.max_loss}.")
        object.__setattr__(self, "variants", tuple(map(canonical_name, self.variants)))
        if not self.variants or CONTROL in self.variants:
            raise ValueError(f"Name at least one variant, and not {CONTROL!r}: the control always runs.")
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"Each variant can be named once, got {', '.join(self.variants)}.")
