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
from tests.fault.payments import ALL_STEPS, Kills, seed_of
from tests.fault.pipeline import app


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        make_streams(opened, plan(app))
        yield opened


@pytest.fixture
def kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> Kills:
    return Kills(log, tmp_path, seed_of(request))


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.row("F12", engine="embedded")
@pytest.mark.timeout(900)
def test_some_kills(kills: Kills, chance: random.Random) -> None:
    """Within a batch, then at random."""
    with kills:
        kills.at_steps(chance.sample(ALL_STEPS, 1), range(5, 25))
        kills.at_random(1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills(kills: Kills) -> None:
    with kills:
        kills.at_random(max(25, int(os.environ.get("PENSTOCK_SOAK_ROUNDS") or 25)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_kill_at_every_step(kills: Kills) -> None:
    with kills:
        kills.at_steps(ALL_STEPS, range(5, 25))
