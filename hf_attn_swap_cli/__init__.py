"""The command line `hf-attn-swap`: lists variants, converts, trains and describes models, reports, checks, has a demo.

This is a package of its own, because `import hf_attn_swap` loads torch and transformers, which takes seconds. Here a
command imports them when it runs, so `--version` and every `--help` answer at once.

A mistake of the user becomes one line on stderr, `error: ...`, and exit code 2. `--debug` shows the traceback.
"""

from . import conversions, installation, measures, models, programs, studies, training
from .app import app, main, run

__all__ = ["app", "conversions", "installation", "main", "measures", "models", "programs", "run", "studies", "training"]
