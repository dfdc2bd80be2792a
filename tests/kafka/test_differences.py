"""What a log on Kafka refuses, and says why; and what it does that is its own."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from confluent_kafka import Producer as Other
from confluent_kafka.admin import AdminClient, NewTopic

from penstock import (
    AlterStream,
    App,
    AppTable,
    Commit,
    CreateStream,
    DropStream,
    Log,
    Producer,
    ReadOptions,
    Table,
    Transaction,
    declare,
    read_changes,
    read_events,
)
from penstock import open as open_log
from penstock.app.running.splits import BatchInput, keyed_splits
from penstock.app.tasks.state import State
from penstock.app.tasks.task import Range
from penstock.errors import (
    ClosedError,
    FencedError,
    LogFormatError,
    PenstockError,
    PieceError,
    UsageError,
)
from penstock.log.api import Holder
from penstock.log.declaring.names import parse_stream
from penstock.log.kafka.ledger import TOPIC
from penstock.log.kafka.log import KafkaLog
from penstock.log.kafka.staging import PARTITIONS
from penstock.records.event import partition_of
from penstock.testing.brokers import Brokers
from penstock.testing.contract import Order, commit_as, create, make_part, orders
from penstock.testing.processes import wait_until


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("kafka://", "is not the address of a broker"),
        ("kafka://somewhere", "'somewhere' is not the address of a broker"),
        ("kafka://a:1,b", "'b' is not the address of a broker"),
        ("kafka://a:1/x/y", "only a prefix may follow the brokers"),
        ("kafka://a:1?x=y", "only a prefix may follow the brokers"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_log(url)


def test_wrong_options_are_refused(broker: Brokers) -> None:
    with pytest.raises(UsageError, match="no log option 'vfs'"):
        open_log(broker.url, vfs="x")
    with pytest.raises(UsageError, match="No such configuration property"):
        open_log(broker.url, create=True, **{"no.such.option": "x"})


def test_a_log_that_is_not_there_is_not_made_by_reading(url: str) -> None:
    with pytest.raises(LogFormatError, match="create a stream there first"):
        open_log(url, create=False)


def test_whoever_writes_what_follows_waits_for_open_commits(
    kafka: KafkaLog, broker: Brokers
) -> None:
    """A commit may be acknowledged before its end can be read: as one that is still open."""
    table = cast(AppTable[object], App("any").table("totals", value=int, default=0))
    assert table.spec is not None
    kafka.apply([CreateStream(table.spec)])
    topic = kafka._cluster.address.topic(kafka.stream("totals").name)
    other = Other({"bootstrap.servers": broker.addresses[0], "transactional.id": topic})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(topic, b'{"value": 2}', b"ada", partition=0)
    other.flush(30)
    assert kafka.get("totals", [b"ada"]) == [None]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(lambda: State(kafka, table).entry(b"ada").value)
        with pytest.raises(TimeoutError):
            asked.result(1.0)
        other.commit_transaction(30)
        assert asked.result(30) == 2


def test_keys_of_an_adopted_stream_are_looked_for_everywhere(
    kafka: KafkaLog, broker: Brokers
) -> None:
    topic = f"{kafka._cluster.address.topic(parse_stream('theirs'))}"
    admin = AdminClient({"bootstrap.servers": broker.addresses[0]})
    admin.create_topics([NewTopic(topic, 3)])[topic].result(30)
    other = Other({"bootstrap.servers": broker.addresses[0]})
    for number in range(9):
        value = b'{"user": "u%d", "amount": %d}' % (number, number)
        home = (partition_of(b"u%d" % number, 3) + 1) % 3  # as another partitioner might
        other.produce(topic, value, b"u%d" % number, partition=home)
    other.flush(30)
    kafka.adopt(declare("theirs", Order, key="user", table=True))
    table = Table(kafka, "theirs", Order)
    found = table.get_many([f"u{number}" for number in range(9)])
    assert [order.amount if order else None for order in found] == list(range(9))
    (change,) = read_changes(kafka, "theirs", Order, ReadOptions(key="u4"))
    assert change.data == Order("u4", 4)
    stream = kafka.stream("theirs")
    ranges = [Range("theirs", partition, 0, 9) for partition in range(3)]
    splits = keyed_splits(BatchInput({"theirs": stream}, tuple(ranges)), 2)
    assert [(split.ranges, split.slots) for split in splits] == [(tuple(ranges), 2)] * 2


def test_a_commit_writes_to_one_stream_that_compares_ids(kafka: Log) -> None:
    for name in ("one", "two"):
        create(kafka, name, ids="producer", key=None)
    with pytest.raises(UsageError, match="one and two both take ids"), Transaction(kafka) as tx:
        tx.send("one", Order("a", 1), id=1)
        tx.send("two", Order("a", 1), id=1)
    assert list(orders(kafka, "one")) == list(orders(kafka, "two")) == []


def test_a_change_that_is_refused_changes_no_topic(kafka: Log) -> None:
    """Also where an earlier one of the same list could have been carried out."""
    for name in ("a", "b"):
        create(kafka, name)
    with Producer(kafka) as producer:
        producer.send("a", Order("x", 1))
    short = declare("a", Order, key="user", retention_ms=1)
    moved = declare("b", Order, key="user", replication=3)
    with pytest.raises(UsageError, match="replication cannot change"):
        kafka.apply([AlterStream(short), AlterStream(moved)])
    kafka.maintain()
    assert [event.data.amount for event in orders(kafka, "a")] == [1]


def test_there_is_no_backup(kafka: Log, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="replicate its topics"):
        kafka.backup(tmp_path / "copy")


def test_a_log_does_not_survive_a_fork(kafka: Log) -> None:
    """librdkafka's threads stay with the parent: the child would wait for ever."""
    child = os.fork()
    if child == 0:
        try:
            kafka.streams()
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_upkeep_leaves_what_was_staged_since_alone(kafka: Log, url: str, tmp_path: Path) -> None:
    create(kafka, "s")
    with open_log(url, cache=str(tmp_path / "other"), upkeep_interval_ms=0) as other:
        for n in range(5):
            holder = kafka.hold(f"p{n}")
            piece = kafka.stage(holder, 0, make_part(kafka, "s", [n]))
            other.maintain()
            kafka.commit(holder, 0, Commit(pieces=[piece]))
            with pytest.raises(PieceError):
                kafka.commit(holder, 1, Commit(pieces=[piece]))
    assert [event.data.amount for event in orders(kafka, "s")] == list(range(5))


def test_a_stream_that_compares_ids_is_written_by_several_producers_of_a_process(
    kafka: Log, url: str, tmp_path: Path
) -> None:
    """One of them is fenced meanwhile: that the others open the shared writer must not help it."""
    create(kafka, "s", ids="producer", key=None)
    fenced, other = kafka.hold("fenced"), kafka.hold("other")
    kafka.commit(fenced, 0, Commit(parts=[make_part(kafka, "s", [1], ids=[1])]))
    kafka.commit(other, 0, Commit(parts=[make_part(kafka, "s", [2], ids=[2])]))
    with open_log(url, cache=str(tmp_path / "other"), upkeep_interval_ms=0) as elsewhere:
        successor = elsewhere.hold("fenced")
        kafka.commit(other, 1, Commit(parts=[make_part(kafka, "s", [3], ids=[3])]))
        with pytest.raises(PenstockError, match="was opened again"):
            kafka.commit(fenced, 1, Commit(parts=[make_part(kafka, "s", [4], ids=[4])]))
        elsewhere.commit(successor, 1, Commit(parts=[make_part(kafka, "s", [5], ids=[5])]))
    assert [event.data.amount for event in read_events(kafka, "s", Order)] == [1, 2, 3, 5]


def test_who_is_fenced_is_told_by_an_error_and_not_on_the_terminal(
    kafka: Log, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    create(kafka, "s")
    holder = kafka.hold("p")
    commit_as(kafka, holder, 0, "s", [1])
    with open_log(url, upkeep_interval_ms=0) as other:
        other.hold("p")
        create(other, "t")
    with pytest.raises(FencedError):
        commit_as(kafka, holder, 1, "s", [2])
    create(kafka, "u")
    assert capfd.readouterr().err == ""


def test_a_fenced_producer_does_not_take_a_session_for_its_own_that_another_one_opened(
    url: str, tmp_path: Path
) -> None:
    """The one that it had opened was closed since, for there were too many."""
    with (
        open_log(
            url, create=True, cache=str(tmp_path / "a"), upkeep_interval_ms=0, sessions_max=4
        ) as log,
        open_log(url, cache=str(tmp_path / "b"), upkeep_interval_ms=0) as elsewhere,
    ):
        create(log, "plain")
        create(log, "s", ids="producer", key=None)
        fenced = log.hold("fenced")
        log.commit(fenced, 0, Commit(parts=[make_part(log, "s", [1], ids=[1])]))
        log.commit(fenced, 1, Commit(parts=[make_part(log, "plain", [1])]))
        others = [log.hold(f"other{number}") for number in range(3)]  # closes the stream's
        log.commit(fenced, 2, Commit(parts=[make_part(log, "plain", [1])]))
        successor = elsewhere.hold("fenced")
        log.commit(others[-1], 0, Commit(parts=[make_part(log, "s", [2], ids=[2])]))
        with pytest.raises(PenstockError, match="was opened again"):
            log.commit(fenced, 3, Commit(parts=[make_part(log, "s", [3], ids=[3])]))
        elsewhere.commit(successor, 3, Commit(parts=[make_part(log, "s", [4], ids=[4])]))
        assert [event.data.amount for event in orders(log, "s")] == [1, 2, 4]


@pytest.mark.parametrize("happened", [False, True])
def test_another_s_commit_of_the_same_name_is_not_taken_for_one_s_own(
    kafka: Log, url: str, tmp_path: Path, happened: bool
) -> None:
    """Nobody knew what became of it, and meanwhile somebody else has the producer."""
    create(kafka, "s")
    holder = kafka.hold("p")
    if happened:
        commit_as(kafka, holder, 0, "s", [1])
    cast(KafkaLog, kafka)._writer._doubts.add(holder, 0)
    with open_log(url, cache=str(tmp_path / "b"), upkeep_interval_ms=0) as other:
        assert commit_as(other, other.hold("p"), 0, "s", [2]).repeated == happened
    if happened:
        assert commit_as(kafka, holder, 0, "s", [1]).repeated
    else:
        with pytest.raises(FencedError):
            commit_as(kafka, holder, 0, "s", [1])
    assert [event.data.amount for event in orders(kafka, "s")] == [1 if happened else 2]


def test_a_commit_in_doubt_that_did_not_happen_is_found_out(kafka: Log) -> None:
    """Opening the producer says that no earlier try happened: what is wrong then is the error."""
    create(kafka, "s")
    holder = kafka.hold("p")
    piece = kafka.stage(holder, 1, make_part(kafka, "s", [1]))
    cast(KafkaLog, kafka)._writer._doubts.add(holder, 0)
    with pytest.raises(PieceError):
        kafka.commit(holder, 0, Commit(pieces=[piece]))


@pytest.mark.parametrize("streams", [2, 6])
def test_a_producer_writes_to_more_streams_that_compare_ids_than_sessions_are_kept(
    url: str, tmp_path: Path, streams: int
) -> None:
    names = [f"s{number}" for number in range(streams)]
    with open_log(
        url, create=True, cache=str(tmp_path), upkeep_interval_ms=0, sessions_max=3
    ) as log:
        for name in names:
            create(log, name, ids="producer", key=None)
        for _ in range(2):
            holder = log.hold("relay")
            for again in range(2):
                last = log.last_commit("relay")
                first = 0 if last is None else last.sequence + 1
                for sequence, name in enumerate(names, first):
                    part = make_part(log, name, [again], ids=[again])
                    log.commit(holder, sequence, Commit(parts=[part]))
        for name in names:
            assert [event.data.amount for event in orders(log, name)] == [0, 1]


def test_the_local_file_keeps_only_what_is_there(url: str, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    other.write_bytes(b"")
    recent = tmp_path / "recent.db"
    recent.write_bytes(b"")
    os.utime(other, (0, 0))
    with open_log(url, create=True, cache=str(tmp_path), upkeep_interval_ms=0) as log:
        create(log, "s", ids="producer", key=None, retention_ms=3_600_000)
        create(log, "t", table=True)
        with Transaction(log) as tx:
            tx.send("t", Order("a", 1))
        for name in ("old", "new", "newer"):  # a commit takes in the ids of those before it
            with Transaction(log) as tx:
                tx.send("s", Order("a", 1), id=name)
        assert len(list(Table(log, "t").items())) == 1
        held = cast(KafkaLog, log)._tables.store._connection()
        held.execute("UPDATE ids SET time_us = time_us - 7200000000 WHERE id = 'old'")
        log.apply([DropStream("t")])
        log.maintain()
        assert held.execute("SELECT id FROM ids").fetchall() == [("new",)]
        assert held.execute("SELECT count(*) FROM versions").fetchall() == [(0,)]
        assert not other.exists()
        assert recent.exists()


def test_closing_waits_for_nobody_else_s_transaction(
    broker: Brokers, url: str, tmp_path: Path
) -> None:
    """Of a process that died, Kafka gives a transaction up only after a while."""
    with open_log(url, create=True, cache=str(tmp_path), upkeep_interval_ms=20) as log:
        assert isinstance(log, KafkaLog)
        create(log, "s")
        holder = log.hold("p")
        piece = log.stage(holder, 0, make_part(log, "s", [1]))
        other = Other({
            "bootstrap.servers": broker.addresses[0], "transactional.id": url,
            "transaction.timeout.ms": 10_000,
        })  # fmt: skip
        other.init_transactions(30)
        other.begin_transaction()
        places = [(log._address.own(TOPIC), partition) for partition in range(4)]
        for topic, partition in places:
            other.produce(topic, b"", b"nothing", partition=partition)
        other.flush(30)
        log.commit(holder, 0, Commit(pieces=[piece]))  # starts upkeep, which reads the ledger
        lock = log._ledger._view.lock

        def is_read() -> bool:
            if lock.acquire(blocking=False):
                lock.release()
                return False
            return True

        wait_until(is_read, 30, "upkeep")
    with open_log(url, cache=str(tmp_path), upkeep_interval_ms=0) as later:
        cluster = cast(KafkaLog, later)._cluster
        assert cluster.ends(places, committed=True) != cluster.ends(places, committed=False)
    other.abort_transaction(30)


@pytest.mark.parametrize("kept", [0, 1])
def test_two_processes_sweep_at_once(
    kafka: KafkaLog, url: str, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """One removes staged events just when the other begins to read them."""
    create(kafka, "a")
    for _ in range(3):
        kafka.stage(kafka.hold("q"), 0, make_part(kafka, "a", [1]))  # each fences the one before
    pieces = [kafka.stage(kafka.hold("live"), 0, make_part(kafka, "a", [2])) for _ in range(kept)]
    staged = (kafka._staging.topic, zlib.crc32(b"q") % PARTITIONS)
    ask, swept = kafka._cluster.firsts, list[int]()

    def firsts(places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        found = ask(places)
        if list(places) == [staged] and not swept:  # from now on, what was found is outdated
            with open_log(url, upkeep_interval_ms=0) as other:
                other.hold("q")
                swept.append(other.maintain().pieces_swept)
        return found

    monkeypatch.setattr(kafka._cluster, "firsts", firsts)
    kafka.maintain()
    assert swept == [3]
    if pieces:
        kafka.commit(Holder("live", 1), 0, Commit(pieces=pieces))
        assert [event.data.amount for event in orders(kafka, "a")] == [2]
