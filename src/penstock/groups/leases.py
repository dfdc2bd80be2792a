"""Messages that members have, and when they have them no longer."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

from penstock.groups.slots import SPARE, Slot


class Leases:
    """Leases by their numbers. What it holds does not grow with the leases that have ended."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._slots: dict[int, Slot] = {}
        self._usual: OrderedDict[int, None] = OrderedDict()
        """Those that last as long as most do: the first one ends first."""
        self._others: list[tuple[float, int]] = []
        """When the others end: a heap, with some that have ended already, or last longer."""

    def __contains__(self, lease: int) -> bool:
        return lease in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, lease: int) -> Slot | None:
        return self._slots.get(lease)

    def add(self, slot: Slot, now_s: float) -> None:
        """A member has it from now on."""
        slot.deadline_s = now_s + self._lease_s
        self._slots[slot.lease] = slot
        self._usual[slot.lease] = None

    def extend(self, slot: Slot, now_s: float, lease_s: float | None) -> None:
        """A member has it for longer, or less long, from now on."""
        self._usual.pop(slot.lease, None)
        if lease_s is None:
            self.add(slot, now_s)
        else:
            slot.deadline_s = now_s + lease_s
            heapq.heappush(self._others, (slot.deadline_s, slot.lease))
            if len(self._others) > 2 * len(self._slots) + SPARE:
                self._others = [entry for entry in self._others if self._is_current(entry)]
                heapq.heapify(self._others)

    def remove(self, slot: Slot) -> None:
        del self._slots[slot.lease]
        self._usual.pop(slot.lease, None)

    def find_late(self, now_s: float) -> list[int]:
        """Those that are over; each is found once."""
        late: list[int] = []
        while self._usual and self._first_usual_s() <= now_s:
            late.append(self._usual.popitem(last=False)[0])
        while self._others and self._others[0][0] <= now_s:
            entry = heapq.heappop(self._others)
            if self._is_current(entry):
                late.append(entry[1])
        return late

    def _is_current(self, entry: tuple[float, int]) -> bool:
        slot = self._slots.get(entry[1])
        return slot is not None and slot.deadline_s == entry[0]

    def next_s(self) -> float:
        """When the next one may be over."""
        usual_s = self._first_usual_s() if self._usual else math.inf
        return min(usual_s, self._others[0][0]) if self._others else usual_s

    def _first_usual_s(self) -> float:
        return self._slots[next(iter(self._usual))].deadline_s
