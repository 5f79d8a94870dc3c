"""Loads a model whose attention was swapped by hf_attn_swap, in a program that does not import that package itself.

This file lies beside the weights. transformers runs it if the caller passes trust_remote_code=True. It holds no
attention: the package does. https://github.com/hf-attn-swap/hf-attn-swap
"""

import functools
from typing import Any

import transformers
from packaging.version import Version

import hf_attn_swap

OLDEST = "0.1.0"

if Version(hf_attn_swap.__version__) < Version(OLDEST):
    raise ImportError(
        f"this model needs hf-attn-swap {OLDEST} or newer, and {hf_attn_swap.__version__} is installed; upgrade it "
        "with pip install -U hf-attn-swap."
    )


@functools.cache
def __getattr__(name: str) -> Any:
    """The class of transformers with this name, under a subclass.

    transformers marks the class that a file hands out as custom code. The subclass takes this mark. What it builds
    is an instance of the class of transformers itself, so the model is the same as after `import hf_attn_swap`.
    """
    stock = getattr(transformers, name, None)
    if stock is None:
        raise AttributeError(
            f"transformers has no {name!r}; this model's attention is swapped, and only transformers with hf-attn-swap "
            "computes it."
        )

    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return type(name, (stock,), {"__new__": build, "__module__": __name__})
