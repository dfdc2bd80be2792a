"""What an agent can use besides its event: clock, ids, timers, acknowledgement, tables."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import xxhash

from penstock.app.declaring.windows import Duration, duration_us
from penstock.errors import UsageError
from penstock.records.event import Event, Key

V = TypeVar("V")
DEFAULT_TIMER = "timer"
"""The name of a timer that was set without one."""
TIMER_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\Z")


def check_timer_name(name: str) -> None:
    if not TIMER_NAME.match(name):
        raise UsageError(f"invalid timer name {name!r}: use 1 to 100 letters, digits, _ and -")


class TableView(Generic[V]):
    """A table that an agent may read but not write, as of one moment: that of the batch."""

    def __init__(self, get: Callable[[Key], V | None]) -> None:
        self._get = get

    def get(self, key: Key) -> V | None:
        return self._get(key)


class Context:
    """The context of the event that an agent is called for.

    `now` is the clock time when the batch began, the same for all its events. `uuid()` depends
    only on the event and the agent, so that a repeated call yields the same ids.

    In a test, `Context()` is usually enough; it can be given an event, a time and a key.
    """

    def __init__(
        self,
        event: Event[object] | None = None,
        now: dt.datetime | None = None,
        key: Key | None = None,
        *,
        agent: str = "",
        given: Sequence[Event[object]] = (),
        origin: str | None = None,
    ) -> None:
        self.now = now or dt.datetime.now(dt.UTC)
        self.event = event or Event(data=None, id="test", type="test", source="", time=self.now)
        self.key = key
        self.timers: dict[str, dt.datetime | None] = {}
        """The timers that were set, or cancelled (`None`), by name."""
        self.acknowledged: set[int] = set()
        """The indexes of the given events that were acknowledged."""
        self._given = tuple(given) or (self.event,)
        self._seed = f"{agent}\0{self.event.id if origin is None else origin}\0uuid"
        self._uuids = 0

    def uuid(self) -> uuid.UUID:
        self._uuids += 1
        seed = f"{self._seed}\0{self._uuids}"
        return uuid.UUID(bytes=xxhash.xxh3_128_digest(seed.encode()), version=4)

    def ack(self, event: Event[object] | None = None) -> None:
        """Acknowledge an event, in an agent with `ack="manual"`.

        An event that is not acknowledged is delivered again, possibly after newer events of its
        key. Only the events of the current call can be acknowledged; one of an earlier call is
        delivered again until a call acknowledges it.
        """
        done = self.event if event is None else event
        places = [n for n, given in enumerate(self._given) if given is done]
        places = places or [n for n, given in enumerate(self._given) if given == done]
        if not places:
            raise UsageError(
                f"event {done.id} was not passed to this call: acknowledge it in the "
                "call that receives it"
            )
        self.acknowledged.add(places[0])

    def set_timer(
        self,
        at: dt.datetime | None = None,
        *,
        after: Duration | None = None,
        name: str = DEFAULT_TIMER,
    ) -> None:
        """Set a timer for this key: the agent's timer function of that name is called `at` a time,
        or `after` a delay.

        Replaces an earlier timer of this key and name.
        """
        check_timer_name(name)
        if after is not None and at is None:
            length = dt.timedelta(microseconds=duration_us(after, "the timer"))
            self.timers[name] = self.now + length
        elif at is not None and after is None:
            self.timers[name] = at
        else:
            raise UsageError("set_timer takes either at or after: give exactly one of them")

    def cancel_timer(self, name: str = DEFAULT_TIMER) -> None:
        check_timer_name(name)
        self.timers[name] = None
