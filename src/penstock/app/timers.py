"""The timers of a query while it runs: which are due, and when the next one is."""

from __future__ import annotations

import heapq


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
