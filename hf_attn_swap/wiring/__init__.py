"""The transformers side: the attention interface, hooks, and what a patched model carries."""
