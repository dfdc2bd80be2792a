"""The test kit that ships with Penstock: the contract suite, faults as input, and the oracle.

Needs `penstock[testing]`.
"""

import pytest

# Before these are imported: a failing `assert` in them then says what it compared.
pytest.register_assert_rewrite(
    "penstock.testing.contract", "penstock.testing.workload", "penstock.testing.model"
)
