"""Measures what a model gives and what it lost by a swap; conversions and reports both build on it."""
