"""Reads what a user types, and writes small tables."""
