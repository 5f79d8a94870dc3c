"""Shows a training without labels as one bar: loss, tokens per second, and the time that is left."""

from __future__ import annotations

import time
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

from ..text.bar import visible


class Bar(ProgressCallback):
    """The bar of a `Trainer`, with the loss beside the bar in place of printed lines.

    Args:
        name: the words in front of the bar.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.start = self.seen = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the empty bar."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]  # transformers' own
        self.start, self.seen = time.perf_counter(), float(state.num_input_tokens_seen or 0)
        bar: Any = self.training_bar  # transformers types it as None
        if bar is not None:
            bar.set_description(self.name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the loss and the speed beside the bar."""
        bar: Any = self.training_bar
        if bar is None or "loss" not in (logs or {}):
            return
        words = f"loss {float(logs['loss']):.3g}"
        seconds = time.perf_counter() - self.start
        if state.num_input_tokens_seen and seconds > 0:
            words += f", {(float(state.num_input_tokens_seen) - self.seen) / seconds:,.0f} tokens/s"
        bar.set_postfix_str(words)


def quiet(trainer: Trainer, name: str, *, shown: bool) -> None:
    """Replace the lines that a `Trainer` prints by one bar, or by nothing."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if shown and visible():
        trainer.add_callback(Bar(name))
