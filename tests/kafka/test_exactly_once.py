"""Exactly-once on Kafka: the same app and oracle as on the embedded log, brokers killed too."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Log
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.streams import make_streams
from penstock.testing.brokers import Brokers
from tests.fault.payments import Kills, seed_of
from tests.fault.pipeline import app

#: from staging in a task to the end of the transaction
STEPS = ("stage.blobs", "publish.pieces", "commit.blobs", "commit.producer")


@pytest.fixture
def brokers(kafka_jars: Path, tmp_path: Path) -> Iterator[Brokers]:
    with Brokers(1, tmp_path / "kafka") as found:
        yield found


@pytest.fixture
def log(brokers: Brokers, tmp_path: Path) -> Iterator[Log]:
    with open_log(brokers.url, cache=str(tmp_path / "cache")) as opened:
        make_streams(opened, plan(app))
        yield opened


def kill(brokers: Brokers) -> None:
    brokers.kill(0)
    brokers.restart(0)
    brokers.wait_ready()


@pytest.fixture
def kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> Kills:
    return Kills(log, tmp_path, seed_of(request), [f"cache={tmp_path / 'cache'}"])


@pytest.mark.row("F1", "X3", engine="kafka")
@pytest.mark.timeout(900)
def test_some_kills(kills: Kills, brokers: Brokers, chance: random.Random) -> None:
    """Within a batch, then at random, brokers among them."""
    with kills:
        kills.at_steps(chance.sample(STEPS, 1), range(2, 12))
        kills.at_random(2, lambda: kill(brokers))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills(kills: Kills, brokers: Brokers) -> None:
    rounds = max(25, int(os.environ.get("PENSTOCK_SOAK_ROUNDS") or 25))
    with kills:
        kills.at_random(rounds, lambda: kill(brokers))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_kill_at_every_step(kills: Kills) -> None:
    with kills:
        kills.at_steps(STEPS, range(2, 12))
