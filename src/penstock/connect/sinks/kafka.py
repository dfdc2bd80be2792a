"""A sink into a topic of any Kafka: each commit is one transaction there.

A stretch waits in a file while it is voted for. Its Kafka transaction also writes where the
worker then stands, to a compacted topic of all sinks; so a commit that is told again is known.
Readers with `isolation.level=read_committed` see each message once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from penstock.connect.sinks.file import safe_name
from penstock.connect.transactions import sync_folder
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, LogAccessError, LogError, SinkGoneError, UsageError
from penstock.log.kafka.client import Address, Cluster, KafkaOptions
from penstock.log.kafka.view import View

STANDINGS = "penstock-sinks"
TIMEOUT_S = 30.0
TRANSACTION_MS = 300_000
MESSAGE_BYTES_MAX = 1_000_000
"""What librdkafka sends at most, unless `message.max.bytes` says otherwise."""
OVERHEAD_BYTES = 512
STRETCH_BYTES = 16
COMPACTED = {
    # Often, since whoever opens reads all of it.
    "cleanup.policy": "compact", "segment.ms": "600000", "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.01",
}  # fmt: skip
FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
Row = tuple[bytes | None, int, bytes]
Settings = Mapping[str, str | int | bool]


class Standing(msgspec.Struct, frozen=True):
    """Where a worker stands in Kafka: the last stretch that was committed, and where it ends."""

    end: int = 0
    stretch: str = ""


class KafkaSink:
    """Messages of `topic`, with their key and time; an empty one is a tombstone of its key.

    `settings` are any of librdkafka's; `standings` is the topic in which sinks keep where they
    stand, made if it is not there.
    """

    def __init__(
        self,
        servers: str,
        worker: str,
        topic: str,
        folder: Path | str,
        *,
        settings: Settings | None = None,
        standings: str = STANDINGS,
    ) -> None:
        self._worker = worker
        self._topic = topic
        self._standings = standings
        self._folder = Path(folder)
        self._file_name = safe_name(worker)
        self._settings = {"bootstrap.servers": servers, "log_level": 0, **(settings or {})}
        self._cluster = Cluster(Address("", servers, ""), KafkaOptions(), settings or {})
        self._name = f"{topic}/{worker}"
        self._message_bytes_max = MESSAGE_BYTES_MAX
        self._producer: Producer | None = None
        self._taking: IO[bytes] | None = None
        self._at = 0
        self._standing = Standing()

    def open(self, committed: int, kept: int | None) -> None:
        """Raises `ConnectorError` if Kafka has committed neither the one nor the other."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_topics()
        self._begin()
        if self._standing.end not in (committed, kept):
            raise ConnectorError(
                f"Kafka has {self._standing.end} bytes of worker {self._worker}, and {committed} "
                "were committed: it is another Kafka, or it has lost some"
            )
        self._forget(None if kept is None else self._pending(kept))
        self._at = committed if kept is None else kept
        self._take()

    def append(self, messages: Sequence[Message]) -> None:
        """Raises `UsageError` for a message that Kafka would not take."""
        for message in messages:
            size = len(message.payload) + len(message.key or b"")
            if size > self._message_bytes_max:
                raise UsageError(
                    f"a message has {size:,} bytes, and Kafka takes {self._message_bytes_max:,} "
                    "(message.max.bytes)"
                )
        assert self._taking is not None  # noqa: S101  open comes first
        for message in messages:
            # Kafka takes no time that lies ahead.
            time_ns = min(message.event_time, time.time_ns())
            row = msgspec.msgpack.encode((message.key, time_ns, message.payload))
            self._taking.write(len(row).to_bytes(4, "big") + row)
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        assert self._taking is not None  # noqa: S101  open comes first
        self._taking.flush()
        os.fsync(self._taking.fileno())
        Path(self._taking.name).replace(self._pending(self._at))
        sync_folder(self._folder)
        self._take()

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """One transaction of Kafka, unless it was made before."""
        path = self._pending(end)
        if path.exists():
            self._commit(path, end)
            path.unlink()
        elif self._standing.end != end:
            raise ConnectorError(
                f"{path} is not there, and Kafka has {self._standing.end} bytes of worker "
                f"{self._worker}, not {end}: the folder is another sink's, or has lost some"
            )

    def _commit(self, path: Path, end: int) -> None:
        with path.open("rb") as file:
            done = Standing(end, file.read(STRETCH_BYTES).hex())
            if done == self._standing:
                return
            producer = self._opened()
            producer.begin_transaction()
            try:
                for key, time_ns, data in rows_of(file):
                    value = data or (None if key is not None else b"")
                    self._produce(self._topic, value, key, time_ns // 1_000_000)
                self._produce(self._standings, msgspec.json.encode(done), self._name.encode(), 0)
                producer.commit_transaction(TIMEOUT_S)
                self._standing = done
            except (KafkaException, BufferError) as error:
                if _is_fenced(error):
                    raise ConnectorError(
                        f"worker {self._worker} was opened again by somebody else, or its "
                        f"transaction took more than {TRANSACTION_MS} ms"
                    ) from error
                self._begin()  # the transaction is over then, one way or the other
                if self._standing != done:
                    raise SinkGoneError(f"Kafka did not take it: {error}") from error

    def abort(self, start: int) -> None:
        self._forget(None)
        self._at = start
        self._take()

    def close(self) -> None:
        if self._taking is not None:
            self._taking.close()
            self._taking = None
        self._producer = None

    # What waits

    def _pending(self, end: int) -> Path:
        return self._folder / f"{self._file_name}.{end}.pending"

    def _forget(self, kept: Path | None) -> None:
        for path in self._folder.glob(f"{self._file_name}.*.pending"):
            if path != kept:
                path.unlink()

    def _take(self) -> None:
        """Begin a new stretch. It has a name, since two without any bytes end at the same one."""
        if self._taking is not None:
            self._taking.close()
        self._taking = (self._folder / f"{self._file_name}.taking").open("wb")
        self._taking.write(secrets.token_bytes(STRETCH_BYTES))

    # Kafka

    def _begin(self) -> None:
        """Fence whoever was this worker before, end what it left open, and see where it stands."""
        name = f"penstock-sink-{self._name}"
        self._producer = Producer(
            {
                "partitioner": "murmur2_random", "transaction.timeout.ms": TRANSACTION_MS,
                **self._settings, "transactional.id": name,
            }
        )  # fmt: skip
        try:
            self._producer.init_transactions(TIMEOUT_S)
            self._standing = self._read_standing()
        except (KafkaException, LogError) as error:
            raise SinkGoneError(f"Kafka does not answer: {error}") from error

    def _opened(self) -> Producer:
        assert self._producer is not None  # noqa: S101  open comes first
        return self._producer

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, time_ms: int) -> None:
        producer = self._opened()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                producer.produce(topic, value, key, timestamp=time_ms)
                producer.poll(0)
                return
            except BufferError:  # it is slower than we are
                if time.monotonic() > deadline:
                    raise
                producer.poll(0.1)

    def check(self) -> None:
        """Raises `UsageError` if this Kafka or topic cannot be used as it is, `SinkGoneError` if
        it is away.
        """
        self._check_topics()

    def _check_topics(self) -> None:
        cluster = self._cluster
        try:
            there = cluster.asked("listing topics", lambda s: cluster.admin.list_topics(timeout=s))
            if self._topic not in there.topics:
                raise UsageError(f"there is no topic {self._topic} in this Kafka: create it first")
            self._message_bytes_max = self._limit(cluster.admin) - OVERHEAD_BYTES
            if self._standings not in there.topics:
                new = NewTopic(self._standings, 1, config=COMPACTED)
                cluster.admin.create_topics([new])[self._standings].result(TIMEOUT_S)
        except LogAccessError as error:
            raise UsageError(str(error)) from error
        except LogError as error:
            raise SinkGoneError(f"Kafka does not answer: {error}") from error
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SinkGoneError(f"Kafka does not answer: {error}") from error

    def _limit(self, admin: AdminClient) -> int:
        """How large a message may be: what the client sends, and what the topic takes."""
        own = int(self._settings.get("message.max.bytes", MESSAGE_BYTES_MAX))
        asked = admin.describe_configs([ConfigResource(ResourceType.TOPIC, self._topic)])
        (found,) = asked.values()
        return min(own, int(found.result(TIMEOUT_S)["max.message.bytes"].value or own))

    def _read_standing(self) -> Standing:
        """The last that was committed. What others have open must end first: it hides ours."""
        found = Standing()

        def take(name: str, value: bytes | None, offset: int) -> None:
            nonlocal found
            del offset
            if name == self._name and value is not None:
                found = msgspec.json.decode(value, type=Standing)

        view = View(self._cluster, self._standings, take)
        with contextlib.closing(view), self._cluster.within(time.monotonic() + TIMEOUT_S):
            view.catch_up(0)
        return found


def _is_fenced(error: Exception) -> bool:
    reason = error.args[0] if error.args else None
    return isinstance(reason, KafkaError) and reason.code() in FENCED


def rows_of(file: IO[bytes]) -> Iterator[Row]:
    """The messages of a stretch."""
    while size := file.read(4):
        yield _decoder.decode(file.read(int.from_bytes(size, "big")))


_decoder = msgspec.msgpack.Decoder(Row)
