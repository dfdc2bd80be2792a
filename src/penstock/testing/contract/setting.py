"""What the tests of the contract share: a record, a harness, and short ways to say things."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol, cast

import pytest

from penstock.log.api import Commit, Committed, Holder, Log, Part
from penstock.log.compose import Composer, EventOptions
from penstock.log.objects import (
    CreateStream,
    declare,
)
from penstock.log.read import ReadOptions, read_changes
from penstock.records.event import Event, ids_of
from penstock.records.schema import Record


class Order(Record):
    user: str
    amount: int
    note: str | None = None


class Harness(Protocol):
    """Gives access to one log of the engine under test."""

    @property
    def url(self) -> str:
        """How other processes open it."""

    def open(self, **options: str | int | bool) -> Log:
        """Another handle on the same log; the first one makes it."""


class OnEngine:
    """Tests of one engine: a subclass gives the `harness`."""

    engine: ClassVar[str] = "any"
    moments_s: ClassVar[float] = 0.0
    """How long a commit may take to show in all its partitions; promise 2 says where it may."""
    producers_kept_us: ClassVar[str] = ""
    """The constant that says how long an ephemeral producer is remembered, by its full name."""

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


def commit(
    log: Log, producer: str, sequence: int, stream: str, amounts: Iterable[int]
) -> Committed:
    return commit_as(log, log.hold(producer), sequence, stream, amounts)


def orders(log: Log, stream: str, **options: Any) -> Iterator[Event[Order]]:
    """The stream's orders; of a table's changelog too, where data may be `None`."""
    return cast(Iterator[Event[Order]], read_changes(log, stream, Order, ReadOptions(**options)))


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
