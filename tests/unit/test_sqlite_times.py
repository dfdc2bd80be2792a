"""Times that an older version let in: the event is damage, its neighbours are not."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import DamagedError
from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.reading.read import ReadOptions, read_events
from penstock.producer import Producer
from penstock.records.schema import Record

US_MAX = 253_402_300_799_999_999
BAD = (3, 4, 700)
ROWS = 1000


class Moment(Record):
    n: int
    at: dt.datetime


def columns(bad: str) -> pa.Table:
    times = [US_MAX + 1 if n in BAD else n * 1_000_000 for n in range(ROWS)]
    fine = [n * 1_000_000 for n in range(ROWS)]
    kind = pa.timestamp("us", "UTC")
    return pa.table(
        {
            "n": range(ROWS),
            "at": pa.array(times if bad == "at" else fine, kind),
            "_time": pa.array(times if bad == "_time" else fine, kind),
        }
    )


@pytest.fixture(params=["at", "_time"])
def log(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        opened.apply([CreateStream(declare("s", Moment))])
        monkeypatch.setattr("penstock.records.arrow.check_times", lambda *_: None)
        monkeypatch.setattr("penstock.log.writing.columns.check_times", lambda *_: None)
        with Producer(opened) as producer:
            producer.append("s", columns(request.param))
        monkeypatch.undo()
        yield opened


def numbers(log: Log, options: ReadOptions = ReadOptions()) -> Iterator[int]:
    return (event.data.n for event in read_events(log, "s", Moment, options))


def test_reading_goes_on_behind_it(log: Log) -> None:
    told: list[DamagedError] = []
    found = list(numbers(log, ReadOptions(on_damage=told.append)))
    assert found == [n for n in range(ROWS) if n not in BAD]
    assert [(d.first_offset, d.last_offset) for d in told] == [(n, n) for n in BAD]


def test_what_lies_before_it_is_read(log: Log) -> None:
    before = iter(numbers(log))
    assert [next(before) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DamagedError, match="offset 3 contains a time outside the years") as told:
        next(before)
    assert (told.value.first_offset, told.value.last_offset) == (3, 3)


def test_verify_finds_it(log: Log) -> None:
    found = list(log.verify())
    assert [(d.stream, d.first_offset, d.last_offset) for d in found] == [("s", n, n) for n in BAD]


def test_upkeep_keeps_it(log: Log) -> None:
    with Producer(log) as producer:
        for n in range(40):
            producer.send("s", Moment(n, dt.datetime.now(dt.UTC)))
            producer.flush()
    log.maintain()
    told: list[DamagedError] = []
    assert len(list(numbers(log, ReadOptions(on_damage=told.append)))) == ROWS + 40 - len(BAD)
    assert len(told) == len(BAD)
