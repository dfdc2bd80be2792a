"""The embedded engine beside an in-memory model, through made-up sequences of operations."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.log import open_log
from penstock.log.api import Log
from penstock.testing.model import LogMachine


class EmbeddedMachine(LogMachine):
    def open_log(self) -> Log:
        self._folder = tempfile.TemporaryDirectory()
        return open_log(Path(self._folder.name) / "log.db", upkeep_interval_ms=0)

    def close_log(self) -> None:
        super().close_log()
        self._folder.cleanup()


QUICK = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
EmbeddedMachine.TestCase.settings = QUICK
TestEmbeddedModel = EmbeddedMachine.TestCase


class LongMachine(EmbeddedMachine):
    pass


LongMachine.TestCase.settings = settings(QUICK, max_examples=2000, stateful_step_count=60)


@pytest.mark.soak
@pytest.mark.timeout(7200)
class TestLongModel(LongMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = LongMachine.TestCase.settings
