"""Computes variants exactly and fast, where plain SDPA is not enough. The tests compare each form with its reference."""
