"""A compacted topic as a mapping: the latest value of each key, as of now.

Only our own transactions write to such a topic. Reading waits for transactions in progress, so
that everything a predecessor committed is seen: it reads up to the end of what was written, not
only of what is known to be committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from penstock.errors import ClosedError, LogUnreachableError
from penstock.log.kafka.client import MOMENTARY, Cluster
from penstock.log.kafka.messages import offset_of

Apply = Callable[[str, bytes | None, int], None]
"""Called for each key with its value (`None` if deleted) and the offset of the message."""
POLL_S = 0.2
MESSAGES = 5000
_SETTINGS = {"fetch.wait.max.ms": 5, "queued.min.messages": 10_000}


class View:
    """Follows some partitions of one topic. Thread-safe; one thread reads at a time."""

    def __init__(self, cluster: Cluster, topic: str, apply: Apply) -> None:
        self._cluster = cluster
        self._topic = topic
        self._apply = apply
        self._consumer: Consumer | None = None
        self._next: dict[int, int] = {}
        self._closed = False
        self.lock = threading.RLock()
        """Held while `apply` is called: hold it to see a consistent set of values."""

    def catch_up(self, *partitions: int, wait: bool = True) -> None:
        """Read the present contents of these partitions, and wait for transactions begun before.

        Without `wait`, read only what is settled. Raises `LogUnreachableError` if that does not end
        in time: Kafka aborts the transaction of a dead process only after a while.
        """
        places = [(self._topic, p) for p in partitions]
        settled = self._cluster.ends(places, committed=True)
        ends = self._cluster.ends(places, committed=False) if wait else settled
        with self.lock:
            if self._closed:
                raise ClosedError("this log is closed")
            wanted = {p: end for (_, p), end in ends.items() if end > self._next.get(p, 0)}
            if not wanted:
                return
            # If no transaction is in progress, the last record is a commit marker.
            marked = {p for (_, p), end in ends.items() if wait and settled[self._topic, p] == end}
            self._read(self._open_consumer(list(wanted)), wanted, marked)

    def position(self, partition: int) -> int:
        """The offset up to which a partition was read."""
        with self.lock:
            return self._next.get(partition, 0)

    def _open_consumer(self, partitions: list[int]) -> Consumer:
        """The consumer, reading these partitions from where it left off."""
        if self._consumer is None:
            self._consumer = self._cluster.consumer(**_SETTINGS)
        new = [p for p in partitions if p not in self._next]
        if new:
            self._consumer.incremental_assign([TopicPartition(self._topic, p, 0) for p in new])
        known = [TopicPartition(self._topic, p, self._next[p]) for p in partitions if p not in new]
        if known:
            self._consumer.resume(known)
            for place in known:
                self._consumer.seek(place)
        self._next.update(dict.fromkeys(new, 0))
        return self._consumer

    def _read(self, consumer: Consumer, wanted: dict[int, int], marked: set[int]) -> None:
        patience_s = self._cluster.patience_s
        deadline = time.monotonic() + patience_s
        try:
            while wanted:
                self._cluster.check_open()
                first = consumer.poll(POLL_S)
                found = [] if first is None else [first, *consumer.consume(MESSAGES, 0)]
                for message in found:
                    self._take(message)
                for partition, end in list(wanted.items()):
                    position = self._next[partition]
                    if position >= end or (position == end - 1 and partition in marked):
                        self._next[partition] = end
                        del wanted[partition]
                if time.monotonic() > deadline:
                    raise LogUnreachableError(
                        f"{self._topic} could not be read to its end within "
                        f"{patience_s:.0f} s: a transaction has not ended, or the "
                        "partition has no leader"
                    )
        finally:
            consumer.pause([TopicPartition(self._topic, p) for p in self._next])

    def _take(self, message: Message) -> None:
        partition, error = int(message.partition() or 0), message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._next[partition] = max(self._next[partition], offset_of(message))
                return
            if error.code() in MOMENTARY or error.retriable():
                return
            raise self._cluster.translate(error, f"reading {self._topic}")
        offset = offset_of(message)
        if offset < self._next[partition]:
            return  # fetched before the seek
        key = message.key()
        if key is not None:
            text = key.decode() if isinstance(key, bytes) else key
            self._apply(text, _bytes(message.value()), offset)
        self._next[partition] = offset + 1

    def close(self) -> None:
        with self.lock:
            self._closed = True
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
