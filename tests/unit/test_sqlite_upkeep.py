"""Upkeep of the embedded log: what it keeps, what it removes, and beside whom."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from penstock.log import open_log
from penstock.log.api import Commit, Part
from penstock.log.declaring.objects import AlterStream, DropStream
from penstock.log.engine.ids import as_integer, ranges_of
from penstock.log.reading.read import read_batches
from penstock.log.sqlite import connection as sqlite
from penstock.log.writing.compose import Composer, EventOptions
from penstock.log.writing.transaction import Transaction
from penstock.records.event import from_microseconds, now_us
from penstock.testing.contract import Order, commit_as, create, make_part, orders


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def test_the_background_looks_after_the_log(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=10) as log:
        create(log, "s")
        holder = log.hold("p")
        for n in range(40):
            commit_as(log, holder, n, "s", [n])
        deadline = threading.Event()
        for _ in range(1000):
            if log.facts()["batches"] < 20:  # type: ignore[operator]
                break
            deadline.wait(0.02)
        else:
            raise AssertionError("small batches were never merged")
        assert [e.data.amount for e in orders(log, "s")] == list(range(40))


def test_forgotten_producers_start_anew(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        old = log.hold("once", ephemeral=True)
        commit_as(log, old, 5, "s", [1])
        kept = log.hold("kept")
        commit_as(log, kept, 5, "s", [2])
        with contextlib.closing(sqlite.connect(path)) as connection:
            connection.execute("UPDATE producers SET used_us = 0")
        assert log.maintain().producers_forgotten == 1
        assert log.last_commit("once") is None
        assert log.last_commit("kept") is not None
        new = log.hold("once", ephemeral=True)
        assert new.epoch > old.epoch


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("-7", -7), ("007", None), ("+1", None), ("1.0", None), ("", None), ("-", None),
        (str(2**63 - 1), 2**63 - 1), (str(-(2**63)), -(2**63)), (str(2**63), None), ("٣", None),
        ("-0", None),
    ],
)  # fmt: skip
def test_only_canonical_integers_are_integers(text: str, number: int | None) -> None:
    assert as_integer(text) == number


def test_integers_become_ranges() -> None:
    assert ranges_of([5, 1, 2, 3, 9, 8]) == [(1, 3), (5, 5), (8, 9)]


@pytest.mark.row("H15", engine="embedded")
def test_a_sequence_of_ids_is_one_row(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", ids="producer", key=None)
        holder = log.hold("p")
        numbers = [*range(0, 500, 2), *range(1, 500, 2)]
        for n in range(0, 500, 50):
            ids = numbers[n : n + 50]
            log.commit(holder, n, Commit(parts=[make_part(log, "s", ids, ids=ids)]))
        with contextlib.closing(sqlite.connect(path)) as connection:
            assert connection.execute("SELECT first, last FROM id_ranges").fetchall() == [(0, 499)]
        assert sum(1 for _ in orders(log, "s")) == 500


def counted_and_stored(path: Path) -> list[sqlite.SqlRow]:
    query = """SELECT p.bytes, coalesce(sum(b.bytes), 0) FROM partitions AS p
               LEFT JOIN batches AS b USING (stream_id, partition) GROUP BY stream_id, partition"""
    with contextlib.closing(sqlite.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_sizes_stay_right_while_retention_and_commits_share_transactions(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", retention_bytes=30_000)
        stop = threading.Event()

        def maintain() -> None:
            while not stop.is_set():
                log.maintain()

        def write(number: int) -> None:
            holder = log.hold(f"p{number}")
            for n in range(60):
                commit_as(log, holder, n, "s", range(20))

        keeper = threading.Thread(target=maintain)
        keeper.start()
        writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        keeper.join()
        assert all(counted == stored for counted, stored in counted_and_stored(path))
        log.maintain()
        assert sum(1 for _ in orders(log, "s")) > 0


def test_the_file_shrinks_when_events_go(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        with Transaction(log, "p") as tx:
            for n in range(20):
                tx.append("s", pa.table({"user": [os.urandom(50).hex() for _ in range(2000)],
                                         "amount": [n] * 2000}))  # fmt: skip
        log.apply([DropStream("s")])
        pages = [freelist(path)]
        for _ in range(20):
            log.maintain()
            pages.append(freelist(path))
        assert pages[-1] < pages[0]


def freelist(path: Path) -> int:
    with contextlib.closing(sqlite.connect(path)) as connection:
        return int(connection.pragma("freelist_count"))


def test_a_stream_may_be_dropped_during_upkeep(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", retention_ms=1, partitions=2)
        holder = log.hold("p")
        for n in range(40):
            commit_as(log, holder, n, "s", range(20))
        streams = log.streams()
        log.apply([DropStream("s")])
        log._housekeeper.round(streams)  # type: ignore[attr-defined]


def test_merged_batches_keep_to_the_limit_of_bytes(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0, batch_bytes_max=1_000_000) as log:
        create(log, "s")
        holder = log.hold("p")
        for n in range(64):
            part = make_part(log, "s", [n])
            text = pa.array(["x" * 50_000])
            part = Part("s", part.batch.set_column(0, part.batch.schema.field(0), text))
            log.commit(holder, n, Commit(parts=[part]))
        log.maintain()
        sizes = [batch.to_arrow().nbytes for batch in read_batches(log, "s")]
        assert len(sizes) < 64
        assert max(sizes) < 1_100_000


def test_an_id_is_not_forgotten_while_its_event_is_there(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", ids="producer", key=None, retention_ms=3_600_000)
        holder = log.hold("p")

        def send(sequence: int, name: str) -> None:
            stream = log.stream("s")
            composer = Composer("t", log.limits)
            event = composer.admit(stream, Order("a", 1), EventOptions(id=name))
            log.commit(holder, sequence, Commit(parts=[composer.part(stream, [event])]))

        for n in range(20):
            send(n, f"x{n}")
        log.maintain()  # merges: the batch is as young as its youngest event
        log.maintain()
        for n in range(20):
            send(20 + n, f"x{n}")
        assert sum(1 for _ in orders(log, "s")) == 20


def test_verifying_while_batches_are_merged_finds_nothing(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log, open_log(path, upkeep_interval_ms=0) as other:
        create(log, "s", retention_bytes=20_000)
        stop = threading.Event()

        def write() -> None:
            holder = other.hold("w")
            for n in itertools.count():
                if stop.is_set():
                    return
                commit_as(other, holder, n, "s", [n])
                if n % 20 == 0:
                    other.maintain()

        thread = threading.Thread(target=write)
        thread.start()
        found = [damage for _ in range(15) for damage in log.verify()]
        stop.set()
        thread.join()
        assert found == []


def test_nothing_is_kept_of_what_a_commit_left_out(path: Path) -> None:
    """Of staged events that the stream held already, the rest is stored anew."""
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", ids="producer", key=None)
        holder = log.hold("p")
        for n, ids in enumerate(([1, 2], [2, 3], [2, 3])):
            piece = log.stage(holder, n, make_part(log, "s", ids, ids=ids))
            log.commit(holder, n, Commit(pieces=[piece]))
        log.apply([DropStream("s")])
        query = """SELECT count(*) FROM blobs WHERE id NOT IN
                   (SELECT blob_id FROM batches UNION SELECT blob_id FROM pieces)"""
        with contextlib.closing(sqlite.connect(path)) as connection:
            assert connection.execute(query).fetchall() == [(0,)]


def test_what_is_merged_keeps_its_times_and_stays_as_long_as_its_youngest_event(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = now = now_us()
    monkeypatch.setattr("penstock.log.sqlite.committer.now_us", lambda: now)
    monkeypatch.setattr("penstock.log.sqlite.upkeep.now_us", lambda: now)
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", retention_ms=3_600_000)
        holder = log.hold("p")
        for n in range(20):
            now = start + n * 60_000_000
            commit_as(log, holder, n, "s", [n])
        assert log.maintain().batches_merged == 20
        for late_us, offset in ((-1, 7), (0, 7), (1, 8)):
            at = from_microseconds(start + 7 * 60_000_000 + late_us)
            assert log.offset_at("s", 0, at) == offset
        now = start + 65 * 60_000_000  # the first few are too old, and share a batch with others
        log.maintain()
        assert [e.data.amount for e in orders(log, "s")] == list(range(20))
        now = start + 80 * 60_000_000
        log.maintain()
        assert list(orders(log, "s")) == []


def test_only_neighbours_are_merged(path: Path) -> None:
    """Small batches between larger ones go first; what is left is no longer side by side."""
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        holder = log.hold("p")
        sizes = [100] * 8 + [1] * 16 + [100] * 8
        for n, (at, size) in enumerate(zip(itertools.accumulate(sizes), sizes, strict=True)):
            commit_as(log, holder, n, "s", range(at - size, at))
        assert log.maintain().batches_merged == 16
        assert [e.data.amount for e in orders(log, "s")] == list(range(sum(sizes)))
        assert list(log.verify()) == []


def test_what_changed_while_it_was_merged_stays_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was faster: retention has taken some of it."""
    with open_log(path, upkeep_interval_ms=0) as log, open_log(path, upkeep_interval_ms=0) as other:
        create(log, "s")
        holder = log.hold("p")
        for n in range(20):
            commit_as(log, holder, n, "s", [n])
        faster = ["merge.built"]

        def meanwhile(name: str) -> None:
            if name in faster:
                faster.remove(name)
                spec = msgspec.structs.replace(log.stream("s").spec, retention_bytes=1)
                other.apply([AlterStream(spec)])
                assert other.maintain().batches_expired == 19

        monkeypatch.setattr("penstock.log.sqlite.upkeep.failpoint", meanwhile)
        assert log.maintain().batches_merged == 0
        assert not faster
        assert [e.data.amount for e in orders(log, "s")] == [19]
        assert list(log.verify()) == []


def test_retention_by_size_never_takes_more_than_is_too_much(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s", retention_bytes=20_000)
        holder = log.hold("p")
        for n in range(30):
            commit_as(log, holder, n, "s", range(n * 50, n * 50 + 50))
        before = max(stored for _, stored in counted_and_stored(path))
        log.maintain()
        after = max(stored for _, stored in counted_and_stored(path))
        assert 20_000 <= after < 20_000 + before // 30 * 2 < before
