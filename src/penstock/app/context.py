"""What an agent may ask for beside its event: clock, ids, timers, acknowledgement, tables."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Sequence
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
    depends on the event and the agent alone, so that a repeated call gives the same.

    In a test, `Context()` is all an agent needs; give it an event, a time or a key to have more.
    """

    def __init__(
        self,
        event: Event[object] | None = None,
        now: dt.datetime | None = None,
        key: Key | None = None,
        *,
        agent: str = "",
        given: Sequence[Event[object]] = (),
    ) -> None:
        self.now = now or dt.datetime.now(dt.UTC)
        self.event = event or Event(data=None, id="test", type="test", source="", time=self.now)
        self.key = key
        self.timer_us: object = UNSET
        self.acknowledged: set[tuple[int, int]] = set()
        self._given = {(e.partition, e.offset) for e in (self.event, *given)}
        self._agent = agent
        self._uuids = 0

    def uuid(self) -> uuid.UUID:
        self._uuids += 1
        seed = f"{self._agent}\0{self.event.id}\0uuid\0{self._uuids}"
        return uuid.UUID(bytes=xxhash.xxh3_128_digest(seed.encode()), version=4)

    def ack(self, event: Event[object] | None = None) -> None:
        """Say that an event is done with, for agents with `ack="manual"`.

        What is not acknowledged comes again, after newer events of its key perhaps. Only events
        of this very call can be acknowledged: an earlier one is given anew until then.
        """
        done = self.event if event is None else event
        place = (done.partition, done.offset)
        if place not in self._given:
            raise UsageError(
                f"the event at partition {done.partition}, offset {done.offset} was not given to "
                "this call: acknowledge it in the call that it is given to"
            )
        self.acknowledged.add(place)

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
