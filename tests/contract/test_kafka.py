"""The contract on the Kafka engine."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.api import Log
from penstock.testing.brokers import Brokers
from penstock.testing.contract import Harness, LogContract


class KafkaHarness:
    """One log of many in a cluster: each has its own prefix."""

    def __init__(self, brokers: Brokers, cache: Path) -> None:
        self._url = f"{brokers.url}/t{secrets.token_hex(4)}"
        self._cache = cache

    @property
    def url(self) -> str:
        return self._url

    def open(self, **options: str | int | bool) -> Log:
        given = {"upkeep_interval_ms": 0, "cache": str(self._cache), **options}
        return open_log(self._url, create=True, **given)


class TestKafka(LogContract):
    engine = "kafka"
    moments_s = 5.0
    producers_kept_us = "penstock.log.kafka.upkeep.PRODUCER_KEPT_US"

    @pytest.fixture
    def harness(self, broker: Brokers, tmp_path: Path) -> Harness:
        return KafkaHarness(broker, tmp_path / "cache")
