"""TimeContract: every time that Python can represent in UTC can be stored, and no other."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import msgspec
import pyarrow as pa
import pytest

from penstock.errors import RecordError
from penstock.log.api import Log
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.reading.read import read_events
from penstock.log.writing.transaction import Transaction
from penstock.producer import Producer
from penstock.records.ranges import TIME_US_MAX, TIME_US_MIN
from penstock.records.schema import Record
from penstock.testing.contract.setting import OnEngine


class Moment(Record):
    at: dt.datetime
    day: dt.date | None = None
    local: Annotated[dt.datetime, msgspec.Meta(tz=False)] | None = None
    many: list[dt.datetime] = msgspec.field(default_factory=list)
    named: dict[str, dt.datetime] = msgspec.field(default_factory=dict)


SOME_TIME = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
#: valid in their own time zone, but out of range in UTC
LATE = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.timezone(dt.timedelta(hours=-5)))
EARLY = dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=23)))


def moment_columns(us: int) -> dict[str, pa.Array]:
    """Columns that are valid except for the given microseconds, whichever of them is used."""
    at = pa.array([us], pa.int64()).cast(pa.timestamp("us"))
    zoned = at.cast(pa.timestamp("us", "UTC"))
    return {
        "at": zoned,
        "_time": zoned,
        "local": at,
        "day": pa.array([us // 86_400_000_000], pa.int32()).cast(pa.date32()),
        "many": pa.ListArray.from_arrays([0, 1], zoned),
        "named": pa.MapArray.from_arrays([0, 1], ["a"], zoned),
    }


class TimeContract(OnEngine):
    @pytest.mark.parametrize("time", [LATE, EARLY])
    def test_times_that_are_none_in_utc_are_refused(self, log: Log, time: dt.datetime) -> None:
        log.apply([CreateStream(declare("s", Moment))])
        log.apply([CreateStream(declare("timed", Moment, time="at"))])
        empty: dict[str, object] = {"many": [], "named": {}}
        wrong = (
            Moment(time),
            Moment(SOME_TIME, many=[time]),
            Moment(SOME_TIME, named={"a": time}),
            {"at": time, **empty},
            {"at": time.isoformat(), **empty},
        )
        with Producer(log) as producer, Transaction(log) as tx:
            for data in wrong:
                for stream in ("s", "timed"):
                    with pytest.raises(RecordError, match="outside the years 1 to 9999"):
                        producer.send(stream, data)
                    with pytest.raises(RecordError, match="outside the years 1 to 9999"):
                        tx.send(stream, data)
            with pytest.raises(RecordError, match="outside the years 1 to 9999"):
                producer.send("s", Moment(SOME_TIME), time=time)
            producer.send("s", Moment(SOME_TIME))
        assert [event.data for event in read_events(log, "s", Moment)] == [Moment(SOME_TIME)]

    @pytest.mark.parametrize("us", [TIME_US_MAX + 1, TIME_US_MIN - 1])
    @pytest.mark.parametrize("name", ["at", "_time", "local", "day", "many", "named"])
    def test_columns_of_such_times_are_refused(self, log: Log, us: int, name: str) -> None:
        log.apply([CreateStream(declare("s", Moment))])
        fine, wrong = moment_columns(0), moment_columns(us)
        with Producer(log) as producer:
            with pytest.raises(RecordError, match="outside the years 1 to 9999"):
                producer.append("s", pa.table({**fine, name: wrong[name]}))
            producer.append("s", pa.table(fine))
        assert len(list(read_events(log, "s", Moment))) == 1

    def test_every_time_that_there_is_can_be_stored(self, log: Log) -> None:
        log.apply([CreateStream(declare("s", Moment))])
        first, last = dt.datetime.min, dt.datetime.max
        sent = [
            Moment(t.replace(tzinfo=dt.UTC), t.date(), t, [t.replace(tzinfo=dt.UTC)])
            for t in (first, last)
        ]
        with Producer(log) as producer:
            for data in sent:
                producer.send("s", data, time=data.at)
        found = list(read_events(log, "s", Moment))
        assert [event.data for event in found] == sent
        assert [event.time for event in found] == [data.at for data in sent]
