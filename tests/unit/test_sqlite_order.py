"""Reading several partitions of the embedded log: whole commits, in their order."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.reading.merge import in_commit_order
from penstock.testing.contract import Order, commit_as, create, orders

COMMITS = 64


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        yield opened


def amounts(log: Log) -> list[int]:
    return [event.data.amount for event in orders(log, "s")]


@pytest.mark.parametrize("partitions", [2, 4, 17])
def test_upkeep_does_not_change_the_order_of_commits(log: Log, partitions: int) -> None:
    create(log, "s", partitions=partitions)
    holder = log.hold("p")
    for n in range(COMMITS * partitions):
        commit_as(log, holder, n, "s", [n])
    assert amounts(log) == list(range(COMMITS * partitions))
    assert log.maintain().batches_merged
    assert amounts(log) == list(range(COMMITS * partitions))


def test_upkeep_does_not_change_the_order_of_partitions_within_a_commit(log: Log) -> None:
    create(log, "s", partitions=3)
    holder = log.hold("p")
    for n in range(COMMITS):
        commit_as(log, holder, n, "s", range(10 * n, 10 * n + 10))
    before = amounts(log)
    assert log.maintain().batches_merged
    assert amounts(log) == before


def test_the_order_holds_in_little_memory(log: Log, chance: random.Random) -> None:
    create(log, "s", partitions=5)
    holder = log.hold("p")
    for n in range(300):
        size = chance.choice([1, 1, 1, 20])
        commit_as(log, holder, n, "s", [100 * n + chance.randrange(10) for _ in range(size)])
        if n == 200:
            log.maintain()
    read = {p: (0, lambda start, p=p: log.read("s", p, start)) for p in range(5)}
    expected = [(e.partition, e.offset) for e in orders(log, "s")]
    commits = [batch.commit for batch in in_commit_order(read)]
    assert commits == sorted(commits)
    for most in (0, 3_000, 20_000):
        found = [
            (e.partition, e.offset)
            for batch in in_commit_order(read, ahead_bytes_max=most)
            for e in batch.events(Order)
        ]
        assert found == expected


@pytest.mark.parametrize("partitions", [2, 17])
def test_following_from_the_latest_shows_no_part_of_a_commit(log: Log, partitions: int) -> None:
    create(log, "s", partitions=partitions)
    holder, stop = log.hold("p"), threading.Event()

    def write() -> None:
        for number in itertools.count():
            commit_as(log, holder, number, "s", range(10))
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            found = itertools.islice(orders(log, "s", start="latest", follow=True), 10)
            assert sorted(event.data.amount for event in found) == list(range(10))
    finally:
        stop.set()
        writer.join()
