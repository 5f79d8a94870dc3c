"""What an attention swap does to a model: outliers, similarity of tokens, entropy, geometry."""
