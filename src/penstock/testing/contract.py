"""The contract suite: what every engine of the log promises, as tests.

An engine's own test module subclasses `LogContract` and gives it a harness:

    class TestEmbedded(LogContract):
        engine = "embedded"

        @pytest.fixture
        def harness(self, tmp_path): ...

Where engines differ, `penstock.log.api` says so in words; the tests hold for all of them.
"""

from __future__ import annotations

import datetime as dt
import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import msgspec
import pyarrow as pa
import pytest

from penstock.errors import (
    BadNameError,
    DamagedError,
    EvolutionError,
    FencedError,
    LimitError,
    ObjectExistsError,
    OffsetGoneError,
    PieceError,
    PinExpiredError,
    RecordError,
    SequenceError,
    TransactionStateError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.api import Commit, Committed, Holder, Log, Part
from penstock.log.compose import Composer, EventOptions
from penstock.log.objects import (
    AlterStream,
    CreateNamespace,
    CreateStream,
    DropNamespace,
    DropStream,
    GrowStream,
    declare,
)
from penstock.log.read import ReadOptions, read_batches, read_events
from penstock.log.table import Table
from penstock.log.transaction import Transaction
from penstock.producer import Producer, ProducerOptions
from penstock.records.event import Event, ids_of
from penstock.records.schema import Record


class Order(Record):
    user: str
    amount: int
    note: str | None = None


class Harness(Protocol):
    """Gives access to one log of the engine under test."""

    def open(self, **options: str | int | bool) -> Log:
        """Another handle on the same log; the first one makes it."""


class LogContract:
    """Subclass this with a `harness` fixture; see the module."""

    engine: ClassVar[str] = "any"

    @pytest.fixture
    def harness(self) -> Harness:
        raise NotImplementedError

    @pytest.fixture
    def log(self, harness: Harness) -> Iterator[Log]:
        with harness.open() as opened:
            yield opened

    # Promise 1: order

    def test_offsets_grow_and_every_event_is_read_once_in_order(self, log: Log) -> None:
        create(log, "s", partitions=3)
        with Producer(log) as producer:
            for n in range(200):
                producer.send("s", Order(f"u{n % 7}", n))
                if n % 50 == 0:
                    producer.flush()
        seen = Counter(event.data.amount for event in orders(log, "s"))
        assert seen == Counter(range(200))
        for partition in range(3):
            found = list(orders(log, "s", partitions=[partition]))
            offsets = [event.offset for event in found]
            assert offsets == sorted(set(offsets))
            for _, of_user in itertools.groupby(
                sorted(found, key=lambda e: e.data.user), key=lambda e: e.data.user
            ):
                amounts = [event.data.amount for event in of_user]
                assert amounts == sorted(amounts)

    def test_reading_can_start_and_stop_at_any_offset(self, log: Log) -> None:
        create(log, "s")
        commit(log, "p", 0, "s", range(10))
        commit(log, "p", 1, "s", range(10, 20))
        found = [event.data for batch in log.read("s", 0, 7, 14) for event in batch.events(Order)]
        assert [order.amount for order in found if isinstance(order, Order)] == list(range(7, 14))

    def test_reading_starts_at_a_time_of_append(self, log: Log) -> None:
        create(log, "s")
        first = commit(log, "p", 0, "s", [0, 1])
        wait_for_clock_after(first.time)
        second = commit(log, "p", 1, "s", [2, 3])
        assert [e.data.amount for e in orders(log, "s", start=second.time)] == [2, 3]
        assert [e.data.amount for e in orders(log, "s", start=first.time)] == [0, 1, 2, 3]
        later = second.time + dt.timedelta(hours=1)
        assert log.offset_at("s", 0, later) == log.offsets("s")[0].next

    def test_events_of_one_key_can_be_read_also_across_a_growth(self, log: Log) -> None:
        create(log, "s", partitions=2)
        with Producer(log) as producer:
            for n in range(40):
                producer.send("s", Order(f"u{n % 8}", n))
        log.apply([GrowStream("s", 5)])
        with Producer(log) as producer:
            for n in range(40, 80):
                producer.send("s", Order(f"u{n % 8}", n))
        for user in range(8):
            amounts = [e.data.amount for e in orders(log, "s", key=f"u{user}")]
            assert sorted(amounts) == [n for n in range(80) if n % 8 == user]

    def test_following_is_told_of_new_events(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        stop = threading.Event()
        got: list[int] = []
        all_there = threading.Event()

        def follow() -> None:
            with harness.open() as other:
                for event in orders(other, "s", follow=True, stop=stop):
                    got.append(event.data.amount)
                    if len(got) == 30:
                        all_there.set()

        thread = threading.Thread(target=follow)
        thread.start()
        for n in range(30):
            commit(log, "p", n, "s", [n])
        assert all_there.wait(30)
        stop.set()
        commit(log, "p", 30, "s", [30])
        thread.join(30)
        assert not thread.is_alive()
        assert got[:30] == list(range(30))

    def test_waiting_ends_at_its_timeout(self, log: Log) -> None:
        create(log, "s")
        assert log.wait("s", {0: 0}, 0.05) is False
        commit(log, "p", 0, "s", [1])
        assert log.wait("s", {0: 0}, 5) is True
        assert log.wait("s", {0: log.offsets("s")[0].next}, 0.05) is False

    # Promise 2: only committed events are visible, all or none

    @pytest.mark.row("H19")
    def test_a_commit_spans_streams_and_shows_as_a_whole(self, harness: Harness, log: Log) -> None:
        create(log, "a", partitions=2)
        create(log, "b")
        done = threading.Event()
        wrong: list[str] = []

        def watch() -> None:
            with harness.open() as other:
                while not done.is_set():
                    b = sum(1 for _ in orders(other, "b"))
                    a = sum(1 for _ in orders(other, "a"))
                    if a < 4 * b:
                        wrong.append(f"{b} in b, and only {a} in a")

        thread = threading.Thread(target=watch)
        thread.start()
        for n in range(20):
            with Transaction(log, "p") as tx:
                for m in range(4):
                    tx.send("a", Order(f"u{m}", n))
                tx.send("b", Order("x", n))
        done.set()
        thread.join(30)
        assert not wrong

    @pytest.mark.row("H19")
    def test_a_rolled_back_transaction_leaves_nothing(self, log: Log) -> None:
        create(log, "s")
        with pytest.raises(ZeroDivisionError), Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
            tx.save("k", b"v")
            raise ZeroDivisionError
        assert tx.state == "rolled back"
        assert list(orders(log, "s")) == []
        assert log.progress("k") is None

    @pytest.mark.row("H19")
    def test_a_transaction_that_is_dropped_never_happened(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        with harness.open(transaction_memory_bytes_max=100) as channel:
            tx = Transaction(channel, "p").__enter__()
            for n in range(50):
                tx.send("s", Order("a", n))
        commit(log, "p", 5, "s", [99])
        log.maintain()
        assert [e.data.amount for e in orders(log, "s")] == [99]

    @pytest.mark.row("H19")
    def test_a_transaction_larger_than_its_memory_is_still_one(self, harness: Harness) -> None:
        with harness.open(transaction_memory_bytes_max=2000) as log:
            create(log, "s", partitions=2)
            with Transaction(log, "p") as tx:
                ids = [tx.send("s", Order(f"u{n % 3}", n)) for n in range(300)]
                assert list(orders(log, "s")) == []
            found = list(orders(log, "s"))
            assert sorted(e.data.amount for e in found) == list(range(300))
            assert {e.id for e in found} == set(ids)
            for user in ("u0", "u1", "u2"):
                amounts = [e.data.amount for e in found if e.data.user == user]
                assert amounts == sorted(amounts)

    def test_a_finished_transaction_takes_nothing_more(self, log: Log) -> None:
        create(log, "s")
        with Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
        for step in (tx.commit, tx.roll_back, lambda: tx.send("s", Order("a", 2))):
            with pytest.raises(TransactionStateError):
                step()

    # Promise 3: numbered commits and fencing

    def test_committing_the_latest_name_again_changes_nothing(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        first = commit_as(log, holder, 4, "s", [1, 2])
        again = commit_as(log, holder, 4, "s", [7, 8, 9])
        assert again == msgspec.structs.replace(first, repeated=True)
        assert [e.data.amount for e in orders(log, "s")] == [1, 2]
        assert log.last_commit("p") == first

    def test_the_outcome_is_found_by_the_next_holder(self, log: Log) -> None:
        create(log, "s")
        first = commit_as(log, log.hold("p"), 4, "s", [1])
        again = commit_as(log, log.hold("p"), 4, "s", [1])
        assert again == msgspec.structs.replace(first, repeated=True)

    def test_an_older_sequence_is_refused_and_one_may_be_skipped(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 4, "s", [1])
        commit_as(log, holder, 9, "s", [2])
        for old in (0, 4, 8):
            with pytest.raises(SequenceError):
                commit_as(log, holder, old, "s", [3])
        assert [e.data.amount for e in orders(log, "s")] == [1, 2]

    @pytest.mark.row("H1")
    def test_opening_a_producer_fences_its_older_holder(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        old = log.hold("p")
        part = make_part(log, "s", [1])
        piece = log.stage(old, 0, part)
        with harness.open() as other:
            new = other.hold("p")
            assert new.epoch > old.epoch
        for attempt in (
            lambda: log.commit(old, 0, Commit(parts=[part])),
            lambda: log.commit(old, 0, Commit(pieces=[piece])),
            lambda: log.stage(old, 0, part),
        ):
            with pytest.raises(FencedError):
                attempt()
        with pytest.raises(PieceError):
            log.commit(new, 0, Commit(pieces=[piece]))
        commit_as(log, new, 0, "s", [2])
        assert [e.data.amount for e in orders(log, "s")] == [2]

    def test_two_producers_do_not_disturb_each_other(self, log: Log) -> None:
        create(log, "s")
        one, two = log.hold("one"), log.hold("two")
        commit_as(log, one, 5, "s", [1])
        commit_as(log, two, 1, "s", [2])
        commit_as(log, one, 6, "s", [3])
        assert [e.data.amount for e in orders(log, "s")] == [1, 2, 3]

    # Promise 4: durability (the engine's own tests prove it under kill and loss of power)

    @pytest.mark.row("H10")
    @pytest.mark.parametrize("acks", ["write", "majority", "all"])
    def test_every_kind_of_acks_commits(self, harness: Harness, log: Log, acks: str) -> None:
        create(log, "s", acks=acks)
        assert log.stream("s").spec.acks == acks
        commit(log, "p", 0, "s", [1])
        with harness.open() as other:
            assert [e.data.amount for e in orders(other, "s")] == [1]

    # Promise 6: progress

    def test_progress_is_saved_with_the_commit_and_never_stale(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s")
        old = log.hold("p")
        log.commit(old, 0, Commit(progress={"a/1": b"x", "a/2": b"y", "b": b"z"}))
        with harness.open() as other:
            new = other.hold("p")
            assert other.progress("a/1") == b"x"
            other.commit(new, 1, Commit(progress={"a/1": b"new", "a/2": None}))
        assert log.progress("a/1") == b"new"
        assert log.progress("a/2") is None
        assert log.progress_items("a/") == {"a/1": b"new"}
        with pytest.raises(FencedError):
            log.commit(old, 2, Commit(progress={"a/1": b"late"}))
        assert log.progress("a/1") == b"new"

    def test_a_refused_commit_saves_no_progress(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 3, "s", [1])
        with pytest.raises(SequenceError):
            log.commit(holder, 2, Commit(progress={"k": b"v"}))
        assert log.progress("k") is None

    # Promise 7: keys and partitions

    @pytest.mark.row("H14")
    @pytest.mark.parametrize("kind", ["str", "int", "bytes"])
    def test_the_key_decides_the_partition(self, log: Log, kind: str) -> None:
        log.apply([CreateStream(declare("s", partitions=4))])
        keys: dict[str, list[str | int | bytes]] = {
            "str": ["", "ada", "bob", "straße"][1:],
            "int": [0, 7, -3, 2**40],
            "bytes": [b"\x00\xff", b"abc"],
        }[kind]  # type: ignore[assignment]
        with Producer(log) as producer:
            for key in keys:
                raw = key if isinstance(key, bytes) else str(key).encode()
                place = producer.send("s", {"k": 1}, key=key).result()
                assert place.partition == zlib.crc32(raw) % 4
                event = next(
                    e for e in read_events(log, "s") if (e.partition, e.offset) == place[:2]
                )
                assert event.key == raw

    def test_events_without_a_key_are_spread(self, log: Log) -> None:
        log.apply([CreateStream(declare("s", partitions=4))])
        with Producer(log) as producer:
            places = [producer.send("s", {"n": n}).result() for n in range(40)]
        assert len({place.partition for place in places}) == 4

    def test_columns_and_single_events_go_to_the_same_partitions(self, log: Log) -> None:
        create(log, "s", partitions=5)
        users = [f"u{n}" for n in range(50)]
        with Producer(log) as producer:
            singles = {u: producer.send("s", Order(u, 0)).result().partition for u in users}
            batch = pa.table({"user": users, "amount": [1] * 50})
            producer.append("s", batch).result()
        for event in orders(log, "s"):
            assert event.partition == singles[event.data.user]

    # Promise 8: Arrow and bounded memory

    def test_reading_gives_bounded_batches_of_arrow(self, harness: Harness) -> None:
        with harness.open(batch_rows_max=1000) as log:
            create(log, "s")
            table = pa.table({"user": ["a"] * 5500, "amount": list(range(5500))})
            with Transaction(log, "p") as tx:
                tx.append("s", table)
            batches = list(read_batches(log, "s"))
            assert max(len(batch) for batch in batches) <= 1000
            columns = [batch.to_arrow() for batch in batches]
            whole = pa.Table.from_batches(columns)
            assert whole["amount"].to_pylist() == list(range(5500))
            assert whole.schema.names == [
                "user", "amount", "note", "_key", "_time", "_id", "_type", "_source",
                "_headers", "_partition", "_offset",
            ]  # fmt: skip
            assert len(set(whole["_id"].to_pylist())) == 5500
            some = batches[0].to_arrow(["_offset", "amount"])
            assert some.schema.names == ["_offset", "amount"]

    # Promise 9: ids before the commit, offsets after

    @pytest.mark.row("H19")
    def test_ids_are_known_before_the_commit(self, log: Log) -> None:
        create(log, "s", partitions=3)
        with Transaction(log, "p") as tx:
            ids = [tx.send("s", Order(f"u{n}", n)) for n in range(5)]
            table = pa.table({"user": [f"u{n}" for n in range(5, 50)], "amount": range(5, 50)})
            ids += tx.append("s", table).to_pylist()
        assert len(set(ids)) == 50
        assert {e.data.amount: e.id for e in orders(log, "s")} == dict(enumerate(ids))

    def test_ids_of_different_writers_differ(self, log: Log) -> None:
        create(log, "s")
        for n in range(5):
            with Transaction(log) as tx:
                tx.send("s", Order("a", n))
        assert len({e.id for e in orders(log, "s")}) == 5

    # Promise 10: ids from the producer

    @pytest.mark.row("H15")
    def test_an_id_that_the_stream_holds_is_a_no_op(self, log: Log) -> None:
        create(log, "s", ids="producer", key=None)
        assert log.stream("s").partitions == 1
        with Producer(log) as producer:
            places = [producer.send("s", Order("a", n), id=n).result() for n in (5, 1, 3, 1, 5, 2)]
        assert [place.duplicate for place in places] == [False, False, False, True, True, False]
        with Transaction(log, "other") as tx:
            for n in (1, 2, 3, 4, 5, 6):
                tx.send("s", Order("b", n), id=n)
        assert [(e.id, e.data.user) for e in orders(log, "s")] == [
            ("5", "a"), ("1", "a"), ("3", "a"), ("2", "a"), ("4", "b"), ("6", "b"),
        ]  # fmt: skip

    @pytest.mark.row("H15")
    def test_ids_may_be_text_and_repeat_within_a_commit(self, log: Log) -> None:
        create(log, "s", ids="producer", key=None)
        with Producer(log, ProducerOptions(batch_delay_ms=50)) as producer:
            futures = [
                producer.send("s", Order("a", n), id=id_)
                for n, id_ in enumerate(["x", "y", "x", "007", "7", "x"])
            ]
            offsets = [future.result().offset for future in futures]
        assert offsets == [0, 1, None, 2, 3, None]

    @pytest.mark.row("H15")
    def test_staged_events_are_compared_too(self, log: Log) -> None:
        create(log, "s", ids="producer", key=None)
        holder = log.hold("p")
        piece = log.stage(holder, 0, make_part(log, "s", [1, 2, 3], ids=[1, 2, 3]))
        done = log.commit(holder, 0, Commit(pieces=[piece]))
        assert done.placements[0].dropped == ()
        piece = log.stage(holder, 1, make_part(log, "s", [2, 4, 3], ids=[2, 4, 3]))
        done = log.commit(holder, 1, Commit(pieces=[piece]))
        assert done.placements[0].dropped == (0, 2)
        assert [e.data.amount for e in orders(log, "s")] == [1, 2, 3, 4]

    @pytest.mark.row("H15")
    def test_a_producer_id_stream_has_one_partition(self, log: Log) -> None:
        with pytest.raises(UsageError, match="one partition"):
            create(log, "s", ids="producer", partitions=2)
        create(log, "s", ids="producer")
        with pytest.raises(UsageError, match="one partition"):
            log.apply([GrowStream("s", 2)])
        with Transaction(log, "p") as tx, pytest.raises(UsageError, match="give every event an id"):
            tx.send("s", Order("a", 1))

    # Stage, freeze and publish

    def test_a_commit_shows_exactly_the_pieces_it_names(self, log: Log) -> None:
        create(log, "a", partitions=2)
        create(log, "b")
        holder = log.hold("query")
        keep = [
            log.stage(holder, 7, make_part(log, "a", [1, 2])),
            log.stage(holder, 7, make_part(log, "b", [3])),
        ]
        log.stage(holder, 7, make_part(log, "a", [100]))  # an attempt that failed
        assert list(orders(log, "a")) == []
        done = log.commit(holder, 7, Commit(pieces=keep, progress={"q": b"7"}))
        assert [placement.stream for placement in done.placements] == ["a", "b"]
        assert sorted(e.data.amount for e in orders(log, "a")) == [1, 2]
        assert [e.data.amount for e in orders(log, "b")] == [3]
        assert log.maintain().pieces_swept == 1

    def test_the_first_frozen_attempt_wins(self, log: Log) -> None:
        create(log, "a")
        holder = log.hold("query")
        piece = log.stage(holder, 7, make_part(log, "a", [1]))
        first = log.commit(holder, 7, Commit(pieces=[piece], progress={"q": b"1"}))
        with pytest.raises(SequenceError):
            log.stage(holder, 7, make_part(log, "a", [2]))
        replay = log.hold("query")
        with pytest.raises(SequenceError):
            log.stage(replay, 7, make_part(log, "a", [2, 3]))
        again = log.commit(replay, 7, Commit(parts=[make_part(log, "a", [2, 3])]))
        assert again == msgspec.structs.replace(first, repeated=True)
        assert [e.data.amount for e in orders(log, "a")] == [1]

    def test_a_piece_belongs_to_its_commit(self, log: Log) -> None:
        create(log, "a")
        holder, other = log.hold("one"), log.hold("two")
        piece = log.stage(holder, 1, make_part(log, "a", [1]))
        for who, sequence, pieces in (
            (other, 1, [piece]),
            (holder, 2, [piece]),
            (holder, 1, [piece, piece]),
        ):
            with pytest.raises(PieceError):
                log.commit(who, sequence, Commit(pieces=pieces))
        log.commit(holder, 1, Commit(pieces=[piece]))
        assert [e.data.amount for e in orders(log, "a")] == [1]

    def test_orphaned_pieces_are_swept_and_live_ones_kept(self, log: Log) -> None:
        create(log, "a")
        old = log.hold("q")
        log.stage(old, 0, make_part(log, "a", [1]))
        live = log.hold("q")
        piece = log.stage(live, 0, make_part(log, "a", [2]))
        assert log.maintain().pieces_swept == 1
        log.commit(live, 0, Commit(pieces=[piece]))
        assert [e.data.amount for e in orders(log, "a")] == [2]

    # Objects

    @pytest.mark.row("H5")
    def test_namespaces(self, log: Log) -> None:
        assert log.namespaces() == ["_system", "default"]
        log.apply([CreateNamespace("shop"), CreateStream(declare("shop.orders", Order))])
        assert log.stream("shop.orders").name == ("shop", "orders")
        with pytest.raises(UnknownObjectError):
            log.stream("orders")
        with pytest.raises(ObjectExistsError):
            log.apply([CreateNamespace("shop")])
        with pytest.raises(UsageError, match="still holds orders"):
            log.apply([DropNamespace("shop")])
        log.apply([DropStream("shop.orders"), DropNamespace("shop")])
        assert log.namespaces() == ["_system", "default"]
        for kept in ("default", "_system"):
            with pytest.raises(UsageError, match="cannot be removed"):
                log.apply([DropNamespace(kept)])
        with pytest.raises(UnknownObjectError, match="no namespace"):
            log.apply([CreateStream(declare("nowhere.orders"))])

    @pytest.mark.row("H5")
    @pytest.mark.parametrize(
        "name",
        ["", "a.b.c", ".a", "a.", "-a", "_a", "a b", "a/b", "é", "x" * 101, "y" * 101 + ".a"],
    )
    def test_bad_names_are_refused(self, log: Log, name: str) -> None:
        with pytest.raises(BadNameError):
            log.apply([CreateStream(declare(name))])
        with pytest.raises(BadNameError):
            log.apply([CreateNamespace(name)])
        assert [str(s.name) for s in log.streams() if s.name.namespace != "_system"] == []

    @pytest.mark.row("H5")
    def test_partitions_only_grow(self, harness: Harness, log: Log) -> None:
        with harness.open(partitions=3, replication=1) as configured:
            create(configured, "s")
        assert log.stream("s").partitions == 3
        log.apply([GrowStream("s", 5)])
        assert log.stream("s").grown == (3, 5)
        assert set(log.offsets("s")) == set(range(5))
        for wrong in (5, 4, 0):
            with pytest.raises(UsageError):
                log.apply([GrowStream("s", wrong)])
        with pytest.raises(EvolutionError, match="only grow"):
            log.apply([AlterStream(declare("s", Order, key="user", partitions=2))])
        with pytest.raises(LimitError, match="partitions_max"):
            log.apply([GrowStream("s", 10**7)])

    def test_growing_while_a_producer_writes(self, log: Log) -> None:
        create(log, "s", partitions=1)
        with Producer(log) as producer:
            before = producer.send("s", Order("b", 0)).result()
            log.apply([GrowStream("s", 8)])
            after = [producer.send("s", Order(f"u{n}", n)).result() for n in range(1, 30)]
        assert before.partition == 0
        assert {place.partition for place in after} == {
            zlib.crc32(f"u{n}".encode()) % 8 for n in range(1, 30)
        }

    @pytest.mark.row("H7")
    def test_every_change_of_an_object_is_an_event(self, log: Log) -> None:
        log.apply([CreateNamespace("shop")])
        create(log, "s")
        log.apply([GrowStream("s", 2)])
        log.apply([AlterStream(declare("s", Order, key="user", retention_ms=1000))])
        log.apply([DropStream("s"), DropNamespace("shop")])
        with pytest.raises(UsageError):
            log.apply([CreateStream(declare("t")), DropStream("unknown")])
        found = [e.data for e in read_events(log, "_system.objects")]
        assert [getattr(change, "action", "") for change in found] == [
            "create namespace", "create stream", "grow stream", "alter stream", "drop stream",
            "drop namespace",
        ]  # fmt: skip
        assert [str(s.name) for s in log.streams()] == ["_system.metrics", "_system.objects"]

    def test_changes_are_applied_as_one(self, log: Log) -> None:
        with pytest.raises(UsageError):
            log.apply([CreateStream(declare("a")), CreateStream(declare("b", key="", ids="bad"))])
        with pytest.raises(ObjectExistsError):
            log.apply([CreateStream(declare("a")), CreateStream(declare("a"))])
        with pytest.raises(UnknownObjectError):
            log.stream("a")

    def test_a_dropped_stream_is_gone_and_its_name_free(self, log: Log) -> None:
        create(log, "s", table=True)
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", [1])
        old = log.stream("s").id
        log.apply([DropStream("s")])
        with pytest.raises(UnknownObjectError, match="no stream s"):
            log.stream("s")
        with pytest.raises(UnknownObjectError):
            log.commit(holder, 1, Commit(parts=[Part("s", pa.record_batch({"x": [1]}))]))
        create(log, "s", table=True)
        assert log.stream("s").id != old
        assert list(orders(log, "s")) == []
        assert log.get("s", [b"u1"]) == [None]

    @pytest.mark.parametrize("name", ["_system.objects", "_system.metrics"])
    def test_the_systems_streams_are_its_own(self, log: Log, name: str) -> None:
        with pytest.raises(BadNameError):
            log.apply([DropStream(name)])
        with Producer(log) as producer, pytest.raises(BadNameError):
            producer.send(name, {})

    # Records and their evolution

    @pytest.mark.row("H12")
    def test_an_event_keeps_its_envelope(self, log: Log) -> None:
        create(log, "s", key=None)
        at = dt.datetime(2020, 2, 3, 4, 5, 6, 789, tzinfo=dt.UTC)
        with Producer(log, ProducerOptions(client_id="tests/one")) as producer:
            producer.send(
                "s", Order("a", 1), key="k", id="my-id", time=at, type="order.placed",
                headers={"traceparent": "00-abc"},
            ).result()  # fmt: skip
            producer.send("s", Order("b", 2)).result()
        first, second = orders(log, "s")
        assert first == Event(
            data=Order("a", 1), key=b"k", id="my-id", time=at, type="order.placed",
            source="tests/one", headers={"traceparent": "00-abc"}, stream="s", partition=0,
            offset=first.offset,
        )  # fmt: skip
        assert (second.key, second.type, second.source) == (None, "Order", "tests/one")
        assert abs(second.time - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)

    def test_an_optional_field_may_be_added(self, log: Log) -> None:
        class Old(Record):
            user: str
            amount: int

        log.apply([CreateStream(declare("s", Old, key="user", table=True))])
        with Transaction(log, "p") as tx:
            tx.send("s", Old("a", 1))
        with Transaction(log, "p") as tx, pytest.raises(RecordError, match="does not have yet"):
            tx.send("s", Order("a", 2, "x"))
        log.apply([AlterStream(declare("s", Order, key="user", table=True))])
        with Transaction(log, "p") as tx:
            tx.send("s", Order("b", 2, "x"))
            tx.send("s", Old("c", 3))
        assert [e.data for e in orders(log, "s")] == [
            Order("a", 1), Order("b", 2, "x"), Order("c", 3),
        ]  # fmt: skip
        assert Table(log, "s", Order).get("a") == Order("a", 1)
        assert Table(log, "s", Order).get("b") == Order("b", 2, "x")
        assert len(log.stream("s").records) == 2

    def test_other_changes_of_a_record_are_refused(self, log: Log) -> None:
        create(log, "s")

        class NoNote(Record):
            user: str
            amount: int

        class TextAmount(Record):
            user: str
            amount: str
            note: str | None = None

        for record, reason in ((NoNote, "note was removed"), (TextAmount, "int to str")):
            with pytest.raises(EvolutionError, match=reason):
                log.apply([AlterStream(declare("s", record, key="user"))])
        for setting in ({"table": True}, {"ids": "producer"}):
            with pytest.raises(EvolutionError, match="cannot change"):
                log.apply([AlterStream(declare("s", Order, key="user", **setting))])

    def test_untyped_streams_hold_json_or_bytes(self, log: Log) -> None:
        log.apply([CreateStream(declare("j")), CreateStream(declare("b", content="bytes"))])
        values = [None, True, 1, 1.5, "x", [1, {"a": []}], {"k": {"n": None}}][1:]
        with Producer(log) as producer:
            for value in values:
                producer.send("j", value)
            producer.send("b", b"\x00\xff")
            with pytest.raises(RecordError, match="holds bytes"):
                producer.send("b", "text")
            with pytest.raises(RecordError, match="holds JSON"):
                producer.send("j", object())
        assert [e.data for e in read_events(log, "j")] == values
        assert [e.data for e in read_events(log, "b")] == [b"\x00\xff"]

    # Bad input changes nothing

    def test_bad_events_are_refused_and_nothing_is_written(self, harness: Harness) -> None:
        with harness.open(event_bytes_max=1000, key_bytes_max=20) as log:
            create(log, "s", key=None)
            with Producer(log) as producer:
                for wrong, error, match in (
                    (lambda: producer.send("nope", 1), UnknownObjectError, "no stream nope"),
                    (lambda: producer.send("s", 1), RecordError, "holds Order"),
                    (lambda: producer.send("s", Order(3, 1)), RecordError, r"\$\.user"),  # type: ignore[arg-type]
                    (lambda: producer.send("s", {"user": "a"}), RecordError, "amount"),
                    (lambda: producer.send("s", Order("a", 2**70)), RecordError, "Order"),
                    (lambda: producer.send("s", Order("x" * 2000, 1)), LimitError, "event_bytes"),
                    (
                        lambda: producer.send("s", Order("a", 1), key="k" * 21),
                        LimitError,
                        "key_bytes_max",
                    ),
                    (lambda: producer.send("s", Order("a", 1), key=""), UsageError, "empty"),
                    (lambda: producer.send("s", Order("a", 1), key=1.5), RecordError, "key"),  # type: ignore[arg-type]
                    (
                        lambda: producer.send("s", Order("a", 1), headers={"Bad-Name": "x"}),
                        RecordError,
                        "header",
                    ),
                    (lambda: producer.send("s", None), RecordError, "not a table"),
                    (
                        lambda: producer.append("s", pa.table({"user": ["a"]})),
                        RecordError,
                        "amount",
                    ),
                    (
                        lambda: producer.append("s", pa.table({"user": ["a"], "amount": ["x"]})),
                        RecordError,
                        "amount",
                    ),
                    (
                        lambda: producer.append("s", pa.table({"user": [None], "amount": [1]})),
                        RecordError,
                        "user",
                    ),
                    (
                        lambda: producer.append(
                            "s", pa.table({"user": ["a" * 2000] * 3, "amount": [1] * 3})
                        ),
                        LimitError,
                        "row 0",
                    ),
                    (
                        lambda: producer.append(
                            "s", pa.table({"user": ["a"], "amount": [1], "_offset": [1]})
                        ),
                        RecordError,
                        "_offset",
                    ),
                ):
                    with pytest.raises(error, match=match):
                        wrong()
            assert list(orders(log, "s")) == []

    # Tables

    def test_a_table_keeps_the_latest_value_per_key(self, log: Log) -> None:
        create(log, "t", table=True, partitions=2)
        with Transaction(log, "p") as tx:
            for n in range(30):
                tx.send("t", Order(f"u{n % 10}", n))
        table = Table(log, "t", Order)
        assert table.get("u3") == Order("u3", 23)
        with Transaction(log, "p") as tx:
            tx.send("t", None, key="u3")
            tx.send("t", Order("u4", 99))
            tx.send("t", None, key="u5")
            tx.send("t", Order("u5", 1, "again"))
        assert table.get_many(["u3", "u4", "u5", "nobody"]) == [
            None, Order("u4", 99), Order("u5", 1, "again"), None,
        ]  # fmt: skip
        keys = [key for key, _ in table.items()]
        assert keys == [f"u{n}".encode() for n in range(10) if n != 3]
        wanted = {e.key: e.data for e in orders(log, "t")}
        assert dict(table.items()) == {k: v for k, v in wanted.items() if v is not None}

    def test_a_table_is_read_in_pages_in_order_of_key(self, log: Log) -> None:
        create(log, "t", table=True, partitions=3)
        with Transaction(log, "p") as tx:
            for n in range(25):
                tx.send("t", Order(f"u{n:02}", n))
        table = Table(log, "t", Order)
        pages = [table.page(limit=10)]
        while pages[-1]:
            pages.append(table.page(after=pages[-1][-1][0], limit=10))
        assert [len(page) for page in pages] == [10, 10, 5, 0]
        assert [value.amount for page in pages for _, value in page] == list(range(25))
        with pytest.raises(LimitError, match="page_rows_max"):
            table.page(limit=10**9)

    def test_a_pinned_moment_stays_readable(self, harness: Harness, log: Log) -> None:
        create(log, "t", table=True)
        commit(log, "p", 0, "t", [1, 2, 3])
        pin = log.pin()
        with Transaction(log, "q") as tx:
            tx.send("t", Order("u1", 100))
            tx.send("t", None, key="u2")
            tx.send("t", Order("new", 5))
        second = log.pin()
        with Transaction(log, "q") as tx:
            tx.send("t", Order("u1", 200))
            tx.send("t", Order("u2", 300))
        log.maintain()
        with harness.open() as other:
            table = Table(other, "t", Order)
            keys = ["u1", "u2", "u3", "new"]
            amounts = [
                [None if v is None else v.amount for v in table.get_many(keys, at=at)]
                for at in (pin, second, None)
            ]
            assert amounts == [[1, 2, 3, None], [100, None, 3, 5], [200, 300, 3, 5]]
            assert [(k, v.amount) for k, v in table.page(at=pin)] == [
                (b"u1", 1), (b"u2", 2), (b"u3", 3),
            ]  # fmt: skip
            assert [(k, v.amount) for k, v in table.page(at=second, after="new")] == [
                (b"u1", 100), (b"u3", 3),
            ]  # fmt: skip
        log.unpin(pin)
        with pytest.raises(PinExpiredError):
            log.get("t", [b"u1"], pin)

    def test_a_snapshot_is_of_one_moment(self, log: Log) -> None:
        create(log, "t", table=True)
        rows = [f"k{n:05}" for n in range(9000)]
        with Transaction(log, "p") as tx:
            tx.append("t", pa.table({"user": rows, "amount": [1] * len(rows)}))
        entries = Table(log, "t", Order).items()
        first = next(entries)
        with Transaction(log, "p") as tx:
            tx.append("t", pa.table({"user": rows, "amount": [2] * len(rows)}))
        amounts = [value.amount for _, value in [first, *entries]]
        assert amounts == [1] * len(rows)

    def test_staged_changes_reach_the_table(self, log: Log) -> None:
        create(log, "t", table=True)
        holder = log.hold("q")
        piece = log.stage(holder, 0, make_part(log, "t", [1, 2]))
        assert log.get("t", [b"u1"]) == [None]
        log.commit(holder, 0, Commit(pieces=[piece]))
        assert Table(log, "t", Order).get("u1") == Order("u1", 1)

    def test_a_table_needs_keys_and_only_tables_are_read_as_such(self, log: Log) -> None:
        create(log, "t", table=True, key=None)
        create(log, "s")
        with Transaction(log, "p") as tx, pytest.raises(UsageError, match="needs a key"):
            tx.send("t", Order("a", 1))
        with pytest.raises(UsageError, match="not a table"):
            log.get("s", [b"a"])

    # Retention

    def test_retention_by_time_removes_old_events(self, log: Log) -> None:
        create(log, "s", retention_ms=1)
        done = commit(log, "p", 0, "s", [1, 2])
        wait_for_clock_after(done.time + dt.timedelta(milliseconds=5))
        log.maintain()
        bounds = log.offsets("s")[0]
        assert bounds.first == bounds.next
        with pytest.raises(OffsetGoneError) as gone:
            list(log.read("s", 0, 0))
        assert gone.value.earliest == bounds.first
        again = commit(log, "p", 1, "s", [3])
        assert again.placements[0].ranges[0][1] >= bounds.next

    def test_retention_by_size_keeps_the_newest(self, harness: Harness) -> None:
        with harness.open(batch_rows_max=100) as log:
            create(log, "s", retention_bytes=6000)
            holder = log.hold("p")
            for n in range(30):
                commit_as(log, holder, n, "s", range(n * 50, n * 50 + 50))
            log.maintain()
            amounts = [e.data.amount for e in orders(log, "s")]
            assert 0 < len(amounts) < 1500
            assert amounts == list(range(1500 - len(amounts), 1500))
            with pytest.raises(OffsetGoneError):
                list(log.read("s", 0, 0))

    # Merging small batches

    def test_merging_changes_nothing_that_a_reader_sees(self, harness: Harness, log: Log) -> None:
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
        assert log.maintain().batches_merged > 0
        with harness.open() as other:
            assert [list(by_place(other, "s")), list(by_place(other, "t"))] == before
            assert [other.offset_at("t", 0, batch_time(log, n)) for n in (10, 80)] == times
            middle = [e.offset for e in orders(other, "t", start=70)]
            assert middle == list(range(70, 165))

    def test_upkeep_runs_beside_readers_and_writers(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        stop = threading.Event()
        errors: list[BaseException] = []

        def guarded(work: Callable[[Log], object]) -> threading.Thread:
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

        threads = [guarded(read_all), guarded(lambda other: other.maintain())]
        holder = log.hold("p")
        for n in range(300):
            commit_as(log, holder, n, "s", [n])
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert [e.data.amount for e in orders(log, "s")] == list(range(300))

    # Threads

    @pytest.mark.row("H14")
    def test_many_threads_commit_at_once(self, log: Log) -> None:
        create(log, "s")

        def work(number: int) -> None:
            holder = log.hold(f"p{number}")
            for n in range(10):
                commit_as(log, holder, n, "s", [number * 100 + n])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        amounts = [e.data.amount for e in orders(log, "s")]
        assert sorted(amounts) == sorted(p * 100 + n for p in range(16) for n in range(10))
        for p in range(16):
            mine = [a for a in amounts if a // 100 == p]
            assert mine == sorted(mine)

    def test_a_failing_commit_does_not_harm_its_neighbours(self, log: Log) -> None:
        create(log, "s")
        fenced, good = log.hold("p"), log.hold("q")
        log.hold("p")
        failed: list[Exception] = []

        def bad() -> None:
            for n in range(30):
                try:
                    commit_as(log, fenced, n, "s", [1000 + n])
                except FencedError as error:
                    failed.append(error)

        thread = threading.Thread(target=bad)
        thread.start()
        for n in range(30):
            commit_as(log, good, n, "s", [n])
        thread.join(60)
        assert len(failed) == 30
        assert [e.data.amount for e in orders(log, "s")] == list(range(30))

    # Verify

    def test_a_healthy_log_verifies(self, log: Log) -> None:
        create(log, "s", partitions=2)
        commit(log, "p", 0, "s", range(100))
        calls: list[tuple[int, int]] = []
        assert list(log.verify(lambda done, total: calls.append((done, total)))) == []
        assert calls[-1][0] == calls[-1][1]
        assert DamagedError.code == "damaged"


# What the tests share


def create(log: Log, name: str, key: str | None = "user", **settings: object) -> None:
    log.apply([CreateStream(declare(name, Order, key=key, **settings))])


def make_part(log: Log, stream: str, amounts: Iterable[int], ids: list[int] | None = None) -> Part:
    found = log.stream(stream)
    composer = Composer("tests", log.limits)
    events = [
        composer.admit(found, Order(f"u{n % 10}", n), EventOptions(id=ids[i] if ids else None))
        for i, n in enumerate(amounts)
    ]
    part = composer.part(found, events)
    assert len(ids_of(part.batch)) == len(events)
    return part


def commit_as(
    log: Log, holder: Holder, sequence: int, stream: str, amounts: Iterable[int]
) -> Committed:
    return log.commit(holder, sequence, Commit(parts=[make_part(log, stream, amounts)]))


def commit(
    log: Log, producer: str, sequence: int, stream: str, amounts: Iterable[int]
) -> Committed:
    return commit_as(log, log.hold(producer), sequence, stream, amounts)


def orders(log: Log, stream: str, **options: Any) -> Iterator[Event[Order]]:
    return read_events(log, stream, Order, ReadOptions(**options))


def by_place(log: Log, stream: str) -> list[Event[Order]]:
    """All events in order of partition and offset."""
    return sorted(orders(log, stream), key=lambda event: (event.partition, event.offset))


def batch_time(log: Log, offset: int) -> dt.datetime:
    """When the event at `offset` of the stream t was appended."""
    batch = next(log.read("t", 0, offset))
    return dt.datetime.fromtimestamp(batch.commit_of(offset).time_us / 1e6, dt.UTC)


def wait_for_clock_after(time: dt.datetime) -> None:
    """Wait until the clock shows a later time."""
    deadline = threading.Event()
    while dt.datetime.now(dt.UTC) <= time:
        deadline.wait(0.001)
