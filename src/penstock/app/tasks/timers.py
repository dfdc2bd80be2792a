"""The timers of a query while it runs: which are due, and when the next one is.

A timer is a call of one of the agent's functions, due by the clock, or a window that expires, due
by the clock or by the time of events.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from penstock.app.declaring.context import DEFAULT_TIMER
from penstock.log.api import Offsets

_EXPIRY, _CALL, _NAMED_CALL = b"x", b"t", b"n"
Times = Mapping[str, Mapping[int, int]]
"""The latest time of an event that was seen, in microseconds, by stream and partition."""


class TimerKey(NamedTuple):
    """Identifies a timer: by name and key, or without a name, a window that expires.

    For a window, `key` is the key of its entry: the key of the events followed by the start of
    the window.
    """

    key: bytes
    name: str | None = DEFAULT_TIMER

    @property
    def own_key(self) -> bytes:
        """The key of the events that the timer belongs to."""
        return self.key.rpartition(b"@")[0] if self.name is None else self.key

    def pack(self) -> bytes:
        """The key of its entry in the agent's table of timers."""
        if self.name is None:
            return _EXPIRY + self.key
        if self.name == DEFAULT_TIMER:
            return _CALL + self.key
        return _NAMED_CALL + self.name.encode() + b"\0" + self.key


def unpack_timer(packed: bytes) -> TimerKey:
    kind, rest = packed[:1], packed[1:]
    if kind == _EXPIRY:
        return TimerKey(rest, None)
    if kind == _CALL:
        return TimerKey(rest)
    name, _, key = rest.partition(b"\0")
    return TimerKey(key, name.decode())


class Timers:
    """When each timer is due, by name. Setting one and finding the next are cheap for any number.

    The old entry of a timer that was set again or removed stays in the heap until it is reached.
    """

    def __init__(self) -> None:
        self._due: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def set(self, name: bytes, due_us: int | None) -> None:
        """Set when a timer is due; `None` removes it."""
        if due_us is None:
            self._due.pop(name, None)
        elif self._due.get(name) != due_us:
            self._due[name] = due_us
            heapq.heappush(self._heap, (due_us, name))
        if len(self._heap) > 2 * len(self._due) + 1000:
            self._heap = [(due_us, name) for name, due_us in self._due.items()]
            heapq.heapify(self._heap)

    def next_us(self) -> int | None:
        """When the next timer is due."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_us: int, most: int) -> list[tuple[bytes, int]]:
        """The timers that are due, earliest first; they stay until they are set again."""
        found: list[tuple[bytes, int]] = []
        while len(found) < most and (at := self.next_us()) is not None and at <= now_us:
            due_us, name = heapq.heappop(self._heap)
            # One that was removed and set to the same time again is in the heap twice.
            if not found or found[-1] != (name, due_us):
                found.append((name, due_us))
        for name, due_us in found:
            heapq.heappush(self._heap, (due_us, name))
        return found


def event_clock(times: Times, ends: Mapping[str, Mapping[int, Offsets]], at: Times) -> int | None:
    """The event time that these streams have reached; `None` if it is unknown.

    Among partitions with more to read, the one furthest behind counts, so that in a backfill, or
    after a long outage, no window expires before its events were read. If everything was read, the
    newest event counts.
    """
    behind: list[int | None] = []
    seen: list[int] = []
    for name, partitions in ends.items():
        for partition, offsets in partitions.items():
            time_us = times.get(name, {}).get(partition)
            if offsets.next > max(at.get(name, {}).get(partition, 0), offsets.first):
                behind.append(time_us)
            elif time_us is not None:
                seen.append(time_us)
    if None in behind:
        return None
    known = [time_us for time_us in behind if time_us is not None]
    return min(known) if known else max(seen, default=None)
