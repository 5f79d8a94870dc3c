"""Draws the pictures of README and of the documentation from the registry of variants."""
