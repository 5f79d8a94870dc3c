"""Publishes converted models: results, model cards, citations, whole checkpoints, and the Hub."""
