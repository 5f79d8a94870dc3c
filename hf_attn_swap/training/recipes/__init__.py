"""The recipes: each trains a variant and its softmax control from the command line, `hf-attn-swap train RECIPE`."""
