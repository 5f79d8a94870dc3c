"""The command line as `python -m hf_attn_swap.cli`. The commands are in the package `hf_attn_swap_cli`."""

from hf_attn_swap_cli import app, main, run

__all__ = ["app", "main", "run"]

if __name__ == "__main__":
    main()
