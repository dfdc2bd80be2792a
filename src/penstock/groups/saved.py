"""What the log knows of a group: snapshots of its partitions, and the steps since then.

Each commit of a coordinator saves its step as progress, under the next of a ring of keys. When the
ring is full, the partitions that have changed are saved whole, and the ring begins again. So a
commit costs as much as happened since the last one, and not as much as there is.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.errors import LogFormatError
from penstock.groups.outcomes import (
    Bury,
    GroupStep,
    History,
    Redeliver,
    Settlement,
    add_reason,
)
from penstock.groups.slots import GroupPartition, PartitionWindow, Slot
from penstock.records.event import now_us

RING = 1024
"""How many steps there are at most behind a snapshot."""
VERSION = 1
VALUE_BYTES_MAX = 256 << 10
"""About how much is saved in one value."""
RANGES_MAX = 16_384
DELIVERY_BYTES = 48
RANGE_BYTES = 16


class SavedDelivery(msgspec.Struct, frozen=True, array_like=True):
    """A message that is not acknowledged and was, or may have been, handed out before.

    Of one that is to be handed out next, `deliveries` has that, too: it is saved before it happens.
    After a crash such a one is suspect.
    """

    offset: int
    deliveries: int
    first_us: int | None
    due_us: int
    reasons: tuple[str, ...] = ()
    is_reprieved: bool = False
    is_suspect: bool = True


class SavedChange(msgspec.Struct, frozen=True, array_like=True):
    """What a step has changed in a partition."""

    input: int
    partition: int
    done: tuple[int, ...]
    """What was acknowledged: in turns the distance to the next offset, and how many follow."""
    dispatched: int | None = None
    deliveries: tuple[SavedDelivery, ...] = ()


class SavedStep(msgspec.Struct, frozen=True, array_like=True):
    """What a commit has changed."""

    number: int
    changes: tuple[SavedChange, ...]

    @property
    def places(self) -> set[GroupPartition]:
        """Which partitions are concerned."""
        return {GroupPartition(change.input, change.partition) for change in self.changes}


class SavedPartition(msgspec.Struct, frozen=True, array_like=True):
    """Everything there is to know of a partition, before step `number`."""

    number: int
    done: tuple[int, ...]
    dispatched: int
    deliveries: tuple[SavedDelivery, ...]


class SavedClient(msgspec.Struct, frozen=True, array_like=True):
    """The latest transaction of a client that was committed."""

    number: int
    time_us: int


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group itself: what it reads."""

    inputs: tuple[tuple[str, int], ...]
    """Name and id of each stream."""
    created_us: int
    version: int = VERSION


class Clocks(NamedTuple):
    """One moment on the clock that only goes forward, and on the one that everybody has."""

    steady_s: float
    wall_us: int

    @classmethod
    def read(cls) -> Clocks:
        return cls(time.monotonic(), now_us())

    def to_us(self, steady_s: float) -> int:
        return self.wall_us + round((steady_s - self.steady_s) * 1e6)

    def to_s(self, wall_us: int) -> float:
        return self.steady_s + (wall_us - self.wall_us) / 1e6


class Ranges:
    """A set of numbers from 0 on, as ranges that do not touch each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        first = bisect_left(self.ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self.ends[last - 1])
        self._starts[first:last] = [start]
        self.ends[first:last] = [end]

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self.ends[index]

    def items(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self.ends, strict=True))

    @property
    def first_gap(self) -> int:
        """The first number that is not in it."""
        return self.ends[0] if self._starts and self._starts[0] == 0 else 0

    @property
    def end(self) -> int:
        """No number from here on is in it."""
        return self.ends[-1] if self.ends else 0


class UnreadPart(NamedTuple):
    """What is known of messages that a coordinator has not read yet."""

    done: Sequence[tuple[int, int]]
    deliveries: Sequence[SavedDelivery]
    dispatched: int


class KnownPartition:
    """What the log knows of a partition: a snapshot, and the steps behind it."""

    def __init__(self) -> None:
        self.number = 0
        self.done = Ranges()
        self.dispatched = 0
        self.deliveries: dict[int, SavedDelivery] = {}
        self.values = 0
        """How many values its snapshot has."""
        self.end = 0
        """Nothing is known from here on."""

    def take_snapshot(self, saved: SavedPartition) -> None:
        """One of the values of its snapshot."""
        self.number = saved.number
        self.dispatched = max(self.dispatched, saved.dispatched)
        self.values += 1
        self._add(saved.done, saved.deliveries)

    def take_step(self, number: int, change: SavedChange) -> None:
        if number >= self.number:
            self.dispatched = max(self.dispatched, change.dispatched or 0)
            self._add(change.done, change.deliveries)

    def _add(self, done: Iterable[int], deliveries: Iterable[SavedDelivery]) -> None:
        for start, end in unpack_ranges(done):
            self.done.add(start, end)
        self.deliveries.update((one.offset, one) for one in deliveries)
        offsets = (one.offset + 1 for one in deliveries)
        self.end = max(self.end, self.done.end, self.dispatched, *offsets)

    def pack(self, number: int) -> list[bytes]:
        """All of it, as it is before step `number`, where nothing of it was read yet."""
        at = self.done.first_gap
        return _pack_partition(number, [(0, at)], self.after(at), self.dispatched, [])

    def after(self, offset: int) -> UnreadPart:
        """What is known of a partition from an offset on, where nothing was read yet."""
        if offset >= self.end:
            return UnreadPart((), (), 0)
        done = [(max(start, offset), end) for start, end in self.done.items() if end > offset]
        deliveries = [one for one in self.deliveries.values() if one.offset >= offset]
        return UnreadPart(done, deliveries, self.dispatched)

    def history(self, offset: int, clocks: Clocks) -> History | None:
        """What is known of a message that is not acknowledged; `None` if it is new."""
        saved = self.deliveries.get(offset)
        if saved is not None:
            first_s = None if saved.first_us is None else clocks.to_s(saved.first_us)
            due_s = clocks.to_s(saved.due_us)
            return History(
                saved.deliveries,
                first_s,
                due_s,
                saved.reasons,
                is_reprieved=saved.is_reprieved,
                is_suspect=saved.is_suspect,
            )
        return History(1) if offset < self.dispatched else None


def pack_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """In order, small numbers: each range's distance from the one before it, and its length."""
    packed: list[int] = []
    at = 0
    for start, end in ranges:
        packed += (start - at, end - start)
        at = end
    return tuple(packed)


def unpack_ranges(packed: Iterable[int]) -> Iterable[tuple[int, int]]:
    at = 0
    numbers = iter(packed)
    for distance in numbers:
        start = at + distance
        at = start + next(numbers)
        yield start, at


# Saving


def to_saved_step(number: int, step: GroupStep, clocks: Clocks) -> SavedStep:
    """A step as it is saved. Notes on each slot what is saved of it."""
    done: dict[PartitionWindow, list[tuple[int, int]]] = {}
    deliveries: dict[PartitionWindow, list[SavedDelivery]] = {}
    dispatched: dict[PartitionWindow, int] = {}
    for slot, outcome in step.settled:
        window = slot.window
        if isinstance(outcome, Redeliver):
            due_us = clocks.to_us(clocks.steady_s + outcome.delay_s)
            reasons = add_reason(slot.reasons, outcome.reason)
            saved = _delivery(slot, slot.deliveries, due_us, reasons, clocks)
            slot.saved = msgspec.structs.replace(
                saved, is_reprieved=outcome.is_reprieve, is_suspect=False
            )
            deliveries.setdefault(window, []).append(slot.saved)
        elif window in done:
            done[window].append((slot.start, slot.end))
        else:
            done[window] = [(slot.start, slot.end)]
    for slot in step.armed:
        if slot.deliveries:
            due_us = clocks.to_us(slot.due_s)
            slot.saved = _delivery(slot, slot.deliveries + 1, due_us, slot.reasons, clocks)
            deliveries.setdefault(slot.window, []).append(slot.saved)
        else:
            dispatched[slot.window] = max(slot.end, dispatched.get(slot.window, 0))
    changes = tuple(
        SavedChange(
            *window.place,
            pack_ranges(_merge(done.get(window, []))),
            dispatched.get(window),
            tuple(deliveries.get(window, ())),
        )
        for window in sorted({*done, *deliveries, *dispatched}, key=lambda window: window.place)
    )
    return SavedStep(number, changes)


def _merge(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges that do not overlap, in order; those that touch each other as one."""
    ranges.sort()
    at, until = ranges[0] if ranges else (0, 0)
    for start, end in ranges:
        if start > until:
            yield at, until
            at = start
        until = end
    if until:
        yield at, until


def _delivery(
    slot: Slot,
    deliveries: int,
    due_us: int,
    reasons: tuple[str, ...],
    clocks: Clocks,
) -> SavedDelivery:
    first_us = None if slot.first_s is None else clocks.to_us(slot.first_s)
    return SavedDelivery(slot.offset, deliveries, first_us, due_us, reasons)


def cut_step(step: GroupStep, bytes_max: int, letters_max: int) -> Iterator[GroupStep]:
    """A step as several, none of which is too large to be saved. At least one, if it is empty."""
    has_failed = any(outcome is not None for _, outcome in step.settled)
    has_more = has_failed or any(slot.deliveries for slot in step.armed)
    if not has_more and len(step.settled) * RANGE_BYTES <= bytes_max:
        yield step  # mostly: messages are acknowledged, and new ones follow
        return
    settled: list[Settlement] = []
    armed: list[Slot] = []
    size = letters = 0
    every: list[Settlement | Slot] = [*step.settled, *step.armed]
    for one in every:
        cost, is_letter = _size_of(one), isinstance(one, Settlement) and _is_letter(one)
        if (settled or armed) and (size + cost > bytes_max or letters + is_letter > letters_max):
            yield GroupStep(settled, armed)
            settled, armed, size, letters = [], [], 0, 0
        size, letters = size + cost, letters + is_letter
        if isinstance(one, Settlement):
            settled.append(one)
        else:
            armed.append(one)
    yield GroupStep(settled, armed)


def _is_letter(settlement: Settlement) -> bool:
    return isinstance(settlement.outcome, Bury)


def _size_of(what: Settlement | Slot) -> int:
    """About how many bytes are saved of it."""
    if isinstance(what, Slot):
        return DELIVERY_BYTES + sum(len(reason.encode()) for reason in what.reasons)
    if not isinstance(what.outcome, Redeliver):
        return RANGE_BYTES
    reasons = add_reason(what.slot.reasons, what.outcome.reason)
    return DELIVERY_BYTES + sum(len(reason.encode()) for reason in reasons)


def pack_partition(number: int, window: PartitionWindow, unread: UnreadPart) -> list[bytes]:
    """A partition as it is before step `number`, in as many values as it takes."""
    deliveries = [s.saved for s in window.slots() if isinstance(s.saved, SavedDelivery)]
    return _pack_partition(number, _done(window), unread, window.dispatched, deliveries)


def pack_left(
    number: int, window: PartitionWindow, unread: UnreadPart, clocks: Clocks
) -> list[bytes]:
    """A partition as it is left before step `number`, with nothing handed out: nothing has to be
    counted ahead, so that what was not handed out does not count as if it had been.
    """
    deliveries = [
        msgspec.structs.replace(
            _delivery(slot, slot.deliveries, clocks.to_us(slot.due_s), slot.reasons, clocks),
            is_reprieved=slot.is_reprieved or slot.is_armed,
            is_suspect=slot.is_suspect,
        )
        for slot in window.slots()
        if slot.deliveries
    ]
    return _pack_partition(number, _done(window), unread, window.floor, deliveries)


def _done(window: PartitionWindow) -> list[tuple[int, int]]:
    return [(0, window.floor), *window.done_ranges()]


def _pack_partition(
    number: int,
    before: Sequence[tuple[int, int]],
    unread: UnreadPart,
    dispatched: int,
    deliveries: Sequence[SavedDelivery],
) -> list[bytes]:
    done = Ranges()
    for start, end in (*before, *unread.done):
        if start < end:
            done.add(start, end)
    every = sorted((*deliveries, *unread.deliveries), key=lambda one: one.offset)
    ranges, first = done.items(), True
    packed: list[bytes] = []
    while first or ranges or every:
        some = _take_bytes(every)
        saved = SavedPartition(
            number,
            pack_ranges(ranges[:RANGES_MAX]),
            max(dispatched, unread.dispatched),
            tuple(every[:some]),
        )
        packed.append(_encoder.encode(saved))
        ranges, every, first = ranges[RANGES_MAX:], every[some:], False
    return packed


def _take_bytes(deliveries: Sequence[SavedDelivery]) -> int:
    """How many of these fit into one value."""
    size = 0
    for count, one in enumerate(deliveries):
        size += DELIVERY_BYTES + sum(len(reason.encode()) for reason in one.reasons)
        if size > VALUE_BYTES_MAX and count:
            return count
    return len(deliveries)


# Loading


class GroupKeys:
    """Where a group's records are among the progress of a log."""

    def __init__(self, stream: str, name: str) -> None:
        self.prefix = f"group/{stream}/{name}/"
        self.group = f"{self.prefix}group"

    def step(self, number: int) -> str:
        return f"{self.prefix}step/{number % RING:04}"

    def client(self, name: str) -> str:
        return f"{self.prefix}client/{name}"

    def partition(self, place: GroupPartition, part: int = 0) -> str:
        more = f".{part}" if part else ""
        return f"{self.prefix}partition/{place.input}.{place.partition}{more}"

    def snapshot(
        self, place: GroupPartition, values: Sequence[bytes], before: int = 0
    ) -> dict[str, bytes | None]:
        """The values of a partition, in place of those that there were before."""
        found: dict[str, bytes | None] = {
            self.partition(place, part): None for part in range(len(values), before)
        }
        return found | {self.partition(place, part): one for part, one in enumerate(values)}


class KnownGroup(NamedTuple):
    """Everything that the log knows of a group."""

    group: SavedGroup | None
    partitions: dict[GroupPartition, KnownPartition]
    clients: dict[str, SavedClient]
    next_number: int


def unpack_group(keys: GroupKeys, items: Mapping[str, bytes]) -> KnownGroup:
    """Put together what is saved. Raises `LogFormatError` if a later version has saved it."""
    group: SavedGroup | None = None
    if found := items.get(keys.group):
        group = msgspec.json.decode(found, type=SavedGroup)
        if group.version > VERSION:
            raise LogFormatError(
                f"{keys.prefix.rstrip('/')} was saved by a later version of Penstock: use that one"
            )
    partitions: dict[GroupPartition, KnownPartition] = {}
    clients: dict[str, SavedClient] = {}
    steps: list[SavedStep] = []
    for key, value in items.items():
        kind, _, rest = key.removeprefix(keys.prefix).partition("/")
        if kind == "partition":
            place = GroupPartition(*map(int, rest.split(".")[:2]))
            known = partitions.setdefault(place, KnownPartition())
            known.take_snapshot(_partitions.decode(value))
        elif kind == "step":
            steps.append(_steps.decode(value))
        elif kind == "client":
            clients[rest] = _clients.decode(value)
    for step in sorted(steps, key=lambda step: step.number):
        for change in step.changes:
            place = GroupPartition(change.input, change.partition)
            partitions.setdefault(place, KnownPartition()).take_step(step.number, change)
    number = 1 + max((step.number for step in steps), default=-1)
    return KnownGroup(group, partitions, clients, number)


def pack_step(step: SavedStep) -> bytes:
    return _encoder.encode(step)


def pack_client(client: SavedClient) -> bytes:
    return _encoder.encode(client)


def unpack_client(packed: bytes) -> SavedClient:
    return _clients.decode(packed)


_encoder = msgspec.msgpack.Encoder()
_steps = msgspec.msgpack.Decoder(SavedStep)
_clients = msgspec.msgpack.Decoder(SavedClient)
_partitions = msgspec.msgpack.Decoder(SavedPartition)
