"""Fast exact forms that need more than plain SDPA; each has its readable reference elsewhere, and is tested equal."""
