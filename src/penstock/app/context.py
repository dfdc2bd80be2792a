"""What an agent may ask for beside its event: clock, ids, timers, acknowledgement, tables."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import xxhash

from penstock.app.windows import Duration, duration_us
from penstock.errors import UsageError
from penstock.records.event import Event, Key

V = TypeVar("V")
UNSET = object()


class TableView(Generic[V]):
    """A table that an agent may read but not write, all of one moment: that of the batch."""

    def __init__(self, get: Callable[[Key], V | None]) -> None:
        self._get = get

    def get(self, key: Key) -> V | None:
        return self._get(key)


class Context:
    """What goes with the event that an agent is called for.

    `now` is the clock's time when the batch began, and the same for all its events. `uuid()`
    depends on the event alone, so that a repeated call gives the same.
    """

    def __init__(self, event: Event[object], now: dt.datetime, key: Key | None = None) -> None:
        self.event = event
        self.now = now
        self.key = key
        self.timer_us: object = UNSET
        self.acknowledged: set[tuple[int, int]] = set()
        self._uuids = 0

    def uuid(self) -> uuid.UUID:
        self._uuids += 1
        digest = xxhash.xxh3_128_digest(f"{self.event.id}\0uuid\0{self._uuids}".encode())
        return uuid.UUID(bytes=digest, version=4)

    def ack(self, event: Event[object] | None = None) -> None:
        """Say that an event is done with, for agents with `ack="manual"`.

        What is not acknowledged comes again, after newer events of its key perhaps.
        """
        done = self.event if event is None else event
        self.acknowledged.add((done.partition, done.offset))

    def set_timer(self, at: dt.datetime | None = None, *, after: Duration | None = None) -> None:
        """Have the agent's timer function called for this key; replaces an earlier timer."""
        if (at is None) == (after is None):
            raise UsageError("a timer is set either at a time or after a while: give one of both")
        if after is not None:
            length = dt.timedelta(microseconds=duration_us(after, "the timer"))
            self.timer_us = self.now + length
        else:
            self.timer_us = cast(dt.datetime, at)

    def cancel_timer(self) -> None:
        self.timer_us = None
