"""Exact and fast forms of variants, where plain SDPA is not enough. The tests compare each form with its reference."""
