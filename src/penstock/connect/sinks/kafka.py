"""A sink into a topic of any Kafka: each transaction of messages is a Kafka transaction.

It also writes the worker's mark to a compacted topic shared by all sinks, which tells whether a
transaction whose outcome is unknown has committed. Readers with `isolation.level=read_committed`
see each message once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from penstock.connect.hosts.targets import SinkMessage, SinkTarget, check_mark
from penstock.connect.protocol.marks import Mark
from penstock.errors import (
    ConnectorError,
    LogAccessError,
    LogError,
    MarkMovedError,
    SinkGoneError,
    UsageError,
)
from penstock.log.kafka.client import Address, Cluster, KafkaOptions
from penstock.log.kafka.view import View

STANDINGS = "penstock-sinks"
TIMEOUT_S = 30.0
TRANSACTION_MS = 300_000
MESSAGE_BYTES_MAX = 1_000_000
"""The largest message that librdkafka sends, unless `message.max.bytes` says otherwise."""
OVERHEAD_BYTES = 512
COMPACTED = {
    # Compacted often, since opening a sink reads all of it.
    "cleanup.policy": "compact", "segment.ms": "600000", "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.01",
}  # fmt: skip
FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
KafkaSettings = Mapping[str, str | int | bool]


class KafkaStanding(msgspec.Struct, frozen=True):
    """A worker's mark in Kafka: how many bytes and messages were committed."""

    end: int = 0
    messages: int = 0

    @property
    def mark(self) -> Mark:
        return Mark(self.end, self.messages)


class KafkaSink(SinkTarget):
    """Messages of `topic`, with their key and time; an empty one is a tombstone for its key.

    `settings` are any settings of librdkafka; `standings` is the topic in which sinks keep their
    marks, created if it does not exist.
    """

    page_bytes = None

    def __init__(
        self,
        servers: str,
        worker: str,
        topic: str,
        *,
        settings: KafkaSettings | None = None,
        standings: str = STANDINGS,
    ) -> None:
        self._worker = worker
        self._topic = topic
        self._standings = standings
        self._settings = {"bootstrap.servers": servers, "log_level": 0, **(settings or {})}
        self._cluster = Cluster(Address("", servers, ""), KafkaOptions(), settings or {})
        self._name = f"{topic}/{worker}"
        own = int(self._settings.get("message.max.bytes", MESSAGE_BYTES_MAX))
        self._message_bytes_max = own - OVERHEAD_BYTES
        self._producer: Producer | None = None
        self._mark = Mark()

    def applied(self) -> Mark:
        """Fence the worker's previous instance, end its open transaction, and read the mark."""
        self.close()
        self.check_server()
        producer = Producer(
            {
                "partitioner": "murmur2_random", "transaction.timeout.ms": TRANSACTION_MS,
                **self._settings, "transactional.id": f"penstock-sink-{self._name}",
            }
        )  # fmt: skip
        try:
            producer.init_transactions(TIMEOUT_S)
            self._mark = self._read_mark()
        except (KafkaException, LogError) as error:
            raise SinkGoneError(f"Kafka does not answer: {error}") from error
        self._producer = producer
        return self._mark

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        """One Kafka transaction. After an error its outcome is unknown until `applied`."""
        if self._producer is None:
            self.applied()
        check_mark(self._mark, after)
        producer = self._producer
        assert producer is not None  # noqa: S101  applied has made it
        try:
            producer.begin_transaction()
            for message in messages:
                self._produce_message(producer, message)
            standing = msgspec.json.encode(KafkaStanding(*mark))
            self._produce(producer, self._standings, standing, self._name.encode())
            producer.commit_transaction(TIMEOUT_S)
        except (KafkaException, BufferError) as error:
            self.close()
            raise self._translate(error) from error
        except BaseException:
            self.close()
            raise
        self._mark = mark

    def _translate(self, error: Exception) -> ConnectorError:
        code = _code_of(error)
        if code in FENCED:
            return MarkMovedError(
                f"another process has opened worker {self._worker}, or its transaction took longer "
                f"than {TRANSACTION_MS} ms"
            )
        if code in TOO_LARGE:
            return ConnectorError(f"Kafka refuses a message: {error}")
        return SinkGoneError(f"Kafka did not accept the transaction: {error}")

    def check(self, messages: Sequence[SinkMessage]) -> None:
        for message in messages:
            size = len(message.data) + len(message.key or b"")
            if size > self._message_bytes_max:
                raise ValueError(
                    f"the message has {size:,} bytes, but Kafka accepts at most "
                    f"{self._message_bytes_max:,} (message.max.bytes)"
                )

    def close(self) -> None:
        self._producer = None

    # Kafka

    def _produce_message(self, producer: Producer, message: SinkMessage) -> None:
        value = message.data or (None if message.key is not None else b"")
        time_ns = min(message.time_ns, time.time_ns())  # Kafka accepts no time in the future
        self._produce(producer, self._topic, value, message.key, time_ns // 1_000_000)

    def _produce(
        self,
        producer: Producer,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        time_ms: int = 0,
    ) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                producer.produce(topic, value, key, timestamp=time_ms)
                producer.poll(0)
                return
            except BufferError:  # Kafka is slower than this sink
                if time.monotonic() > deadline:
                    raise
                producer.poll(0.1)

    def check_server(self) -> None:
        """Raise `UsageError` if this Kafka or topic cannot be used as it is, `SinkGoneError` if
        Kafka is unavailable.
        """
        cluster = self._cluster
        try:
            there = cluster.ask("listing topics", lambda s: cluster.admin.list_topics(timeout=s))
            if self._topic not in there.topics:
                raise UsageError(f"topic {self._topic} does not exist in this Kafka: create it")
            self._message_bytes_max = self._read_limit(cluster.admin) - OVERHEAD_BYTES
            if self._standings not in there.topics:
                new = NewTopic(self._standings, 1, config=COMPACTED)
                cluster.admin.create_topics([new])[self._standings].result(TIMEOUT_S)
        except LogAccessError as error:
            raise UsageError(str(error)) from error
        except LogError as error:
            raise SinkGoneError(f"Kafka does not answer: {error}") from error
        except KafkaException as error:
            if _code_of(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SinkGoneError(f"Kafka does not answer: {error}") from error

    def _read_limit(self, admin: AdminClient) -> int:
        """How large a message may be: the limits of the client and of the topic."""
        own = int(self._settings.get("message.max.bytes", MESSAGE_BYTES_MAX))
        asked = admin.describe_configs([ConfigResource(ResourceType.TOPIC, self._topic)])
        (found,) = asked.values()
        return min(own, int(found.result(TIMEOUT_S)["max.message.bytes"].value or own))

    def _read_mark(self) -> Mark:
        """The last committed mark. Open transactions of others hide it, and must end first."""
        found = KafkaStanding()

        def take(name: str, value: bytes | None, offset: int) -> None:
            nonlocal found
            del offset
            if name == self._name and value is not None:
                found = msgspec.json.decode(value, type=KafkaStanding)

        view = View(self._cluster, self._standings, take)
        with contextlib.closing(view), self._cluster.within(time.monotonic() + TIMEOUT_S):
            view.catch_up(0)
        return found.mark


def _code_of(error: Exception) -> int | None:
    reason = error.args[0] if error.args else None
    return reason.code() if isinstance(reason, KafkaError) else None
