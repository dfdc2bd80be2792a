"""What the tests on Kafka share: a log of their own in the session's broker, and workloads."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Log, failpoints
from penstock import open as open_log
from penstock.testing.brokers import Brokers
from tests.fault.runner import Runner


@pytest.fixture
def seed() -> int:
    """A new seed for every run, printed when a test fails; PENSTOCK_SEED replays one."""
    chosen = int(os.environ.get("PENSTOCK_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"seed {chosen}: replay with PENSTOCK_SEED={chosen}\n")
    return chosen


@pytest.fixture(autouse=True)
def harmless() -> Iterator[None]:
    yield
    failpoints.disarm()


@pytest.fixture
def url(broker: Brokers) -> str:
    """A log that nobody else has."""
    return f"{broker.url}/t{secrets.token_hex(4)}"


@pytest.fixture
def kafka(url: str, tmp_path: Path) -> Iterator[Log]:
    with open_log(url, cache=str(tmp_path / "cache"), upkeep_interval_ms=0) as opened:
        yield opened


@pytest.fixture
def runner(url: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Runner(tmp_path / "workload", seed, url)
