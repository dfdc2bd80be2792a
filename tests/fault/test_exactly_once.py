"""Exactly-once on the embedded log: see `tests.fault.payments`."""

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
from tests.fault.payments import ALL_STEPS, kills_at, random_kills, seed_of
from tests.fault.pipeline import app


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        make_streams(opened, plan(app))
        yield opened


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.row("F12", engine="embedded")
@pytest.mark.timeout(900)
def test_random_kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    random_kills(log, tmp_path, 2, seed_of(request))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds = int(os.environ.get("PENSTOCK_SOAK_ROUNDS") or 25)
    random_kills(log, tmp_path, max(25, rounds), seed_of(request))


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.timeout(900)
def test_kills_within_a_batch(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At three steps, others each time."""
    seed = seed_of(request)
    kills_at(log, tmp_path, random.Random(seed).sample(ALL_STEPS, 2), seed, range(5, 25))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_kill_at_every_step(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills_at(log, tmp_path, ALL_STEPS, seed_of(request), range(5, 25))
