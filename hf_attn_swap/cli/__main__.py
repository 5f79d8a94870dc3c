"""`python -m hf_attn_swap.cli`, the same as the console script."""

from . import main

main()
