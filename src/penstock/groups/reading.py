"""Reading ahead of a group: events of its streams become messages that wait to be handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from threading import Lock

from penstock.errors import DamagedError, OffsetGoneError, UnknownObjectError
from penstock.groups.saved import Clocks, KnownPartition, UnreadPart, pack_partition
from penstock.groups.slots import GroupPartition, Slot
from penstock.groups.state import GroupState
from penstock.log.api import Count, Log, Offsets
from penstock.log.batch import Batch
from penstock.log.declaring.objects import Stream
from penstock.log.reading.merge import Read, in_commit_order
from penstock.log.reading.read import read_past
from penstock.records.event import StoredEvent
from penstock.records.schema import Record

CHUNK_ROWS = 1024
BUFFER_BYTES_MAX = 64 << 20
"""How much of what waits is in memory; what is let go is read again when it is handed out."""


class Chunk:
    """Events that were read together. They are made one by one only when one is handed out."""

    __slots__ = ("_batch", "_events", "_is_uneven", "_lock", "left", "nbytes")

    def __init__(self, batch: Batch) -> None:
        self._batch: Batch | None = batch
        self._events: list[StoredEvent[object]] | None = None
        self._is_uneven = False
        """Whether one of them cannot be made: there are others' messages on Kafka."""
        self._lock = Lock()
        """Members come for events of one chunk at once, and one makes them for all."""
        self.left = 0
        """How many of them are not acknowledged."""
        self.nbytes = batch.nbytes

    def event(self, row: int, record: type[Record] | None) -> StoredEvent[object] | None:
        """`None` if it was let go."""
        events = self._events
        if events is None:
            with self._lock:
                batch = self._batch
                if self._events is None and batch is not None:
                    if self._is_uneven:
                        return _event_at(batch, row, record)
                    try:
                        self._events = list(batch.events(record))
                    except Exception:  # of which one, is found by making them one by one
                        self._is_uneven = True
                        return _event_at(batch, row, record)
                events = self._events
        return None if events is None else events[row]

    def let_go(self) -> None:
        self._batch = self._events = None


def _event_at(batch: Batch, row: int, record: type[Record] | None) -> StoredEvent[object]:
    offset = batch.offset_of(row)
    return next(batch.slice_offsets(offset, offset + 1).events(record))


class Chunks:
    """What was read and is not acknowledged, the oldest first; only so much stays in memory."""

    def __init__(self, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Chunk, None] = OrderedDict()
        self._bytes = 0

    def add(self, chunk: Chunk) -> None:
        self._kept[chunk] = None
        self._bytes += chunk.nbytes
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            oldest, _ = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
            oldest.let_go()

    def finish(self, slot: Slot) -> None:
        chunk = slot.payload
        if isinstance(chunk, Chunk):
            chunk.left -= 1
            if not chunk.left and chunk in self._kept:
                del self._kept[chunk]
                self._bytes -= chunk.nbytes


class GroupReader:
    """Reads a group's streams, each partition up to its bound, and adds what is there as messages.

    One thread reads; `lock` guards the state.
    """

    def __init__(
        self,
        log: Log,
        inputs: Mapping[int, Stream],
        state: GroupState,
        known: Mapping[GroupPartition, KnownPartition],
        *,
        lock: Lock,
        record: type[Record] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.log = log
        self._record = record
        self._inputs = dict(inputs)
        self._state = state
        self._known = dict(known)
        self._lock = lock
        self._tell = tell
        self._clocks = Clocks.read()
        self.chunks = Chunks()

    def read_round(self) -> bool:
        """Read everything there is and room for; whether anything was added."""
        has_added = False
        for number, stream in list(self._inputs.items()):
            ends = self._look(number, stream)
            for partitions, batches in self._sources(number, self._inputs[number], ends):
                has_added |= self._read_some(number, partitions, batches)
        return has_added

    def _read_some(
        self, number: int, partitions: Mapping[int, int], batches: Iterator[Batch]
    ) -> bool:
        """Read until a partition is full, or all of them are read up to their ends."""
        has_added = False
        for batch in batches:
            added, is_full = self._admit(number, batch)
            has_added |= added > 0
            if is_full:
                return has_added
        with self._lock:
            for partition, end in partitions.items():  # there may be no event just before it
                self._state.skip(GroupPartition(number, partition), end)
        return has_added

    def has_input(self, number: int) -> bool:
        return number in self._inputs

    def add_input(self, number: int, stream: Stream) -> None:
        """Read another stream, too, from now on."""
        self._inputs[number] = stream

    def stream_of(self, slot: Slot) -> str:
        """The stream that a message is an event of."""
        return str(self._inputs[slot.place.input].name)

    def unread(self, place: GroupPartition) -> UnreadPart:
        """What is known of what was not read yet. The lock is held."""
        return self._known[place].after(self._state.windows[place].head)

    def pack(self, place: GroupPartition, number: int) -> list[bytes]:
        """A partition as it is before step `number`, to be saved. The lock is held."""
        window = self._state.windows.get(place)
        if window is None:
            return self._known[place].pack(number)
        return pack_partition(number, window, self.unread(place))

    def places(self) -> dict[str, dict[int, int]]:
        """What to wait for: where reading goes on, of the partitions that have room."""
        with self._lock:
            return {
                str(stream.name): {
                    place.partition: window.head
                    for place, window in self._state.windows.items()
                    if place.input == number and self._state.room(place)
                }
                for number, stream in self._inputs.items()
            }

    def _look(self, number: int, stream: Stream) -> dict[int, Offsets]:
        """Where the partitions end now. New ones are opened; it must be the same stream still."""
        name = str(stream.name)
        ends = self.log.offsets(name)  # before: keys may be in the partitions that it has by then
        now = self.log.stream(name)
        if now.id != stream.id:
            raise UnknownObjectError(
                f"stream {name} was dropped and created again, and the group belongs to the old "
                "one: drop the group and create it again"
            )
        self._inputs[number] = now  # it may have grown
        with self._lock:
            for partition in ends:
                place = GroupPartition(number, partition)
                if place not in self._state.windows:
                    known = self._known.setdefault(place, KnownPartition())
                    self._state.open(place, known.done.first_gap, known.dispatched)
        for partition, found in ends.items():
            self._check_kept(GroupPartition(number, partition), name, found.first)
        return ends

    def _check_kept(self, place: GroupPartition, name: str, first: int) -> None:
        """Go on behind what retention has removed, and say so."""
        with self._lock:
            head = self._state.windows[place].head
            self._state.skip(place, first)
        if 0 < head < first:
            self._tell(
                f"retention has removed events {head} to {first - 1} of {name}/{place.partition} "
                "before the group has seen them: they will not be handed out"
            )

    def _sources(
        self, number: int, stream: Stream, ends: Mapping[int, Offsets]
    ) -> Iterator[tuple[dict[int, int], Iterator[Batch]]]:
        """What to read, and up to where: in the order of commits where messages of several
        partitions have one, otherwise each partition for itself.
        """
        name, order = str(stream.name), self._state.rules.order
        readers: dict[int, tuple[int, Read]] = {}
        with self._lock:
            heads = {p: self._state.windows[GroupPartition(number, p)].head for p in ends}
        for partition, found in ends.items():
            if heads[partition] < found.next:
                readers[partition] = (heads[partition], self._reader(name, partition, found.next))
        if order == "stream" or (order == "key" and not stream.keeps_keys_together):
            yield {p: ends[p].next for p in readers}, in_commit_order(readers)
            return
        for partition, (start, read) in readers.items():
            yield {partition: ends[partition].next}, read(start)

    def _reader(self, name: str, partition: int, end: int) -> Read:
        def note(damage: DamagedError) -> None:
            self._tell(f"{damage}: the group goes on behind it")

        return lambda start: read_past(self.log, name, partition, start, end, note)

    def _admit(self, number: int, batch: Batch) -> tuple[int, bool]:
        """Add messages of a batch: how many, and whether there was too little room for the rest."""
        place = GroupPartition(number, batch.partition)
        known = self._known[place]
        offsets, keys = batch.offsets().to_pylist(), batch.keys().to_pylist()
        ends = [*offsets[1:], batch.next_offset]
        added = 0
        for first in range(0, len(offsets), CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, len(offsets))
            chunk = Chunk(batch.slice_offsets(offsets[first], ends[last - 1]))
            with self._lock:
                now_s, room = Clocks.read().steady_s, self._state.room(place)
                for row in range(first, last):
                    offset = offsets[row]
                    is_known = offset < known.end
                    if is_known and offset in known.done:
                        self._state.skip(place, ends[row])
                        continue
                    if chunk.left == room:
                        self._keep(chunk)
                        return added, True
                    history = known.history(offset, self._clocks) if is_known else None
                    slot = self._state.add(place, offset, ends[row], keys[row], now_s, history)
                    slot.payload, slot.row = chunk, row - first
                    slot.saved = known.deliveries.get(offset) if is_known else None
                    chunk.left += 1
                    added += 1
                self._keep(chunk)
        return added, False

    def _keep(self, chunk: Chunk) -> None:
        if chunk.left:
            self.chunks.add(chunk)

    def lag(self) -> Count:
        """How many messages are not acknowledged, those that were not read yet included."""
        found = Count()
        for number, stream in list(self._inputs.items()):
            name = str(stream.name)
            for partition, offsets in self.log.offsets(name).items():
                with self._lock:
                    window = self._state.windows.get(GroupPartition(number, partition))
                    head, size = (window.head, window.size) if window else (0, 0)
                head = max(head, offsets.first)
                waiting = self.log.count(name, partition, head, offsets.next)
                found += Count(size) + (waiting if head < offsets.next else Count())
        return found

    def event(self, slot: Slot) -> StoredEvent[object]:
        """The event of a message, read again if it was let go.

        Raises `OffsetGoneError` or `DamagedError` if it is not there any more, and whatever making
        a record of it does.
        """
        chunk = slot.payload
        found = chunk.event(slot.row, self._record) if isinstance(chunk, Chunk) else None
        if found is not None:
            return found
        return self._read_again(slot, self._record)

    def stored_event(self, slot: Slot) -> StoredEvent[object]:
        """The event of a message, whatever the group's record is; raises as `event` does."""
        return self._read_again(slot, None)

    def _read_again(self, slot: Slot, record: type[Record] | None) -> StoredEvent[object]:
        name, partition = self.stream_of(slot), slot.place.partition
        for batch in self.log.read(name, partition, slot.offset, slot.offset + 1):
            return next(batch.events(record))
        gone = f"{name}/{partition} has no event {slot.offset} any more"
        raise OffsetGoneError(gone, slot.offset + 1)
