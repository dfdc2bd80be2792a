"""What all tests share: the report of checklist rows."""

from __future__ import annotations

import pytest

from penstock.testing.rows import RowPlugin


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RowPlugin(), "penstock-rows")
