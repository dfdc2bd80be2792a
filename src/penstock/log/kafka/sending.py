"""Sending events in a transaction: encoding, sending by partition, and finding their offsets."""

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
from penstock.log.engine.ids import ranges_of
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.messages import Encoded, encode, offset_of
from penstock.log.kafka.objects import KafkaStream
from penstock.log.kafka.session import NotCommittedError, Session
from penstock.log.writing.partitioning import cut, widen
from penstock.records.event import ids_of

FOLLOWED_ROWS_MAX = 1000
"""Up to this many events of one partition, every offset is reported; beyond, only some."""


class KafkaChunk(msgspec.Struct, frozen=True):
    """Events of one partition, which may be encoded already."""

    partition: int
    batch: pa.RecordBatch
    encoded: Encoded | None = None


class KafkaPrepared(msgspec.Struct, frozen=True):
    """Events of one stream, split by partition, in the order in which they are sent."""

    stream: KafkaStream
    chunks: Sequence[KafkaChunk]
    dropped: tuple[int, ...] = ()


def prepare(
    stream: KafkaStream, batches: Sequence[pa.RecordBatch], limits: Limits, *, ahead: bool = False
) -> KafkaPrepared:
    """Split by partition; with `ahead` all chunks are encoded now, otherwise when sent."""
    made = [
        KafkaChunk(partition, chunk, encode(stream, chunk) if ahead else None)
        for batch in batches
        for partition, chunk in cut(stream, batch, limits)
    ]
    return KafkaPrepared(stream, made)


class KafkaSending:
    """What was sent to one stream, and where it was stored."""

    def __init__(self, prepared: KafkaPrepared) -> None:
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
        # The first event of each stretch is tracked, and the very last one.
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
        """Where the events are; to be called when all have arrived or failed."""
        if self._error is not None:
            raise NotCommittedError from cluster.translate_abort(self._error, "writing")
        ranges: list[tuple[int, int, int]] = []
        for chunk, reported in zip(self._prepared.chunks, self._reported, strict=True):
            for first, last in self._stretches(cluster, chunk, reported):
                widen(ranges, chunk.partition, first, last - first + 1)
        stream = self.stream
        return Placement(str(stream.name), stream.partitions, tuple(ranges), self._prepared.dropped)

    def _stretches(
        self, cluster: Cluster, chunk: KafkaChunk, reported: dict[int, int]
    ) -> list[tuple[int, int]]:
        """The first and last offsets of adjacent events."""
        rows = chunk.batch.num_rows
        known = sorted(reported.items())
        if not known or known[0][0] != 0 or known[-1][0] != rows - 1:
            raise LogError(f"Kafka did not report the offsets of events sent to {self._topic}")
        first, last = known[0][1], known[-1][1]
        if last - first == rows - 1:
            return [(first, last)]
        if len(known) == rows:
            return ranges_of(offset for _, offset in known)
        # Others wrote to the partition at the same time: find out where ours are.
        return ranges_of(self._find_offsets(cluster, chunk, first, last))

    def _find_offsets(
        self, cluster: Cluster, chunk: KafkaChunk, first: int, last: int
    ) -> list[int]:
        """The offsets of our events in a stretch that others wrote to as well."""
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
            raise LogError(f"the events written to {self._topic} could not be found there")
        return offsets
