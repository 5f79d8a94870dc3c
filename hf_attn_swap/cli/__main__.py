"""Runs the command line as `python -m hf_attn_swap.cli`."""

from . import main

main()
