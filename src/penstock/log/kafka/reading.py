"""Reading streams from Kafka: offsets, batches of events, and waiting for more.

Offsets have gaps: commit markers take offsets too, and so do aborted events. A range therefore
ends where Kafka says that it ends, or where an event beyond it begins, and never at the last
offset seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from penstock.errors import (
    ClosedError,
    DamagedError,
    LogUnreachableError,
    OffsetGoneError,
    UsageError,
)
from penstock.log.api import Limits, Offsets
from penstock.log.batch import Batch
from penstock.log.kafka.client import GONE, REFUSED, Cluster
from penstock.log.kafka.messages import decode, offset_of
from penstock.log.kafka.objects import KafkaStream

WAITING_MAX = 64
TAILS_MAX = 10_000
READ_POLL_S = 0.2
DRAIN_S = 0.02
QUIET_S = 1.0
"""After this long without a message, check whether the stream still exists."""
_READING = {
    "fetch.wait.max.ms": 5,
    "fetch.message.max.bytes": 4 << 20,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 64 << 10,
    "check.crcs": True,
}
_WAITING = {"fetch.wait.max.ms": 500, "queued.min.messages": 1, "fetch.message.max.bytes": 1}


class KafkaReader:
    """Reads committed events. Thread-safe."""

    def __init__(
        self, cluster: Cluster, limits: Limits, check_there: Callable[[KafkaStream], None]
    ) -> None:
        self._cluster = cluster
        self._check_there = check_there
        self._limits = limits
        self._waiting: dict[object, Consumer] = {}
        self._tails: dict[tuple[int, int], tuple[int, int]] = {}
        """For partitions, the end of the last event read, and up to where no event follows it.

        That range contains commit markers and aborted events.
        """
        self._lock = threading.Lock()
        self._closed = False

    # What is there

    def offsets(self, stream: KafkaStream) -> dict[int, Offsets]:
        places = self._places(stream)
        firsts = self._cluster.firsts(places)
        ends = self._cluster.ends(places, committed=True)
        return {
            place[1]: Offsets(firsts[place], max(ends[place], firsts[place])) for place in places
        }

    def _places(self, stream: KafkaStream) -> list[tuple[str, int]]:
        return [(stream.topic, partition) for partition in range(stream.partitions)]

    def offset_at(self, stream: KafkaStream, partition: int, time_us: int) -> int:
        place = (stream.topic, partition)
        found = self._cluster.offset_at(*place, -(-time_us // 1000))
        end = self._cluster.ends([place], committed=True)[place]
        return end if found is None else min(found, end)

    # Reading

    def read(
        self, stream: KafkaStream, partition: int, start: int, end: int | None
    ) -> Iterator[Batch]:
        place = (stream.topic, partition)
        if not 0 <= partition < stream.partitions:
            raise UsageError(
                f"stream {stream.name} has no partition {partition}: it has 0 to "
                f"{stream.partitions - 1}"
            )
        if end is not None and self._past_tail(stream, partition, start) >= end:
            return
        with self._cluster.watching(lambda: self._check_there(stream)):
            there = self._cluster.ends([place], committed=True)[place]
            first = self._cluster.firsts([place])[place]
        end = there if end is None else min(end, there)
        if start < first:
            raise gone(stream, partition, start, first)
        if start >= end:
            return
        reached = start
        with self._reading(stream, partition, start) as consumer:
            for messages in self._messages(consumer, stream, partition, end):
                for found in decode(stream, messages):
                    if isinstance(found, DamagedError):
                        raise found
                    yield found
                    reached = found.next_offset
        self._note_tail(stream, partition, reached, end)

    def _note_tail(self, stream: KafkaStream, partition: int, start: int, end: int) -> None:
        with self._lock:
            if end >= self._tails.get((stream.id, partition), (0, 0))[1]:
                self._tails[stream.id, partition] = (start, end)
            if len(self._tails) > TAILS_MAX:
                del self._tails[next(iter(self._tails))]

    def _past_tail(self, stream: KafkaStream, partition: int, offset: int) -> int:
        """The offset, or a later one if there are no events in between."""
        start, end = self._tails.get((stream.id, partition), (0, 0))
        return end if start <= offset <= end else offset

    def _messages(
        self, consumer: Consumer, stream: KafkaStream, partition: int, end: int
    ) -> Iterator[list[Message]]:
        """The messages before `end`, in lists of bounded size."""
        held: list[Message] = []
        size = 0
        deadline = time.monotonic() + self._cluster.timeout_s
        quiet_until = time.monotonic() + QUIET_S
        is_over = False
        while not is_over:
            self._cluster.check_open()
            wanted = self._limits.batch_rows_max - len(held)
            for message in _available(consumer, min(wanted, 10_000), DRAIN_S if held else None):
                if message.error() is not None:
                    is_over = is_over or is_end(self._cluster, stream, message, end)
                    continue
                offset = offset_of(message)
                if offset >= end:
                    is_over = True
                    break
                held.append(message)
                size += len(message.value() or b"")
                is_over = offset == end - 1
                deadline = time.monotonic() + self._cluster.timeout_s
                quiet_until = time.monotonic() + QUIET_S
            else:
                if not is_over and time.monotonic() > quiet_until:
                    self._check_there(stream)  # librdkafka does not report that a topic was removed
                    quiet_until = time.monotonic() + QUIET_S
                if not is_over and time.monotonic() > deadline:
                    raise LogUnreachableError(
                        f"stream {stream.name}, partition {partition}: no broker delivered the "
                        f"events up to offset {end} in time"
                    )
            full = len(held) >= self._limits.batch_rows_max or size >= self._limits.batch_bytes_max
            if held and (full or is_over):
                yield held
                held, size = [], 0
                deadline = time.monotonic() + self._cluster.timeout_s

    @contextlib.contextmanager
    def _reading(self, stream: KafkaStream, partition: int, start: int) -> Iterator[Consumer]:
        """A new consumer: it starts reading sooner than one that was paused or reassigned."""
        if self._closed:
            raise ClosedError("this log is closed")
        consumer = self._cluster.consumer(**_READING)
        try:
            consumer.assign([TopicPartition(stream.topic, partition, start)])
            yield consumer
        finally:
            consumer.close()

    # Waiting

    def wait(
        self, places: Sequence[tuple[KafkaStream, Mapping[int, int]]], timeout_s: float
    ) -> bool:
        """Wait for an event at or after one of the places."""
        deadline = time.monotonic() + timeout_s
        wanted = {
            (stream.topic, partition): self._past_tail(stream, partition, offset)
            for stream, offsets in places
            for partition, offset in offsets.items()
            if partition < stream.partitions
        }
        if timeout_s <= 0 or not wanted:
            time.sleep(max(0.0, timeout_s))
            return self._has_more(wanted, deadline)
        # A caller whose wait times out usually waits for the same again: keep its consumer.
        name = tuple(sorted(wanted.items()))
        with self._lock:
            if self._closed:
                raise ClosedError("this log is closed")
            consumer = self._waiting.pop(name, None)
        if consumer is None:
            if self._has_more(wanted, deadline):
                return True
            consumer = self._cluster.consumer(**_WAITING)
            consumer.assign([TopicPartition(*at, offset) for at, offset in wanted.items()])
        in_vain = False
        try:
            in_vain = not self._heard(consumer, deadline)
        finally:
            with self._lock:
                surplus = [consumer]
                if in_vain and not self._closed and name not in self._waiting:
                    self._waiting[name] = consumer
                    # Positions advance: the one kept longest is hardly waited for again.
                    oldest = next(iter(self._waiting)) if len(self._waiting) > WAITING_MAX else None
                    surplus = [] if oldest is None else [self._waiting.pop(oldest)]
            for one in surplus:
                one.close()
        return not in_vain

    def _has_more(self, wanted: Mapping[tuple[str, int], int], deadline: float) -> bool:
        """Whether there is something at or after one of these offsets; if nobody answers, no."""
        with contextlib.suppress(LogUnreachableError), self._cluster.within(deadline):
            ends = self._cluster.ends(list(wanted), committed=True)
            return any(ends[at] > offset for at, offset in wanted.items())
        return False

    def _heard(self, consumer: Consumer, deadline: float) -> bool:
        while not self._closed:
            left = deadline - time.monotonic()
            message = consumer.poll(max(0.0, min(left, 0.5)))
            error = None if message is None else message.error()
            if message is not None and error is None:
                return True
            if error is not None and error.code() in GONE:
                return True  # the reader will get the error
            if left <= 0:
                return False
        return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._waiting = list(self._waiting.values()), {}
        for consumer in idle:
            consumer.close()


def _available(consumer: Consumer, count: int, wait_s: float | None) -> list[Message]:
    """What has arrived; waits for the first message only."""
    first = consumer.poll(READ_POLL_S if wait_s is None else wait_s)
    if first is None:
        return []
    return [first, *(consumer.consume(count - 1, 0) if count > 1 else ())]


def is_end(cluster: Cluster, stream: KafkaStream, message: Message, end: int | None) -> bool:
    """Whether a message that is not an event says that `end` was reached; raises other errors."""
    error, partition = cast(KafkaError, message.error()), int(message.partition() or 0)
    if error.code() == KafkaError._PARTITION_EOF:
        return end is not None and offset_of(message) >= end
    if error.code() in GONE:
        place = (stream.topic, partition)
        raise gone(stream, partition, offset_of(message), cluster.firsts([place])[place])
    if error.code() in REFUSED:
        raise cluster.translate(error, f"reading stream {stream.name}")
    return False  # librdkafka retries by itself


def gone(stream: KafkaStream, partition: int, offset: int, first: int) -> OffsetGoneError:
    return OffsetGoneError(
        f"stream {stream.name}, partition {partition}: offset {offset} no longer exists; retention "
        f"has removed everything before {first}: start there, or keep events longer",
        first,
    )
