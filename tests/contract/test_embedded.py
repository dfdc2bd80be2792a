"""The contract on the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.api import Log
from penstock.testing.contract import Harness, LogContract, commit_as, create, orders


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
    producers_kept_us = "penstock.log.sqlite.upkeep.PRODUCER_KEPT_US"

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return EmbeddedHarness(tmp_path / "log.db")

    def test_upkeep_merges_small_batches(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        for n in range(40):
            commit_as(log, holder, n, "s", [n])
        assert log.maintain().batches_merged > 0
        assert [e.data.amount for e in orders(log, "s")] == list(range(40))
