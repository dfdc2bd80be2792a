"""Namespaces and streams: declared, changed, dropped, and recorded as events."""

from __future__ import annotations

import datetime as dt
import zlib
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import (
    BadNameError,
    EvolutionError,
    LimitError,
    ObjectExistsError,
    PieceError,
    RecordError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.api import Commit, Log, Part
from penstock.log.declaring.objects import (
    AlterStream,
    CreateNamespace,
    CreateStream,
    DropNamespace,
    DropStream,
    GrowStream,
    StreamSpec,
    declare,
)
from penstock.log.reading.read import read_events
from penstock.producer import Producer
from penstock.records.schema import Field, Record, Scalar, Schema
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    commit_as,
    create,
    make_part,
    orders,
)


class Timed(Record):
    at: dt.datetime


class ObjectContract(OnEngine):
    # ObjectContract

    @pytest.mark.row("H5")
    def test_namespaces(self, log: Log) -> None:
        assert log.namespaces() == ["_system", "default"]
        log.apply([CreateNamespace("shop"), CreateStream(declare("shop.orders", Order))])
        assert log.stream("shop.orders").name == ("shop", "orders")
        with pytest.raises(UnknownObjectError):
            log.stream("orders")
        with pytest.raises(ObjectExistsError):
            log.apply([CreateNamespace("shop")])
        with pytest.raises(UsageError, match="still contains orders"):
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

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"record": Order, "key": "nobody"}, "no field 'nobody' to be the key"),
            ({"record": Order, "time": "nobody"}, "no field 'nobody' to be the time"),
            ({"record": Order, "time": "amount"}, "must be a datetime"),
            ({"record": Timed, "key": "at"}, "a key is str, int, bytes or UUID"),
            ({"key": ""}, "leave key out"),
            ({"time": "at"}, "needs a record"),
            ({"content": "bytes", "key": "user"}, "bytes have no field"),
            ({"retention_ms": 0}, "must be positive"),
            ({"retention_bytes": 0}, "must be positive"),
            ({"replication": 0}, "must be positive"),
            ({"partitions": 0}, "1 to"),
            ({"record": Order, "entries": "set"}, "needs a table"),
        ],
    )
    def test_declarations_that_make_no_sense_are_refused(
        self, log: Log, settings: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(UsageError, match=match):
            log.apply([CreateStream(declare("s", **settings))])
        double = Schema("Double", (Field("x", Scalar("str")), Field("x", Scalar("int"))))
        with pytest.raises(UsageError, match="has the field x twice"):
            log.apply([CreateStream(StreamSpec(name="s", content="record", record=double))])
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
            "create namespace",
            "create stream",
            "grow stream",
            "alter stream",
            "drop stream",
            "drop namespace",
        ]
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

    def test_events_made_for_a_stream_do_not_get_into_another_of_its_name(self, log: Log) -> None:
        create(log, "s")
        holder, part = log.hold("p"), make_part(log, "s", [1])
        log.apply([DropStream("s"), CreateStream(declare("s"))])
        for attempt in (
            lambda: log.commit(holder, 0, Commit(parts=[part])),
            lambda: log.stage(holder, 0, part),
        ):
            with pytest.raises(RecordError, match="created again"):
                attempt()
        assert list(read_events(log, "s")) == []

    def test_a_stream_may_be_made_anew_in_one_change(self, harness: Harness, log: Log) -> None:
        """It is then empty for everyone at once, and accepts what is written to it."""
        kinds: dict[str, dict[str, object]] = {
            "plain": {"partitions": 3},
            "table": {"table": True},
            "unique": {"ids": "producer", "key": None},
        }
        for name, settings in kinds.items():
            create(log, name, **settings)  # type: ignore[arg-type]
        with harness.open() as other:
            holder = other.hold("p")
            for sequence, name in enumerate(kinds):
                part = make_part(other, name, [1, 2], ids=[1, 2])
                other.commit(holder, sequence, Commit(parts=[part]))
            assert other.get("table", [b"u1"]) != [None]
            for name in kinds:
                log.apply([DropStream(name), CreateStream(log.stream(name).spec)])
                assert list(orders(other, name)) == []
            assert other.get("table", [b"u1"]) == [None]
            for sequence, name in enumerate(kinds, 3):
                part = make_part(other, name, [2, 3], ids=[2, 3])
                done = other.commit(holder, sequence, Commit(parts=[part]))
                assert done.placements[0].dropped == ()
                assert sorted(e.data.amount for e in orders(log, name)) == [2, 3]
            assert log.get("table", [b"u1"]) == [None]

    def test_what_was_staged_for_a_stream_is_not_committed_to_another_of_its_name(
        self, log: Log
    ) -> None:
        create(log, "s")
        holder = log.hold("p")
        piece = log.stage(holder, 0, make_part(log, "s", [1]))
        log.apply([DropStream("s"), CreateStream(log.stream("s").spec)])
        with pytest.raises(PieceError):
            log.commit(holder, 0, Commit(pieces=[piece]))
        assert list(orders(log, "s")) == []

    @pytest.mark.parametrize("name", ["_system.objects", "_system.metrics"])
    def test_the_systems_streams_are_its_own(self, log: Log, name: str) -> None:
        with pytest.raises(BadNameError):
            log.apply([DropStream(name)])
        with Producer(log) as producer, pytest.raises(BadNameError):
            producer.send(name, {})

    def test_a_stream_that_was_never_applied_is_never_seen(self, log: Log) -> None:
        with pytest.raises(UnknownObjectError):
            log.apply([CreateStream(declare("x", Order)), DropStream("x"), DropStream("no")])
        with pytest.raises(UnknownObjectError):
            log.apply([CreateStream(declare("x", Order)), GrowStream("x", 2), DropStream("no")])
        log.apply([CreateStream(declare("y", content="bytes"))])
        assert log.stream("y").spec.content == "bytes"
        assert str(log.stream("y").name) == "y"

    def test_only_changes_are_applied(self, log: Log) -> None:
        for wrong in ([declare("s")], declare("s"), ["s"]):
            with pytest.raises(UsageError, match="CreateStream"):
                log.apply(wrong)  # type: ignore[arg-type]
        log.apply(CreateStream(declare("one")))  # type: ignore[arg-type]
        assert str(log.stream("one").name) == "one"
        with pytest.raises(RecordError, match="not a record class"):
            declare("s", dict)  # type: ignore[arg-type]
        with pytest.raises(BadNameError):
            log.stream(Order)  # type: ignore[arg-type]
