"""Connects swapped layers to transformers: the attention function, the hooks, the cache, and what a model carries."""
