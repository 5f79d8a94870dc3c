"""What is published: results, cards, citations, whole checkpoints, the Hub."""
