"""Messages of a group that are not acknowledged yet, and the lanes in which they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

SPARE = 64
SlotState = Literal["waiting", "leased", "settling", "done"]


class GroupPartition(NamedTuple):
    """A partition of one of the group's inputs: 0 is its stream; the stream of letters that were
    replayed to it has its id as the number, so that one made anew is another input.
    """

    input: int
    partition: int


class Slot(msgspec.Struct, eq=False):
    """A message that is not acknowledged.

    From `start` up to before `end` there is no other: so neighbours meet, whatever gaps are
    between their offsets. `deliveries` is how often it was handed out, or may have been before a
    crash. `is_armed` says that the log counts one more already.
    """

    window: PartitionWindow
    start: int
    offset: int
    end: int
    lane: Lane
    after: Slot | None = None
    """The next one of its lane."""
    state: SlotState = "waiting"
    deliveries: int = 0
    is_armed: bool = False
    is_reprieved: bool = False
    """Whether the breaker gives it one more try than others have."""
    is_suspect: bool = False
    """Whether it was handed out before a crash, and may have been the cause."""
    trial: int | None = None
    """Armed to be handed out next: of those that were so often before."""
    reasons: tuple[str, ...] = ()
    """Why it failed, the last few times."""
    due_s: float = 0.0
    first_s: float | None = None
    lease: int = 0
    member: str = ""
    deadline_s: float = 0.0
    payload: object = None
    """Where the event itself is, with `row`: the business of whoever adds it."""
    row: int = 0
    saved: object = None
    """What is saved of it, beyond that it is not acknowledged: the business of who saves."""

    @property
    def place(self) -> GroupPartition:
        return self.window.place

    def __repr__(self) -> str:
        where = f"{self.place.input}/{self.place.partition}:{self.offset}"
        return f"<Slot {where} {self.state} {self.deliveries}>"


class Lane:
    """Messages that are handed out one after the other: those of a key, or of a partition."""

    __slots__ = ("first", "in_flight", "is_offered", "key", "last", "size")

    def __init__(self, key: object) -> None:
        self.key = key
        self.first: Slot | None = None
        self.last: Slot | None = None
        self.size = 0
        self.in_flight = 0
        """How many are handed out, or on their way to the log."""
        self.is_offered = False
        """Whether its first message waits to be taken, to be armed, or for its time."""

    def add(self, slot: Slot) -> None:
        if self.last is None:
            self.first = slot
        else:
            self.last.after = slot
        self.last = slot
        self.size += 1

    def drop_done(self) -> None:
        """Let go of the first messages that are done."""
        while self.first is not None and self.first.state == "done":
            self.first = self.first.after
            self.size -= 1
        if self.first is None:
            self.last = None

    def __iter__(self) -> Iterator[Slot]:
        slot = self.first
        while slot is not None:
            yield slot
            slot = slot.after


class PartitionWindow:
    """One partition: what is not acknowledged between its `floor` and its `head`."""

    __slots__ = ("_order", "dispatched", "head", "place", "size")

    def __init__(self, place: GroupPartition, head: int, dispatched: int) -> None:
        self.place = place
        self.head = head
        """Where reading goes on."""
        self.dispatched = dispatched
        """Up to here messages may have been handed out, as the log knows."""
        self.size = 0
        """How many are not acknowledged."""
        self._order: deque[Slot] = deque()

    @property
    def floor(self) -> int:
        """Everything below is acknowledged."""
        order = self._order
        while order and order[0].state == "done":
            order.popleft()
        return order[0].start if order else self.head

    def add(self, slot: Slot) -> None:
        self._order.append(slot)
        self.size += 1
        self.head = slot.end

    def finish(self, slot: Slot) -> None:
        """The message is acknowledged. What follows a slow one does not pile up behind it."""
        slot.state = "done"
        self.size -= 1
        if len(self._order) > 2 * self.size + SPARE:
            self._order = deque(self.slots())

    def done_ranges(self) -> list[tuple[int, int]]:
        """What is acknowledged between floor and head, in order."""
        found: list[tuple[int, int]] = []
        at = self.floor
        for slot in self._order:
            if slot.state == "done":
                continue
            if slot.start > at:
                found.append((at, slot.start))
            at = slot.end
        if self.head > at:
            found.append((at, self.head))
        return found

    def slots(self) -> list[Slot]:
        """What is not acknowledged, in order."""
        return [slot for slot in self._order if slot.state != "done"]
