"""The options of the demo, which are checked when they are built."""

from dataclasses import dataclass
from pathlib import Path

CONTROL = "softmax"
DEFAULT_VARIANTS = ("outeffhop", "outeffhop+gated", "belief", "mha", "simple_resl")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Settings shared by every model that one demo trains.

    Args:
        variants: names as `patch_model` takes them. The control is always trained, and need not be named.
        model: name on the Hub or folder of a pretrained encoder; None takes the MiniLM that the extra installs.
        dataset: name on the Hub or folder of a labelled text set; None takes rotten_tomatoes from the extra.
        text_column: column of `dataset` with the text.
        label_column: column of `dataset` with the class.
        train_size: number of sentences to train on, in one pass.
        test_size: number of held-out sentences.
        batch_size: sentences per step.
        learning_rate: peak of the linear schedule, which warms up over the first 10 % of the steps.
        max_length: number of tokens that are kept of a sentence.
        ramp: share of the steps over which the strength rises from 0 (the pretrained model) to 1 (the variant).
        seed: seed of the sample, the new head, the order of the batches and the dropout; the same for every model.
        out: folder for the best converted model, its tokenizer and `demo.json`.

    Raises:
        ValueError: a size, the learning rate or the ramp is out of its range, or a variant is named twice.
    """

    variants: tuple[str, ...] = DEFAULT_VARIANTS
    model: str | None = None
    dataset: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    train_size: int = 1600
    test_size: int = 1000
    batch_size: int = 16
    learning_rate: float = 1e-4
    max_length: int = 64
    ramp: float = 0.5
    seed: int = 0
    out: Path = Path("attn-swap-demo")

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size", "batch_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}.")
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp is a share of the steps and must lie in [0, 1], got {self.ramp}.")
        if not self.converted:
            raise ValueError(f"Name at least one variant besides the control {CONTROL!r}.")
        if len(set(self.converted)) < len(self.converted):
            raise ValueError(f"Each variant can be named once, got {', '.join(self.variants)}.")

    @property
    def converted(self) -> tuple[str, ...]:
        """The variants without the control."""
        return tuple(name for name in self.variants if name != CONTROL)
