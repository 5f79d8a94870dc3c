"""Fast forms against their readable references."""
