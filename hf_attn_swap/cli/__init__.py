"""The command line `hf-attn-swap`: list the variants, convert a checkpoint, describe one, report on it, run the demo.

What a user got wrong is one line on stderr, `error: ...`, with exit code 2; `--debug` shows the traceback.
"""

from . import models, studies
from .app import app, main, run

__all__ = ["app", "main", "models", "run", "studies"]
