"""What the tests of the contract share: a record, a harness, and short helper functions."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol, cast

import pytest

from penstock import failpoints
from penstock.errors import CommitOutcomeUnknownError
from penstock.log.api import Commit, Committed, Holder, Log, Part
from penstock.log.declaring.objects import (
    CreateStream,
    declare,
)
from penstock.log.reading.read import ReadOptions, read_changes
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.event import StoredEvent, ids_of
from penstock.records.schema import Record


class Order(Record):
    user: str
    amount: int
    note: str | None = None


class Harness(Protocol):
    """Gives access to one log of the engine under test."""

    @property
    def url(self) -> str:
        """The URL with which other processes open the log."""

    def open(self, **options: str | int | bool) -> Log:
        """Another handle to the same log; the first one creates it."""


class OnEngine:
    """Tests of one engine; a subclass provides the `harness`."""

    engine: ClassVar[str] = "any"
    moments_s: ClassVar[float] = 0.0
    """How long a commit may take to become visible in all its partitions; see promise 2."""
    producers_kept_us: ClassVar[str] = ""
    """The full name of the constant that says how long an ephemeral producer is remembered."""

    @pytest.fixture
    def harness(self) -> Harness:
        raise NotImplementedError

    @pytest.fixture
    def log(self, harness: Harness) -> Iterator[Log]:
        with harness.open() as opened:
            yield opened


def create(log: Log, name: str, key: str | None = "user", **settings: object) -> None:
    log.apply([CreateStream(declare(name, Order, key=key, time=None, content=None, **settings))])


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


def commit_in_doubt(
    log: Log, holder: Holder, sequence: int, stream: str, amounts: Iterable[int]
) -> None:
    """Make a commit whose outcome is unknown."""
    failpoints.arm("commit.committed", "raise")
    try:
        with pytest.raises(CommitOutcomeUnknownError, match="under the same name"):
            commit_as(log, holder, sequence, stream, amounts)
    finally:
        failpoints.disarm()


def commit(
    log: Log, producer: str, sequence: int, stream: str, amounts: Iterable[int]
) -> Committed:
    return commit_as(log, log.hold(producer), sequence, stream, amounts)


def orders(log: Log, stream: str, **options: Any) -> Iterator[StoredEvent[Order]]:
    """The orders of a stream, or of a table's changelog, where data may be `None`."""
    return cast(
        Iterator[StoredEvent[Order]], read_changes(log, stream, Order, ReadOptions(**options))
    )


def by_place(log: Log, stream: str) -> list[StoredEvent[Order]]:
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
