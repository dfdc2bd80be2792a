"""Invalid events and columns are refused, and nothing of them is written."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import (
    LimitError,
    RecordError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.api import Log
from penstock.log.declaring.objects import (
    CreateStream,
    DropStream,
    declare,
)
from penstock.log.reading.read import read_events
from penstock.log.writing.transaction import Transaction
from penstock.producer import Producer, ProducerOptions
from penstock.records.documents import JSON_DEPTH_MAX
from penstock.records.schema import Record
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    create,
    orders,
)


class Dated(Record):
    user: str
    at: dt.datetime


class Lists(Record):
    numbers: list[int]


class Numbers(Record):
    counts: dict[str, int]


class RefusalContract(OnEngine):
    def test_what_comes_from_a_field_is_not_given_a_second_time(self, log: Log) -> None:
        log.apply([CreateStream(declare("s", Dated, key="user", time="at"))])
        now = dt.datetime.now(dt.UTC)
        with Transaction(log, "p") as tx:
            for options in ({"key": "b"}, {"time": now}):
                with pytest.raises(UsageError, match="leave out the"):
                    tx.send("s", Dated("a", now), **options)
            columns = {"user": ["a"], "at": [now]}
            with pytest.raises(UsageError, match="leave out column _key"):
                tx.append("s", pa.table({**columns, "_key": ["b"]}))
            tx.send("s", Dated("a", now))
        (event,) = read_events(log, "s")
        assert (event.key, event.time) == (b"a", now)

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
                    (lambda: producer.send("s", Order("a", 1), key=True), RecordError, "key"),
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

    @pytest.mark.parametrize(
        ("data", "options"),
        [
            (Order("a", 2**63), {}),
            (Order("\ud800", 1), {}),
            (Order("a", 1), {"type": 5}),
            (Order("a", 1), {"type": ""}),
            (Order("a", 1), {"id": "\ud800"}),
            (Order("a", 1), {"id": ""}),
            (Order("a", 1), {"time": "2026-01-01"}),
            (Order("a", 1), {"headers": ["x"]}),
            (Order("a", 1), {"headers": {"x": "\ud800"}}),
            (Order("a", 1), {"key": "\ud800"}),
        ],
    )
    def test_what_cannot_be_stored_is_refused_at_once(
        self, log: Log, data: Order, options: dict[str, Any]
    ) -> None:
        create(log, "s", key=None)
        with Producer(log, ProducerOptions(batch_delay_ms=100)) as producer:
            good = producer.send("s", Order("a", 1))
            with pytest.raises(UsageError):
                producer.send("s", data, **options)
            assert good.result().offset == 0

    def test_columns_that_could_not_be_read_again_are_refused(self, log: Log) -> None:
        log.apply([CreateStream(declare("m", Numbers)), CreateStream(declare("j"))])
        create(log, "s")
        create(log, "t", table=True)
        broken = pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
        )
        twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
        headers = pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
        one = {"user": ["u"], "amount": [1]}
        with Transaction(log, "p") as tx:
            for stream, columns in (
                ("s", {"user": broken, "amount": [1]}),
                ("j", {"data": broken}),
                ("m", {"counts": twice}),
                ("s", {**one, "_headers": headers}),
                ("s", {**one, "_type": [""]}),
                ("s", {**one, "_time": pa.array([0], pa.timestamp("us"))}),
                ("t", {**one, "_key": ["other"], "_deleted": [False]}),
            ):
                with pytest.raises(UsageError):
                    tx.append(stream, pa.table(columns))
            double = pa.table([["u"], [1], ["x"], ["y"]], names=["user", "amount", "note", "note"])
            with pytest.raises(RecordError, match="column note occurs more than once"):
                tx.append("s", double)
        for stream in ("s", "j", "m", "t"):
            assert list(read_events(log, stream)) == []

    def test_single_events_and_columns_have_the_same_limits(self, harness: Harness) -> None:
        limits = {"event_bytes_max": 1000, "headers_bytes_max": 50, "key_bytes_max": 20}
        with harness.open(**limits) as log:
            create(log, "s", key=None)
            create(log, "t", key=None, table=True)
            create(log, "u", key=None, ids="producer")
            log.apply([CreateStream(declare("j")), CreateStream(declare("l", Lists))])
            one = {"user": ["a"], "amount": [1]}
            header = pa.array([[("a", "x" * 50)]], pa.map_(pa.string(), pa.string()))
            deep: list[Any] = []
            for _ in range(JSON_DEPTH_MAX):
                deep = [deep]
            with Transaction(log, "p") as tx:
                for wrong, error, match in (
                    (
                        lambda: tx.send("s", Order("a", 1), headers={"a": "x" * 50}),
                        LimitError,
                        "headers_bytes_max",
                    ),
                    (lambda: tx.send("s", Order("a", 1), id="x" * 501), RecordError, "500"),
                    (lambda: tx.send("j", deep), RecordError, "deep"),
                    (
                        lambda: tx.append("s", pa.table({**one, "_headers": header})),
                        LimitError,
                        "headers_bytes_max",
                    ),
                    (
                        lambda: tx.append("s", pa.table({**one, "_key": ["k" * 21]})),
                        LimitError,
                        "key_bytes_max",
                    ),
                    (lambda: tx.append("s", pa.table({**one, "_key": [""]})), UsageError, "empty"),
                    (
                        lambda: tx.append("s", pa.table({**one, "_id": ["x" * 501]})),
                        RecordError,
                        "500",
                    ),
                    (lambda: tx.append("t", pa.table(one)), UsageError, "needs a key"),
                    (
                        lambda: tx.append("u", pa.table({**one, "_id": pa.nulls(1, pa.string())})),
                        UsageError,
                        "nulls",
                    ),
                    (
                        lambda: tx.append("j", pa.table({"data": pa.nulls(1, pa.string())})),
                        RecordError,
                        "nulls",
                    ),
                    (
                        lambda: tx.append("l", pa.table({"numbers": [[1], list(range(1000))]})),
                        LimitError,
                        "row 1",
                    ),
                ):
                    with pytest.raises(error, match=match):
                        wrong()
            for stream in ("s", "t", "u", "j", "l"):
                assert list(read_events(log, stream)) == []

    @pytest.mark.row("H14")
    def test_one_refused_event_does_not_take_others_with_it(self, log: Log) -> None:
        create(log, "s")
        create(log, "gone")
        with Producer(log, ProducerOptions(batch_delay_ms=300)) as producer:
            kept = [producer.send("s", Order("a", n)) for n in range(3)]
            lost = producer.send("gone", Order("a", 9))
            kept += [producer.send("s", Order("a", n)) for n in range(3, 6)]
            log.apply([DropStream("gone")])
            producer.flush()
            offsets = [future.result().offset for future in kept]
            assert offsets == [event.offset for event in orders(log, "s")]
            with pytest.raises(UnknownObjectError):
                lost.result()
            producer.send("s", Order("a", 6)).result()
