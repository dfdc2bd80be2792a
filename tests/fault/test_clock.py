"""A clock that jumps: times of append never go back, and reading by time still works."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.testing.contract import commit_as, create, orders


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns()
    hour = 3600 * 10**9
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as log:
        create(log, "s")
        holder = log.hold("p")
        done = []
        for n, jump in enumerate((0, 5 * hour, -9 * hour, 1 * hour, 20 * hour, 0)):
            monkeypatch.setattr(time, "time_ns", lambda jump=jump, n=n: real + jump + n * 10**9)
            done.append(commit_as(log, holder, n, "s", [n]))
        times = [committed.time for committed in done]
        assert times == sorted(times)
        for n, at in enumerate(times):
            read = [event.data.amount for event in orders(log, "s", start=at)]
            assert read == list(range(times.index(at), 6)), n
        later = times[-1] + dt.timedelta(seconds=1)
        assert list(orders(log, "s", start=later)) == []
