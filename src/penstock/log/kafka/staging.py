"""Staged events: in a separate topic until a commit names them.

They are Arrow blobs, as in the embedded log; each says which commit it is for. The process that
commits reads them and writes the events. Machines need to share nothing but Kafka.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock.errors import LogUnreachableError, PieceError
from penstock.failpoints import failpoint
from penstock.log.api import Piece
from penstock.log.batch import Compression, decode_blob, encode_blob
from penstock.log.kafka.client import GONE, Cluster
from penstock.log.kafka.messages import offset_of
from penstock.log.kafka.session import MESSAGE_BYTES_MAX, QUEUE_KIB

TOPIC = "_penstock.staged"
PARTITIONS = 8
_OFFSET_BITS = 48


class Tag(msgspec.Struct, frozen=True):
    """The commit that a blob was staged for, and its stream."""

    producer: str
    epoch: int
    sequence: int
    stream: int


class StagedPlace(NamedTuple):
    """Where a blob is stored."""

    partition: int
    offset: int

    def number(self) -> int:
        return (self.partition << _OFFSET_BITS) | self.offset

    @staticmethod
    def of(number: int) -> StagedPlace:
        return StagedPlace(number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1))


class Staging:
    """Writes and reads staged blobs. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self.topic = cluster.address.own(TOPIC)
        self._cluster = cluster
        self._producer: Producer | None = None
        self._lock = threading.Lock()

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = self._cluster.producer(
                    **{
                        "enable.idempotence": True,
                        "message.max.bytes": MESSAGE_BYTES_MAX,
                        "queue.buffering.max.kbytes": QUEUE_KIB,
                        "linger.ms": 1,
                        "message.timeout.ms": self._cluster.options.broker_timeout_ms,
                    }
                )
            return self._producer

    def write(
        self, tag: Tag, stream: str, batches: Sequence[pa.RecordBatch], compression: Compression
    ) -> Piece:
        """Store blobs; they are durable when this returns."""
        producer = self._open_producer()
        partition = zlib.crc32(tag.producer.encode()) % PARTITIONS
        places: dict[int, StagedPlace] = {}
        errors: list[KafkaError] = []
        key = msgspec.json.encode(tag)
        for number, batch in enumerate(batches):

            def note_place(
                error: KafkaError | None, message: Message, number: int = number
            ) -> None:
                if error is None:
                    places[number] = StagedPlace(partition, offset_of(message))
                else:
                    errors.append(error)

            blob = encode_blob(batch, compression)
            while True:
                try:
                    producer.produce(self.topic, blob, key, partition, on_delivery=note_place)
                    break
                except BufferError:
                    producer.poll(0.05)
                except KafkaException as error:
                    self._discard(producer)
                    raise self._cluster.translate_abort(error, "staging events") from error
        failpoint("stage.blobs")
        deadline = time.monotonic() + self._cluster.timeout_s
        while len(places) + len(errors) < len(batches) and time.monotonic() < deadline:
            producer.poll(0.05)
        if errors:
            self._discard(producer)
            raise self._cluster.translate_abort(errors[0], "staging events")
        if len(places) < len(batches):
            raise LogUnreachableError("staged events did not reach Kafka in time")
        rows = sum(batch.num_rows for batch in batches)
        numbers = tuple(places[number].number() for number in range(len(batches)))
        return Piece(stream, numbers, rows)

    def _discard(self, producer: Producer) -> None:
        """Discard the producer, which is unusable after some errors; the next call makes one."""
        with self._lock:
            if self._producer is producer:
                self._producer = None

    def read(self, tags: Mapping[int, Tag]) -> dict[int, pa.RecordBatch]:
        """The batches of these numbers. Raises `PieceError` if one does not exist with its tag."""
        found: dict[int, pa.RecordBatch] = {}
        for partition in {StagedPlace.of(number).partition for number in tags}:
            offsets = [
                StagedPlace.of(n).offset for n in tags if StagedPlace.of(n).partition == partition
            ]
            for message in self.messages(partition, min(offsets), max(offsets) + 1):
                number, key = StagedPlace(partition, offset_of(message)).number(), message.key()
                value = message.value()
                if number not in tags or key is None or not isinstance(value, bytes):
                    continue
                if msgspec.json.decode(key, type=Tag) == tags[number]:
                    found[number] = decode_blob(value)
        if len(found) < len(tags):
            raise PieceError(
                "a staged piece does not exist for this commit: it was staged for another commit, "
                "or is older than staged_retention_ms; stage it again"
            )
        return found

    def messages(self, partition: int, start: int, end: int) -> Iterator[Message]:
        """The messages still staged in a partition from `start` to before `end`."""
        start = max(start, self._first(partition))
        if start >= end:
            return
        consumer = self._cluster.consumer(
            **{
                "fetch.wait.max.ms": 5,
                "isolation.level": "read_uncommitted",
                "fetch.message.max.bytes": 8 << 20,
            }
        )
        deadline = time.monotonic() + self._cluster.timeout_s
        try:
            consumer.assign([TopicPartition(self.topic, partition, start)])
            while time.monotonic() < deadline:
                message = self._poll(consumer)
                if message is None:
                    continue
                error = message.error()
                if error is not None:
                    if error.code() in GONE:  # another process has just swept
                        yield from self.messages(partition, start, end)
                    return
                if (start := offset_of(message) + 1) <= end:
                    yield message
                if start >= end:
                    return
                deadline = time.monotonic() + self._cluster.timeout_s
            raise LogUnreachableError("staged events could not be read in time")
        finally:
            consumer.close()

    def _poll(self, consumer: Consumer) -> Message | None:
        """The next message, or where there are no more; `None` if nothing has come yet."""
        self._cluster.check_open()
        message = consumer.poll(0.2)
        error = None if message is None else message.error()
        if error is None or error.code() in (KafkaError._PARTITION_EOF, *GONE):
            return message
        if not error.retriable():
            raise self._cluster.translate(error, "reading staged events")
        return None

    def _first(self, partition: int) -> int:
        place = (self.topic, partition)
        return self._cluster.firsts([place])[place]

    def close(self) -> None:
        with self._lock:
            if self._producer is not None:
                self._producer.purge()
                self._producer.close()
                self._producer = None
