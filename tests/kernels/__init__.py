"""Tests that the fast forms equal their readable references."""
