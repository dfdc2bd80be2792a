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
from tests.fault.payments import kills_at, random_kills, seed_of
from tests.fault.pipeline import app

#: from staging in a task to the end of the transaction
STEPS = ("stage.blobs", "publish.pieces", "commit.blobs", "commit.producer")


@pytest.fixture
def brokers(kafka_jars: Path, tmp_path: Path) -> Iterator[Brokers]:
    with Brokers(1, tmp_path / "kafka") as found:
        yield found


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return [f"cache={tmp_path / 'cache'}"]


@pytest.fixture
def log(brokers: Brokers, tmp_path: Path) -> Iterator[Log]:
    with open_log(brokers.url, cache=str(tmp_path / "cache")) as opened:
        make_streams(opened, plan(app))
        yield opened


def kill(brokers: Brokers) -> None:
    brokers.kill(0)
    brokers.restart(0)
    brokers.wait_ready()


@pytest.mark.row("F1", "X3", engine="kafka")
@pytest.mark.timeout(900)
def test_random_kills(
    log: Log, brokers: Brokers, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = seed_of(request)
    random_kills(log, tmp_path, 2, seed, options=options, nuisance=lambda: kill(brokers))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills(
    log: Log, brokers: Brokers, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rounds = max(25, int(os.environ.get("PENSTOCK_SOAK_ROUNDS") or 25))
    seed = seed_of(request)
    random_kills(log, tmp_path, rounds, seed, options=options, nuisance=lambda: kill(brokers))


@pytest.mark.row("F1", "X3", engine="kafka")
@pytest.mark.timeout(900)
def test_kills_at_some_steps(
    log: Log, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One of them, another each time."""
    seed = seed_of(request)
    some = random.Random(seed).sample(STEPS, 1)
    kills_at(log, tmp_path, some, seed, range(2, 12), options=options)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_kill_at_every_step(
    log: Log, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills_at(log, tmp_path, STEPS, seed_of(request), range(2, 12), options=options)
