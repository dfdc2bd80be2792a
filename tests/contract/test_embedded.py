"""The contract on the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.api import Log
from penstock.testing.contract import Harness, LogContract


class EmbeddedHarness:
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        return str(self._path)

    def open(self, **options: str | int | bool) -> Log:
        return open_log(self._path, create=True, upkeep_interval_ms=0, **options)


class TestEmbedded(LogContract):
    engine = "embedded"

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return EmbeddedHarness(tmp_path / "log.db")
