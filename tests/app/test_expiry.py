"""Windows that expire by the time of their events: never before these have been read."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from penstock import (
    App,
    AppStream,
    AppTable,
    CreateStream,
    DropStream,
    Record,
    WindowedEntry,
    declare,
    tumbling,
)
from penstock import open as open_log
from penstock.app.declaring.tables import window_key
from penstock.app.declaring.windows import Window
from penstock.app.running.query import QueryLimits
from penstock.app.running.splits import BatchInput, keyed_splits
from penstock.app.tasks.task import DueTimer, Range
from penstock.app.tasks.timers import TimerKey, event_clock, unpack_timer
from penstock.log.api import Offsets
from penstock.records.event import partition_of
from penstock.testing.apps import AppTest
from tests.app.shop import START

FEW = QueryLimits(batch_rows_max=4)


class View(Record):
    page: str
    at: dt.datetime


class Site:
    def __init__(self, partitions: int = 1) -> None:
        self.app = App("site")
        self.views: AppStream[View] = self.app.stream(
            "views", View, key="page", time="at", partitions=partitions
        )
        self.counts: AppTable[int] = self.app.table(
            "counts", value=int, default=0, window=tumbling("10 seconds", expires="1 minute")
        )

        @self.app.agent(self.views, state=self.counts)
        def count(view: View, counts: WindowedEntry[int]) -> None:
            counts.current().value += 1


def view(second: float, page: str = "home") -> View:
    return View(page, START + dt.timedelta(seconds=second))


def counted(run: AppTest, site: Site) -> dict[tuple[str, int], int]:
    """By page and second."""
    first = int(START.timestamp())
    return {(page, at // 1000 - first): n for (page, at), n in run.table(site.counts).items()}


def test_a_backfill_counts_as_if_it_were_live(tmp_path: Path) -> None:
    site = Site()
    with AppTest(site.app, tmp_path, limits=FEW) as run:
        run.send(site.views, *(view(n / 4) for n in range(40)))
        run.until_idle()
        assert counted(run, site) == {("home", 0): 40}
        run.send(site.views, view(69))
        run.until_idle()
        assert counted(run, site) == {("home", 0): 40, ("home", 60): 1}
        run.send(site.views, view(70))
        run.until_idle()
        assert counted(run, site) == {("home", 60): 1, ("home", 70): 1}


def test_an_outage_ends_no_window_early(tmp_path: Path) -> None:
    site = Site()
    with AppTest(site.app, tmp_path, limits=FEW) as run:
        run.send(site.views, *(view(n) for n in range(5)))
        run.until_idle()
        run.runner.stop()
        run.send(site.views, *(view(n) for n in range(5, 10)))
        run.advance("30 days")
        run.restart()
        run.until_idle()
        assert counted(run, site) == {("home", 0): 10}


def test_what_was_seen_is_remembered_over_a_restart(tmp_path: Path) -> None:
    site = Site()
    with AppTest(site.app, tmp_path) as run:
        run.send(site.views, view(0), view(80))
        run.until_idle()
        run.restart()
        run.until_idle()
        assert counted(run, site) == {("home", 80): 1}


def test_an_event_from_the_future_ends_nothing(tmp_path: Path) -> None:
    site = Site()
    with AppTest(site.app, tmp_path, limits=FEW) as run:
        late = dt.datetime(9998, 1, 1, tzinfo=dt.UTC)
        run.send(site.views, view(0), View("home", late), *(view(n) for n in range(1, 10)))
        run.until_idle()
        assert counted(run, site)["home", 0] == 10


def test_a_partition_that_is_far_ahead_ends_nothing_of_the_others(tmp_path: Path) -> None:
    site = Site(partitions=2)
    with AppTest(site.app, tmp_path, limits=FEW) as run:
        stream = run.log.stream("views")
        homes = {page: next(iter(stream.homes(page.encode()))) for page in "abcdef"}
        slow, quick = (next(p for p, home in homes.items() if home == n) for n in (0, 1))
        run.runner.stop()
        run.send(site.views, *(view(n / 10, slow) for n in range(100)), view(3600, quick))
        run.restart()
        run.until_idle()
        assert counted(run, site) == {(quick, 3600): 1}, "in the end all is over"
        changes = [e.data.value for e in run.whole_events(site.counts) if e.data is not None]
        assert changes.count(100) == 1, "and not before the last of it was counted"


@pytest.mark.parametrize(
    ("times", "at", "expected"),
    [
        ({0: 5, 1: 9}, {0: 10, 1: 10}, 9),
        ({0: 5, 1: 9}, {0: 3, 1: 10}, 5),
        ({0: 5, 1: 9}, {0: 10, 1: 3}, 9),
        ({0: 5, 1: 9}, {0: 3, 1: 3}, 5),
        ({1: 9}, {0: 3, 1: 10}, None),
        ({1: 9}, {0: 10, 1: 10}, 9),
        ({}, {}, None),
    ],
)
def test_the_clock_of_events(
    times: dict[int, int], at: dict[int, int], expected: int | None
) -> None:
    ends = {"s": {0: Offsets(0, 10), 1: Offsets(0, 10)}}
    assert event_clock({"s": times}, ends, {"s": at}) == expected


def test_a_stream_that_was_made_anew_has_a_time_of_its_own(tmp_path: Path) -> None:
    """What the old one had come to ends no window of the new one."""
    site = Site()
    with AppTest(site.app, tmp_path) as run:
        run.send(site.views, view(200))
        run.until_idle()
        run.runner.stop()
        spec = run.log.stream("views").spec
        run.log.apply([DropStream("views"), CreateStream(spec)])
        run.restart()
        run.send(site.views, view(0), view(1))
        run.until_idle()
        assert counted(run, site) == {("home", 0): 2, ("home", 200): 1}


def test_a_window_expires_where_its_key_is_handled(tmp_path: Path) -> None:
    """Whatever its partition, or its share of the keys, is: one task has a key's entries."""
    keys = [window_key(f"u{n}", Window(START, START)) for n in range(50)]
    timers = tuple(DueTimer(TimerKey(key, None).pack(), 0) for key in keys)
    with open_log(tmp_path / "test.db", create=True) as log:
        log.apply([CreateStream(declare(name, partitions=8)) for name in ("one", "other")])
        streams = {name: log.stream(name) for name in ("one", "other")}
    ranges = tuple(Range("one", partition, 0, 1) for partition in range(8))
    by_partition = keyed_splits(BatchInput({"one": streams["one"]}, ranges, timers), 2)
    by_share = keyed_splits(BatchInput(streams, ranges, timers), 3)
    homes = [(split, split.ranges[0].partition, 8) for split in by_partition]
    homes += [(split, split.slot, split.slots) for split in by_share]
    assert [(split.slot, split.slots) for split in by_share] == [(0, 3), (1, 3), (2, 3)]
    for split, home, all_ in homes:
        own = [unpack_timer(due.timer).own_key for due in split.timers]
        assert {partition_of(key, all_) for key in own} == {home}
    assert sum(len(split.timers) for split in (*by_partition, *by_share)) == 100
