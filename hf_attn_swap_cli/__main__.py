"""The command line as `python -m hf_attn_swap_cli`, which accelerate and torchrun start in several processes."""

from . import main

main()
