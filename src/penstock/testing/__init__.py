"""The test kit that ships with Penstock: the contract suite, faults as input, and the oracle.

Needs `penstock[testing]`.
"""

import pytest

# Before these are imported, so that a failing `assert` in them shows what it compared.
pytest.register_assert_rewrite(
    "penstock.testing.contract",
    "penstock.testing.workload",
    "penstock.testing.model",
    "penstock.testing.sink_contract",
)
