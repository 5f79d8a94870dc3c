"""The collector is kept away from what importing made, as in the contract tests: patching looks through the rest."""

from tests.contract.conftest import _frozen_collector  # noqa: F401  # a fixture, found by its name
