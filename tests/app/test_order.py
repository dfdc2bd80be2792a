"""The order of what is made of several partitions: that of the commits it came from."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from pathlib import Path

import pytest

from penstock import App, Log
from penstock import open as open_log
from penstock.app.running.splits import ORDERED_ROWS_MIN, ordered_splits
from penstock.app.tasks.task import Range
from penstock.testing.apps import AppTest
from penstock.testing.contract import commit_as as commit_orders
from penstock.testing.contract import create
from tests.app.shop import START, Note, Order


@pytest.mark.parametrize("upkeep", [False, True])
def test_events_of_a_new_key_are_in_the_order_of_their_commits(
    tmp_path: Path, upkeep: bool
) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=4)
    by_item = orders.group_by("item")
    notes = app.stream("notes", Note)

    @app.agent(orders, to=notes)
    def tell(order: Order) -> Note:  # may not share the other's batches, which are cut otherwise
        return Note(order.item)

    with AppTest(app, tmp_path) as run:
        run.runner.stop()
        for n in range(200):
            run.send(orders, Order(f"u{n % 13}", f"i{n % 3}", n))
        if upkeep:
            assert run.log.maintain().batches_merged
        run.restart()
        run.until_idle()
        found = defaultdict(list)
        for order in run.events(by_item):
            found[order.item].append(order.amount)
        assert {item: sorted(amounts) for item, amounts in found.items()} == found
        assert sum(map(len, found.values())) == len(run.events(notes)) == 200


def pieces(log: Log, ranges: list[Range], tasks: int) -> list[list[int]]:
    """The commits that each split holds."""
    found = []
    for split in ordered_splits(log, ranges, tasks):
        commits = {
            run.commit
            for range_ in split.ranges
            for batch in log.read(*range_)
            for run in batch.runs
        }
        found.append(sorted(commits))
    return found


def test_splits_are_cut_between_commits(tmp_path: Path, chance: random.Random) -> None:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as log:
        create(log, "s", partitions=3)
        holder = log.hold("p")
        for n in range(60):
            rows = [chance.randrange(10) for _ in range(chance.choice([1, 30, 200]))]
            commit_orders(log, holder, n, "s", rows)
            if n == 40:
                log.maintain()
        ends = {p: offsets.next for p, offsets in log.offsets("s").items()}
        ranges = [Range("s", p, 0, end) for p, end in ends.items()]
        made = pieces(log, ranges, 4)
        assert len(made) == min(4, sum(ends.values()) // ORDERED_ROWS_MIN)
        for before, after in itertools.pairwise(made):
            assert before[-1] < after[0], "no commit is in two splits, and they are in order"
        whole = [r for split in ordered_splits(log, ranges, 4) for r in split.ranges]
        for partition, end in ends.items():
            mine = [r for r in whole if r.partition == partition]
            assert mine[0].start == 0
            assert mine[-1].end == end
            assert all(a.end == b.start for a, b in itertools.pairwise(mine))


def test_few_events_are_one_split(tmp_path: Path) -> None:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as log:
        create(log, "s", partitions=2)
        commit_orders(log, log.hold("p"), 0, "s", range(10))
        ranges = [Range("s", p, 0, o.next) for p, o in log.offsets("s").items()]
        (split,) = ordered_splits(log, ranges, 8)
        assert split.as_stored
        assert split.ranges == tuple(ranges)


def test_an_event_under_another_key_keeps_what_it_had_to_itself(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    by_item = orders.group_by("item")
    with AppTest(app, tmp_path) as run:
        given = orders.new(Order("ada", "tea"), time=START, headers={"trace": "7"})
        run.send(orders, given)
        run.until_idle()
        (found,) = run.whole_events(by_item.name)
    assert (found.key, found.time, found.headers) == (b"tea", START, {"trace": "7"})
