"""UpkeepContract: retention, merging and verification, while others read and write."""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections.abc import Callable

import pytest

from penstock.errors import (
    FencedError,
    OffsetGoneError,
)
from penstock.log.api import Log
from penstock.producer import Producer
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    batch_time,
    by_place,
    commit,
    commit_as,
    create,
    orders,
    wait_for_clock_after,
)
from penstock.testing.processes import wait_until


class UpkeepContract(OnEngine):
    # Retention

    def test_retention_by_time_removes_old_events(self, log: Log) -> None:
        create(log, "s", retention_ms=1)
        done = commit(log, "p", 0, "s", [1, 2])
        wait_for_clock_after(done.time + dt.timedelta(milliseconds=5))
        log.maintain()
        bounds = log.offsets("s")[0]
        assert bounds.first == bounds.next
        for offset in (0, bounds.first - 1):
            with pytest.raises(OffsetGoneError) as gone:
                list(log.read("s", 0, offset))
            assert gone.value.earliest == bounds.first
        again = commit(log, "p", 1, "s", [3])
        assert again.placements[0].ranges[0][1] >= bounds.next

    def test_retention_by_size_keeps_the_newest(self, harness: Harness) -> None:
        """An engine may keep somewhat more, and may remove events later."""
        noise = random.Random(1)
        with harness.open(batch_rows_max=100) as log:
            create(log, "s", retention_bytes=1_000_000)
            with Producer(log) as producer:
                for n in range(1200):
                    producer.send("s", Order("a", n, noise.randbytes(2500).hex()))

            def is_cut() -> bool:
                log.maintain()
                return log.offsets("s")[0].first > 0

            wait_until(is_cut, 60, "retention by size")
            amounts = [e.data.amount for e in orders(log, "s")]
            assert 0 < len(amounts) < 1200
            assert amounts == list(range(1200 - len(amounts), 1200))
            with pytest.raises(OffsetGoneError):
                list(log.read("s", 0, 0))

    # Storing the same events differently

    def test_upkeep_changes_nothing_that_a_reader_sees(self, harness: Harness, log: Log) -> None:
        create(log, "s", partitions=2)
        create(log, "t", table=True)
        with Producer(log) as producer:
            for n in range(150):
                producer.send("s", Order(f"u{n % 5}", n), headers={"n": str(n)} if n % 3 else None)
                producer.send("t", Order(f"u{n % 5}", n)).result()
                if n % 10 == 9:
                    producer.send("t", None, key="u1").result()
        before = [list(by_place(log, "s")), list(by_place(log, "t"))]
        times = [log.offset_at("t", 0, batch_time(log, n)) for n in (10, 80)]
        log.maintain()
        with harness.open() as other:
            assert [list(by_place(other, "s")), list(by_place(other, "t"))] == before
            assert [other.offset_at("t", 0, batch_time(log, n)) for n in (10, 80)] == times
            middle = [e.offset for e in orders(other, "t", start=70)]
            assert middle == [e.offset for e in before[1] if e.offset >= 70]

    def test_upkeep_runs_beside_readers_and_writers(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        stop = threading.Event()
        errors: list[BaseException] = []

        def run_guarded(work: Callable[[Log], object]) -> threading.Thread:
            def run() -> None:
                try:
                    with harness.open() as other:
                        while not stop.is_set():
                            work(other)
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def read_all(other: Log) -> None:
            amounts = [e.data.amount for e in orders(other, "s")]
            assert amounts == list(range(len(amounts)))

        threads = [run_guarded(read_all), run_guarded(lambda other: other.maintain())]
        holder = log.hold("p")
        for n in range(300):
            commit_as(log, holder, n, "s", [n])
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert [e.data.amount for e in orders(log, "s")] == list(range(300))

    # Producers

    def test_only_ephemeral_producers_are_forgotten(
        self, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A permanent one stays permanent, even if it is opened as an ephemeral one."""
        create(log, "s")
        for name, *holds in (
            ("once", True),
            ("often", True, True),
            ("kept", False),
            ("late", True, False),
            ("early", False, True),
            ("between", True, False, True),
        ):
            for ephemeral in holds:
                holder = log.hold(name, ephemeral=ephemeral)
            commit_as(log, holder, 0, "s", [1])
        assert log.maintain().producers_forgotten == 0
        monkeypatch.setattr(self.producers_kept_us, -1_000_000)
        assert log.maintain().producers_forgotten == 2
        known = [
            name
            for name in ("once", "often", "kept", "late", "early", "between")
            if log.last_commit(name) is not None
        ]
        assert known == ["kept", "late", "early", "between"]

    def test_a_holder_of_a_forgotten_producer_has_to_open_it_again(
        self, harness: Harness, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create(log, "s")
        fenced, idle = (log.hold("once", ephemeral=True) for _ in range(2))
        commit_as(log, idle, 7, "s", [1])
        monkeypatch.setattr(self.producers_kept_us, -1_000_000)
        with harness.open() as other:
            assert other.maintain().producers_forgotten == 1
        for holder in (idle, fenced):
            with pytest.raises(FencedError, match=r"is unknown; .*: open it again"):
                commit_as(log, holder, 8, "s", [2])
        new = log.hold("once", ephemeral=True)
        for holder in (idle, fenced):
            with pytest.raises(FencedError, match="opened again"):
                commit_as(log, holder, 8, "s", [2])
        commit_as(log, new, 0, "s", [3])
        assert [e.data.amount for e in orders(log, "s")] == [1, 3]

    # Verify

    def test_a_healthy_log_verifies(self, log: Log) -> None:
        create(log, "s", partitions=2)
        commit(log, "p", 0, "s", range(100))
        calls: list[tuple[int, int]] = []
        assert list(log.verify(lambda done, total: calls.append((done, total)))) == []
        assert calls[-1][0] == calls[-1][1]
