"""What lies beside the weights of a saved swap, for programs that do not import this package."""
