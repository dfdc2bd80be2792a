"""The local file in which tables and ids are materialised: after losses, and used by many."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import apsw
import msgspec
import pytest

from penstock import Commit, Log
from penstock import open as open_log
from penstock.errors import LogUnreachableError
from penstock.log.api import Pin
from penstock.log.batch import Batch
from penstock.log.kafka.log import KafkaLog
from penstock.log.kafka.store import Store
from penstock.log.kafka.tables import Pinned
from penstock.records.event import now_us
from penstock.testing.contract import commit_as, create, make_part
from penstock.testing.faults import FaultyVfs, faulty_disk

HOUR_US = 3_600_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyVfs]:
    """A disk that may forget, or keep, whatever was not synced."""
    with faulty_disk() as vfs:
        vfs.durable = tmp_path / "durable"
        vfs.durable.mkdir()
        yield vfs


def test_after_loss_of_power_the_file_is_behind_or_right(
    kafka: KafkaLog, disk: FaultyVfs, tmp_path: Path, chance: random.Random
) -> None:
    """What was written reaches the disk in any order; losing the last of it is harmless."""
    create(kafka, "t", table=True)
    create(kafka, "s", ids="producer", key=None)
    table, unique = (kafka._catalogue.stream(name) for name in ("t", "s"))
    holder = kafka.hold("p")
    (tmp_path / "live").mkdir()
    store = Store(tmp_path / "live" / "t.db", kafka._reader.read, "faulty")
    store._connection().pragma("wal_autocheckpoint", 8)
    for number in range(30):
        users = [chance.randrange(100) for _ in range(20)]
        commit_as(kafka, holder, 2 * number, "t", users)
        part = make_part(kafka, "s", [number], ids=[chance.randrange(10**6)])
        kafka.commit(holder, 2 * number + 1, Commit(parts=[part]))
        ends = {s.id: {0: kafka.offsets(str(s.name))[0].next} for s in (table, unique)}
        for stream in (table, unique):
            store.catch_up(stream, ends[stream.id], now_us())
        after = tmp_path / f"after-{number}"
        disk.lose_power(after, chance)
        left = Store(after / "t.db", kafka._reader.read)
        left.catch_up(table, ends[table.id], now_us())
        keys = [b"u%d" % user for user in range(10)]
        assert left.get(table, keys, None) == store.get(table, keys, None)
        ids = [event.id for batch in kafka.read("s", 0, 0) for event in batch.events()]
        assert left.find_held(unique, ids, ends[unique.id][0]) == list(range(number + 1))
        left.close()
    store.close()


def connection_of(log: KafkaLog) -> apsw.Connection:
    """This thread's connection to the local file."""
    return log._tables.store._connection()


def let_time_pass(log: KafkaLog, hours: float) -> None:
    """As if the file had been used last so long before."""
    connection_of(log).execute("UPDATE places SET seen_us = seen_us - ?", (int(hours * HOUR_US),))


def seen_hours_ago(log: KafkaLog) -> float:
    ((seen_us,),) = connection_of(log).execute("SELECT seen_us FROM places").fetchall()
    return (now_us() - cast(int, seen_us)) / HOUR_US


@pytest.fixture
def table(kafka: KafkaLog) -> KafkaLog:
    """A log with the table t, whose key u1 has the amount 1."""
    create(kafka, "t", table=True)
    commit_as(kafka, kafka.hold("p"), 0, "t", [1])
    assert amount(kafka) == 1
    return kafka


def amount(log: Log, pin: Pin | None = None) -> object:
    (entry,) = log.get("t", [b"u1"], pin)
    return None if entry is None else msgspec.msgpack.decode(entry.value)["amount"]


def test_two_that_find_a_table_too_old_begin_it_anew_once(table: KafkaLog, url: str) -> None:
    """The second one is about to forget what the first one has just read, and reads from."""
    let_time_pass(table, 21)
    at_it, go, forgotten, end = (threading.Event() for _ in range(4))
    begun: list[str] = []

    def slow(_: object, sql: str, __: object) -> bool:
        if sql == "BEGIN IMMEDIATE":
            begun.append(sql)
            (at_it if len(begun) == 1 else forgotten).set()
            assert (go if len(begun) == 1 else end).wait(30)
        return True

    def second() -> object:
        assert table._tables.store.path is not None
        folder = str(table._tables.store.path.parent)
        with open_log(url, cache=folder, upkeep_interval_ms=0) as other:
            connection_of(cast(KafkaLog, other)).exec_trace = slow
            return amount(other)

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(second)
        assert at_it.wait(30)

        def interrupted(_: object, sql: str, __: object) -> bool:
            if sql.startswith("SELECT v.key"):
                go.set()
                while not forgotten.is_set() and not found.done():
                    forgotten.wait(0.01)
            return True

        connection_of(table).exec_trace = interrupted
        try:
            assert amount(table) == 1
        finally:
            connection_of(table).exec_trace = None
            end.set()
        assert found.result(30) == 1


def test_a_file_that_others_emptied_is_read_anew(table: KafkaLog) -> None:
    """By one that did not know yet that there are these streams."""
    create(table, "s", ids="producer", key=None)
    holder = table.hold("q")
    for sequence in range(2):
        part = make_part(table, "s", [sequence], ids=[sequence])
        table.commit(holder, sequence, Commit(parts=[part]))
    ids = [event.id for batch in table.read("s", 0, 0) for event in batch.events()]
    stream, end = table._catalogue.stream("s"), table.offsets("s")[0].next
    assert table._tables.store.find_held(stream, ids, end) == [0, 1]

    other = Store(table._tables.store.path, table._reader.read)
    emptied: list[str] = []

    def empty(_: object, sql: str, __: object) -> bool:
        if sql.startswith("BEGIN") and not emptied:
            emptied.append(sql)
            other.forget_others([])
        return True

    connection_of(table).exec_trace = empty
    assert table._tables.store.find_held(stream, ids, end) == [0, 1]
    assert emptied.pop()
    assert amount(table) == 1
    assert emptied
    connection_of(table).exec_trace = None
    other.close()


def test_a_quiet_table_in_use_does_not_grow_too_old(table: KafkaLog) -> None:
    let_time_pass(table, 2)
    pin = table.pin()
    old = msgspec.json.decode(pin.token, type=Pinned)
    older = msgspec.structs.replace(old, made_us=old.made_us - 3 * HOUR_US)
    assert amount(table, Pin(msgspec.json.encode(older).decode(), pin.expires)) == 1
    assert seen_hours_ago(table) > 1.9, "what was there three hours ago says nothing of now"
    assert amount(table) == 1
    assert seen_hours_ago(table) < 0.1
    let_time_pass(table, 21)
    assert amount(table) == 1
    assert seen_hours_ago(table) < 0.1


def test_what_was_read_in_part_grows_old_as_the_whole(url: str, tmp_path: Path) -> None:
    """A deletion further behind may be compacted away before it is reached."""
    with open_log(url, create=True, cache=str(tmp_path), batch_rows_max=1) as log:
        assert isinstance(log, KafkaLog)
        create(log, "t", table=True)
        commit_as(log, log.hold("p"), 0, "t", [1, 2, 3, 4])
        end = log.offsets("t")[0].next
        stream = log._catalogue.stream("t")

        def one_batch(*place: Any) -> Iterator[Batch]:
            yield next(log._reader.read(*place))
            raise LogUnreachableError

        store = Store(log._tables.store.path, one_batch)
        for hours in (15, 0):
            with pytest.raises(LogUnreachableError):
                store.catch_up(stream, {0: end}, now_us() - hours * HOUR_US)
        assert seen_hours_ago(log) > 14.9
        assert len(log.page("t")) == 4
        assert seen_hours_ago(log) < 0.1
        store.close()
