"""The timers of a query's definitions: which are due by the clock, and which by the time of
events."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from penstock.app.declaring.definitions import Agent, Definition
from penstock.app.running.positions import BatchPosition
from penstock.app.tasks.task import DueTimer, Outcome
from penstock.app.tasks.timers import Timers, event_clock, unpack_timer
from penstock.errors import UnknownObjectError
from penstock.log.api import Log


class DueTimers:
    """Which timers of a query are due. The log holds them; this keeps up with the changes that
    batches make."""

    def __init__(self, definitions: Sequence[Definition]) -> None:
        self._agents = [d for d in definitions if isinstance(d, Agent) and d.keeps_timers]
        self._by_events = any(agent.expires_by_events for agent in self._agents)
        self._timers = Timers()
        self._expiries = Timers()
        """When windows expire that expire by the time of events."""
        self._event_us: int | None = None

    def load(self, log: Log) -> None:
        """Reload all timers from the log."""
        self._timers, self._expiries = Timers(), Timers()
        for agent in self._agents:
            if agent.timers is None:
                continue
            with contextlib.suppress(UnknownObjectError):  # the agent has never set a timer
                for entries in log.snapshot(agent.timers.name):
                    for entry in entries:
                        self._set(entry.key, msgspec.msgpack.decode(entry.value)["value"])

    def follow(self, outcomes: Sequence[Outcome]) -> None:
        """Apply the changes of a committed batch."""
        for outcome in outcomes:
            for timer, due_us in outcome.timers:
                self._set(timer, due_us)

    def _set(self, timer: bytes, due_us: int | None) -> None:
        by_events = self._by_events and unpack_timer(timer).name is None
        (self._expiries if by_events else self._timers).set(timer, due_us)

    def look_at_events(self, log: Log, inputs: Sequence[str], position: BatchPosition) -> None:
        """Advance the time of events, if windows expire by it."""
        if self._by_events:
            ends = {name: log.offsets(name) for name in inputs}
            self._event_us = event_clock(position.times, ends, position.next)

    def next_us(self) -> int | None:
        """When the next timer is due by the clock."""
        return self._timers.next_us()

    def has_due(self, now_us: int) -> bool:
        due_us = self._timers.next_us()
        if due_us is not None and due_us <= now_us:
            return True
        over_us = self._expiries.next_us()
        return over_us is not None and self._event_us is not None and over_us <= self._event_us

    def due(self, now_us: int, most: int) -> list[DueTimer]:
        found = self._timers.due(now_us, most)
        if self._event_us is not None:
            found += self._expiries.due(self._event_us, most)
        return [DueTimer(timer, due_us) for timer, due_us in found]
