"""The timers of a query while it runs: which are due, and when the next one is.

A timer's name begins with what it is for: a call of the agent's function, due by the clock, or
a window that expires, due by the clock or by the time of events.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from penstock.log.api import Offsets

EXPIRY = b"x"
TIMER = b"t"
Times = Mapping[str, Mapping[int, int]]
"""The latest time of an event that was seen, in microseconds, by stream and partition."""


class Timers:
    """When each is due, by name. Setting one and asking for the next take little, however many.

    One that was set again or removed stays in the heap until it comes up.
    """

    def __init__(self) -> None:
        self._due: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def set(self, name: bytes, due_us: int | None) -> None:
        """`None` removes it."""
        if due_us is None:
            self._due.pop(name, None)
        elif self._due.get(name) != due_us:
            self._due[name] = due_us
            heapq.heappush(self._heap, (due_us, name))
        if len(self._heap) > 2 * len(self._due) + 1000:
            self._heap = [(due_us, name) for name, due_us in self._due.items()]
            heapq.heapify(self._heap)

    def next_us(self) -> int | None:
        """When the next one is due."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_us: int, most: int) -> list[tuple[bytes, int]]:
        """Those that are due, earliest first; they stay until they are set anew."""
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
    """How far the events of some streams have come in their own time; `None` if nobody knows.

    Of partitions that have more to read, the one that is furthest behind counts, so that in a
    backfill, or after a long outage, nothing is over before its events were read. Where
    everything was read, the newest event counts.
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
