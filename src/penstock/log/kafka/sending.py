"""Events into a transaction: encoded, sent by partition, and their offsets found out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, KafkaError, TopicPartition

from penstock.errors import LogError
from penstock.log.api import Limits, Placement
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.messages import Encoded, encode, offset_of
from penstock.log.kafka.objects import KafkaStream
from penstock.log.kafka.session import NotCommittedError, Session
from penstock.log.partitioning import chunks, split_part, widen
from penstock.log.sqlite.ids import ranges_of
from penstock.records.event import ids_of

FOLLOWED_ROWS_MAX = 1000
"""Of so many events of one partition each offset is reported; of more, only some."""


class Chunk(msgspec.Struct, frozen=True):
    """Events of one partition; encoded ahead of time, or not yet."""

    partition: int
    batch: pa.RecordBatch
    encoded: Encoded | None = None


class Prepared(msgspec.Struct, frozen=True):
    """Events of one stream, split by partition, in the order in which they are sent."""

    stream: KafkaStream
    chunks: Sequence[Chunk]
    dropped: tuple[int, ...] = ()


def prepare(
    stream: KafkaStream, batches: Sequence[pa.RecordBatch], limits: Limits, *, ahead: bool = False
) -> Prepared:
    """Split by partition; `ahead` encodes at once, otherwise each chunk when it is sent."""
    made = []
    for batch in batches:
        for partition, part in split_part(stream, batch):
            for piece in chunks(part, limits):
                encoded = encode(stream, piece) if ahead else None
                made.append(Chunk(partition, piece, encoded))
    return Prepared(stream, made)


class Sent:
    """What was sent of one stream, and where it went."""

    def __init__(self, prepared: Prepared) -> None:
        self.stream = prepared.stream
        self._prepared = prepared
        self._topic = prepared.stream.topic
        self._reported: list[dict[int, int]] = [{} for _ in prepared.chunks]
        self._error: KafkaError | None = None
        self.time_ms: int | None = None

    def send(self, session: Session) -> None:
        for chunk, reported in zip(self._prepared.chunks, self._reported, strict=True):
            encoded = chunk.encoded or encode(self.stream, chunk.batch)
            self._send(session, chunk.partition, encoded, reported)

    def _send(
        self, session: Session, partition: int, encoded: Encoded, reported: dict[int, int]
    ) -> None:
        step = 1 if encoded.rows <= FOLLOWED_ROWS_MAX else FOLLOWED_ROWS_MAX
        messages = zip(encoded.keys, encoded.values, encoded.headers(), strict=True)
        last = encoded.rows - 1
        # The first of each stretch is followed, and the very last.
        for row in range(0, last, step):
            stretch = itertools.islice(messages, min(step, last - row))
            session.send_all(self._topic, partition, stretch, self._teller(row, reported))
        session.send_all(self._topic, partition, messages, self._teller(last, reported))

    def _teller(self, row: int, reported: dict[int, int]) -> Any:
        def tell(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self._error = self._error or error
            else:
                reported[row] = message.offset()
                kind, time_ms = message.timestamp()
                if kind != TIMESTAMP_NOT_AVAILABLE:
                    self.time_ms = time_ms if self.time_ms is None else min(self.time_ms, time_ms)

        return tell

    def placement(self, cluster: Cluster) -> Placement:
        """Where the events are; to be asked when all have arrived, or have not."""
        if self._error is not None:
            raise NotCommittedError from cluster.undone(self._error, "writing")
        ranges: list[tuple[int, int, int]] = []
        for chunk, reported in zip(self._prepared.chunks, self._reported, strict=True):
            for first, last in self._stretches(cluster, chunk, reported):
                widen(ranges, chunk.partition, first, last - first + 1)
        stream = self.stream
        return Placement(str(stream.name), stream.partitions, tuple(ranges), self._prepared.dropped)

    def _stretches(
        self, cluster: Cluster, chunk: Chunk, reported: dict[int, int]
    ) -> list[tuple[int, int]]:
        """The first and last offsets of events that lie side by side."""
        rows = chunk.batch.num_rows
        known = sorted(reported.items())
        if not known or known[0][0] != 0 or known[-1][0] != rows - 1:
            raise LogError(f"Kafka did not report where the events of {self._topic} are")
        first, last = known[0][1], known[-1][1]
        if last - first == rows - 1:
            return [(first, last)]
        if len(known) == rows:
            return ranges_of(offset for _, offset in known)
        # Others wrote to the partition at the same time: look where ours are.
        return ranges_of(self._found(cluster, chunk, first, last))

    def _found(self, cluster: Cluster, chunk: Chunk, first: int, last: int) -> list[int]:
        """The offsets of our events in a stretch that others wrote into too."""
        ours = set(ids_of(chunk.batch).to_pylist())
        consumer = cluster.consumer(**{"isolation.level": "read_uncommitted"})
        consumer.assign([TopicPartition(self._topic, chunk.partition, first)])
        deadline = time.monotonic() + cluster.timeout_s
        offsets: list[int] = []
        try:
            while len(offsets) < len(ours) and time.monotonic() < deadline:
                for message in consumer.consume(10_000, 0.1):
                    id_ = dict(message.headers() or ()).get("ce_id")
                    text = id_.decode() if isinstance(id_, bytes) else id_
                    if message.error() is None and text in ours and offset_of(message) <= last:
                        offsets.append(offset_of(message))
        finally:
            consumer.close()
        if len(offsets) != len(ours):
            raise LogError(f"the events written to {self._topic} were not found again")
        return offsets
