"""EventContract: keys, ids, envelopes and records."""

from __future__ import annotations

import datetime as dt
import decimal
import zlib

import pyarrow as pa
import pytest

from penstock.errors import (
    EvolutionError,
    RecordError,
    UsageError,
)
from penstock.log.api import Commit, Log, Part
from penstock.log.declaring.objects import (
    AlterStream,
    CreateStream,
    GrowStream,
    declare,
)
from penstock.log.reading.read import read_events
from penstock.log.reading.table import Table
from penstock.log.writing.compose import Composer, EventOptions
from penstock.log.writing.transaction import Transaction
from penstock.producer import Producer, ProducerOptions
from penstock.records.event import StoredEvent
from penstock.records.schema import Record
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    create,
    make_part,
    orders,
)


class Inner(Record):
    a: int


class Inner2(Record):
    a: int
    b: str | None


class Plain(Record):
    inner: Inner


class Plain2(Record):
    inner: Inner2


class Old(Record):
    key: str
    price: decimal.Decimal
    day: dt.date
    inner: Inner


class New(Record):
    key: str
    price: decimal.Decimal
    day: dt.date
    inner: Inner2
    note: str | None


class EventContract(OnEngine):
    # Promise 7: keys and partitions

    @pytest.mark.row("H14")
    @pytest.mark.parametrize("kind", ["str", "int", "bytes"])
    def test_the_key_decides_the_partition(self, log: Log, kind: str) -> None:
        log.apply([CreateStream(declare("s", partitions=4))])
        kinds: dict[str, list[str | int | bytes]] = {
            "str": ["ada", "bob", "straße"],
            "int": [0, 7, -3, 2**40],
            "bytes": [b"\x00\xff", b"abc"],
        }
        keys = kinds[kind]
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

    def test_events_without_a_key_are_spread_also_beside_others(self, log: Log) -> None:
        create(log, "s", partitions=4, key=None)
        rows = {"user": ["a", "b"], "amount": [1, 2], "_key": ["k", None]}
        with Transaction(log, "p") as tx:
            for _ in range(40):
                tx.append("s", pa.table(rows))
        homes = {e.data.user: set[int]() for e in orders(log, "s")}
        for event in orders(log, "s"):
            homes[event.data.user].add(event.partition)
        assert homes == {"a": {zlib.crc32(b"k") % 4}, "b": {0, 1, 2, 3}}

    def test_columns_and_single_events_go_to_the_same_partitions(self, log: Log) -> None:
        create(log, "s", partitions=5)
        users = [f"u{n}" for n in range(50)]
        with Producer(log) as producer:
            singles = {u: producer.send("s", Order(u, 0)).result().partition for u in users}
            batch = pa.table({"user": users, "amount": [1] * 50})
            producer.append("s", batch).result()
        for event in orders(log, "s"):
            assert event.partition == singles[event.data.user]

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
            ("5", "a"),
            ("1", "a"),
            ("3", "a"),
            ("2", "a"),
            ("4", "b"),
            ("6", "b"),
        ]

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
    def test_ids_may_be_as_large_as_integers_get(self, log: Log) -> None:
        create(log, "s", ids="producer", key=None)
        holder = log.hold("p")
        ids = [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**63 - 2, -(2**63) + 1]
        for sequence, dropped in enumerate([(), tuple(range(len(ids)))]):
            part = make_part(log, "s", range(len(ids)), ids=ids)
            done = log.commit(holder, sequence, Commit(parts=[part]))
            assert done.placements[0].dropped == dropped
        assert [e.id for e in orders(log, "s")] == [str(number) for number in ids]

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
    def test_what_is_dropped_is_told_by_row_however_a_part_is_stored(
        self, harness: Harness
    ) -> None:
        with harness.open(batch_rows_max=4) as log:
            create(log, "s", ids="producer", key=None)
            holder = log.hold("p")
            held = [1, 2, 3, 9]
            log.commit(holder, 0, Commit(parts=[make_part(log, "s", held, ids=held)]))
            ids = [3, 5, 1, 6, 7, 8, 9, 10, 2, 11]
            done = log.commit(holder, 1, Commit(parts=[make_part(log, "s", ids, ids=ids)]))
            assert done.placements[0].dropped == (0, 2, 6, 8)
            assert [e.data.amount for e in orders(log, "s")] == [*held, 5, 6, 7, 8, 10, 11]

    @pytest.mark.row("H15")
    def test_a_producer_id_stream_has_one_partition(self, log: Log) -> None:
        with pytest.raises(UsageError, match="one partition"):
            create(log, "s", ids="producer", partitions=2)
        create(log, "s", ids="producer")
        with pytest.raises(UsageError, match="one partition"):
            log.apply([GrowStream("s", 2)])
        with Transaction(log, "p") as tx, pytest.raises(UsageError, match="give every event an id"):
            tx.send("s", Order("a", 1))

    # Records and their evolution

    @pytest.mark.row("H12")
    def test_an_event_keeps_its_envelope(self, log: Log) -> None:
        create(log, "s", key=None)
        at = dt.datetime(2020, 2, 3, 4, 5, 6, 789, tzinfo=dt.UTC)
        with Producer(log, ProducerOptions(client_id="tests/one")) as producer:
            producer.send(
                "s",
                Order("a", 1),
                key="k",
                id="my-id",
                time=at,
                type="order.placed",
                headers={"traceparent": "00-abc"},
            ).result()
            producer.send("s", Order("b", 2)).result()
        first, second = orders(log, "s")
        assert first == StoredEvent(
            data=Order("a", 1),
            key=b"k",
            id="my-id",
            time=at,
            type="order.placed",
            source="tests/one",
            headers={"traceparent": "00-abc"},
            stream="s",
            partition=0,
            offset=first.offset,
        )
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
            Order("a", 1),
            Order("b", 2, "x"),
            Order("c", 3),
        ]
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

    def test_given_ids_may_be_missing_and_then_stay_what_they_became(self, log: Log) -> None:
        create(log, "s", partitions=4)
        users = [f"u{n}" for n in range(40)]
        some = [f"id-{n}" if n % 2 else None for n in range(40)]
        with Transaction(log, "p") as tx:
            table = {"user": users, "amount": range(40), "_id": some}
            ids = tx.append("s", pa.table(table)).to_pylist()
        assert len(set(ids)) == 40
        assert {e.data.amount: e.id for e in orders(log, "s")} == dict(enumerate(ids))
        for event in orders(log, "s", key="u7"):
            assert event.id == "id-7"

    def test_appended_json_has_keys_and_deletes(self, log: Log) -> None:
        log.apply([CreateStream(declare("j", key="k")), CreateStream(declare("t", table=True))])
        with Transaction(log, "p") as tx:
            tx.append("j", pa.table({"data": ['{"k": "a"}', '{"k": 7}']}))
            tx.append("t", pa.table({"data": ["1", "2"], "_key": ["a", "b"]}))
            with pytest.raises(RecordError, match="row 1 is not an object with a field 'k'"):
                tx.append("j", pa.table({"data": ['{"k": "a"}', "[]"]}))
        assert [e.key for e in read_events(log, "j")] == [b"a", b"7"]
        with Transaction(log, "p") as tx:
            tx.append(
                "t", pa.table({"data": [None, "3"], "_key": ["a", "c"], "_deleted": [True, False]})
            )
        assert dict(Table(log, "t").items()) == {b"b": 2, b"c": 3}

    def test_an_older_entry_is_read_with_a_newer_class(self, log: Log) -> None:
        log.apply([CreateStream(declare("t", Old, key="key", table=True))])
        with Transaction(log, "p") as tx:
            tx.send("t", Old("k", decimal.Decimal("1.5"), dt.date(2026, 1, 2), Inner(1)))
        log.apply([AlterStream(declare("t", New, key="key", table=True))])
        wanted = New("k", decimal.Decimal("1.5"), dt.date(2026, 1, 2), Inner2(1, None), None)
        assert Table(log, "t", New).get("k") == wanted

    def test_upkeep_keeps_what_a_newer_record_added(self, log: Log) -> None:
        """Even if events were staged under the older record and committed under the newer one."""
        log.apply([CreateStream(declare("s", Plain))])
        holder = log.hold("p")
        composer = Composer("tests", log.limits)

        def part(value: Record) -> Part:
            stream = log.stream("s")
            return composer.part(stream, [composer.admit(stream, value, EventOptions())])

        staged = log.stage(holder, 20, part(Plain(Inner(1))))
        log.apply([AlterStream(declare("s", Plain2))])
        for n in range(20):
            log.commit(holder, n, Commit(parts=[part(Plain2(Inner2(n, "precious")))]))
        log.commit(holder, 20, Commit(pieces=[staged]))
        log.maintain()
        inner = [event.data.inner for event in read_events(log, "s", Plain2)]
        assert inner == [*(Inner2(n, "precious") for n in range(20)), Inner2(1, None)]

    def test_the_key_column_is_for_deleted_entries(self, log: Log) -> None:
        create(log, "t", table=True)
        with Transaction(log, "p") as tx:
            tx.append("t", pa.table({"user": ["a", "b"], "amount": [1, 2]}))
            changes = {
                "user": pa.array([None, "c"]),
                "amount": pa.array([None, 3], pa.int64()),
                "_key": ["a", None],
                "_deleted": [True, False],
            }
            tx.append("t", pa.table(changes))
        assert dict(Table(log, "t", Order).items()) == {b"b": Order("b", 2), b"c": Order("c", 3)}
