"""Computes variants exactly and fast, where plain SDPA is not enough. Tests compare each form with its reference."""
