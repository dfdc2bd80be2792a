"""What the fault tests share: seeds, harmless failpoints, and workloads."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import failpoints
from tests.fault.runner import Runner


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A new seed for every run, printed when a test fails; PENSTOCK_SEED replays one."""
    chosen = int(os.environ.get("PENSTOCK_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"seed {chosen}: replay with PENSTOCK_SEED={chosen}\n")
    return chosen


@pytest.fixture(autouse=True)
def harmless() -> Iterator[None]:
    yield
    failpoints.disarm()


@pytest.fixture
def runner(tmp_path: Path, seed: int) -> Runner:
    return Runner(tmp_path / "log.db", seed)
