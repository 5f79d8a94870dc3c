"""Freezes the objects that imports made, as the contract tests do, so that garbage collection stays fast."""

from tests.contract.conftest import _frozen_collector  # noqa: F401  # a fixture, found by its name
