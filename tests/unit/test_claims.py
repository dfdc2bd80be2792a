"""Claims: when one is surely over, and what keeping and giving back survive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import LogBusyError
from penstock.log import open_log
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.log.claims import Claim, Claims, who_has
from penstock.processes import Process, this_process
from penstock.records.event import now_us

MINUTE_US = 60_000_000
ELSEWHERE = Process(host="elsewhere", pid=1, started="1", space="another")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(str(tmp_path / "log.db")) as opened:
        yield opened


def claim(lease_s: float, age_us: int) -> Claim:
    now = now_us()
    return Claim(
        run="r", process=ELSEWHERE, since_us=now - age_us, renewed_us=now - age_us, lease_s=lease_s
    )


@pytest.mark.parametrize(
    ("lease_s", "age_us", "is_over"),
    [(15.0, 1 * MINUTE_US, False), (15.0, 10 * MINUTE_US, True), (3600.0, 10 * MINUTE_US, False)],
)
def test_a_claim_is_over_long_after_its_own_lease(
    lease_s: float, age_us: int, is_over: bool
) -> None:
    assert claim(lease_s, age_us).is_surely_over() is is_over


def claims(log: Log, *names: str, lease_s: float = 15.0) -> Claims:
    return Claims(log, "app/shop", names, producer="claims", lease_s=lease_s)


def acquired(log: Log, *names: str, lease_s: float = 15.0, take_over: bool = False) -> Claims:
    found = claims(log, *names, lease_s=lease_s)
    assert found.acquire(threading.Event(), take_over=take_over)
    return found


def test_whoever_lost_one_name_gives_the_others_back(log: Log) -> None:
    first = acquired(log, "a", "b", lease_s=3600.0)
    second = acquired(log, "a", lease_s=3600.0, take_over=True)
    first.release()
    assert list(who_has(log, "app/shop", ["a", "b"])) == ["a"]
    assert who_has(log, "app/shop", ["a"])["a"].run == second.run
    second.release()


class Failing:
    """A log that cannot be reached, and then raises an error that nobody expects."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.failed = threading.Event()
        self.succeeded = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    def hold(self, producer: str) -> Holder:
        if not self.failed.is_set():
            self.failed.set()
            raise RuntimeError("nobody expects this")
        return self._log.hold(producer)

    def commit(self, holder: Holder, sequence: int, commit: Commit) -> Committed:
        if not self.failed.is_set():
            raise LogBusyError("it is busy")
        found = self._log.commit(holder, sequence, commit)
        self.succeeded.set()
        return found


def test_an_unknown_error_does_not_end_the_renewal(log: Log) -> None:
    mine = acquired(log, "a", lease_s=0.3)
    failing = Failing(log)
    mine._log = failing  # type: ignore[assignment]
    assert failing.failed.wait(10)
    assert failing.succeeded.wait(10)
    found = who_has(log, "app/shop", ["a"])["a"]
    assert (found.run, found.process) == (mine.run, this_process())
    mine.release()
    assert not who_has(log, "app/shop", ["a"])
