"""Topics of any Kafka as sources: each partition is a separate stream.

Kafka's group decides which partitions a program reads; where it resumes is Penstock's point of
reference, not the group's. A partition that the group assigns to another program is released only
when everything read from it is safe, so a handover loses and repeats nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from penstock.connect.clients.source import ConnectorOptions, Item, Source, SourceConnector
from penstock.errors import ConnectorError
from penstock.log.declaring.names import guess
from penstock.log.kafka.client import REFUSED

HELD_MAX = 5000
HELD_BYTES_MAX = 32 << 20
"""How many messages or bytes of a partition wait here before it is paused."""
ALL_BYTES_MAX = 128 << 20
"""How many bytes of all partitions wait here before all are paused."""
BATCH_ROWS = 200
MESSAGE_BYTES = 250
"""Approximately how much memory a waiting message takes besides its data."""
POLL_S = 0.1
CLOSE_S = 30.0
ASK_S = 30.0
TopicPlace = tuple[str, int]


class Held:
    """Counts the waiting bytes of all partitions together. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._most = bytes_max
        self._lock = threading.Lock()
        self.bytes = 0

    def add(self, size: int) -> None:
        with self._lock:
            self.bytes += size

    def is_full(self) -> bool:
        return self.bytes >= self._most

    def has_room(self) -> bool:
        """Whether it is worth going on after a pause."""
        return self.bytes < self._most // 2


class PartitionSource(Source):
    """One partition, named `kafka/CLUSTER/TOPIC/PARTITION`; filled by the thread that reads."""

    def __init__(self, cluster: str, place: TopicPlace, held: Held) -> None:
        super().__init__(f"kafka/{cluster}/{place[0]}/{place[1]}")
        self.place = place
        self._all_held = held
        self._lock = threading.Lock()
        self._held: deque[Item] = deque()
        self._held_bytes = 0
        self._goto: tuple[int | None] | None = None
        self._last: int | None = None
        self._has_begun = False
        self.safe: int | None = None
        self.is_paused = True

    # The connector's side

    def handle_reset(self, point_of_ref: int | None) -> None:
        with self._lock:
            self._drop()
            self._goto = (point_of_ref,)

    def handle_close(self) -> None:
        with self._lock:
            self._drop()
            self._goto = (self._last,)  # messages that still arrive are not kept

    def _drop(self) -> None:
        self._all_held.add(-self._held_bytes)
        self._held.clear()
        self._held_bytes = 0

    def handle_next(self) -> Item | None:
        with self._lock:
            if not self._held or self._goto is not None:
                return None
            item = self._held.popleft()
            self._count(-size_of(item))
            return item

    def _count(self, size: int) -> None:
        self._held_bytes += size
        self._all_held.add(size)

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002
        self.safe = point_of_ref

    # The reader's side

    def asked_position(self) -> tuple[int | None] | None:
        """Where to resume, if that was requested since the last call."""
        with self._lock:
            return self._goto

    def begin(self) -> None:
        """Note that messages put from here on come after the requested position."""
        with self._lock:
            if self._goto is not None:
                (self._last,) = self._goto
            self._goto = None
            self._has_begun = True

    def look_again(self) -> None:
        """Kafka has removed the next messages: determine again where to resume."""
        with self._lock:
            if self._goto is None and self._has_begun:
                self._goto = (self._last,)

    def put(self, item: Item) -> bool:
        """Keep a message; return whether enough are waiting."""
        with self._lock:
            if self._goto is None:
                self._held.append(item)
                self._count(size_of(item))
                self._last = item.point_of_ref
            return len(self._held) >= HELD_MAX or self._held_bytes >= HELD_BYTES_MAX

    @property
    def has_begun(self) -> bool:
        with self._lock:
            return self._has_begun

    def has_room(self) -> bool:
        """Whether it is worth going on after a pause."""
        with self._lock:
            is_low = len(self._held) < HELD_MAX // 2 and self._held_bytes < HELD_BYTES_MAX // 2
        return is_low and self._all_held.has_room()


class KafkaTopics:
    """Reads topics as a member of a group, for the duration of its block.

    `settings` are any settings of librdkafka. `start` says where to start with a partition of which
    Penstock has nothing; `on_gone` what happens if Kafka has removed the next messages.
    `held_bytes_max` limits the bytes of messages that wait in memory, apart from what librdkafka
    has fetched (`queued.max.messages.kbytes`, 64 MiB unless the settings say otherwise).
    """

    def __init__(  # noqa: PLR0913  each is one of an author's choices
        self,
        address: str,
        servers: str,
        topics: Sequence[str],
        group: str,
        *,
        start: Literal["earliest", "latest"] = "earliest",
        on_gone: Literal["fail", "earliest", "latest"] = "fail",
        settings: Mapping[str, str | int | bool] | None = None,
        options: ConnectorOptions = ConnectorOptions(),
        held_bytes_max: int = ALL_BYTES_MAX,
    ) -> None:
        self._topics = list(topics)
        self._held = Held(held_bytes_max)
        self._cluster_id = ""
        self._start = start
        self._on_gone = on_gone
        self._settings = {
            "bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False,
            "auto.offset.reset": "error", "isolation.level": "read_committed",
            **(settings or {}), "error_cb": self._hear,
        }  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-kafka-source", daemon=True)
        self._sources: dict[TopicPlace, PartitionSource] = {}
        self._committed: dict[TopicPlace, int] = {}
        self._refusal = ""
        self.connector = SourceConnector(address, [], options)
        self.failure: ConnectorError | None = None

    def __enter__(self) -> Self:
        self.connector.start()
        try:
            self._thread.start()
        except BaseException:
            self.connector.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        self.connector.stop()

    @property
    def held_bytes(self) -> int:
        """How many bytes wait in memory to be sent."""
        return self._held.bytes

    def check(self) -> None:
        """Raise `ConnectorError` if reading cannot continue."""
        self.connector.check()
        if self.failure is not None:
            raise self.failure

    # Reading

    def _run(self) -> None:
        try:
            consumer = Consumer(self._settings)
            consumer.subscribe(
                self._topics, on_assign=self._assign, on_revoke=self._revoke,
                on_lost=self._revoke,
            )  # fmt: skip
            with contextlib.closing(consumer):
                while not self._stop.is_set():
                    self._step(consumer)
        except KafkaException as error:
            self.failure = ConnectorError(f"Kafka cannot be read: {error.args[0]}")
        except ConnectorError as error:
            self.failure = error
        except Exception as error:
            self.failure = ConnectorError(f"the source failed: {type(error).__name__}: {error}")

    def _step(self, consumer: Consumer) -> None:
        if self._refusal:
            raise ConnectorError(
                f"Kafka refuses this client: {self._refusal}; check the settings "
                "security.protocol, sasl.* and ssl.*"
            )
        for message in consumer.consume(BATCH_ROWS, POLL_S):
            self._take(consumer, message)
        if self._held.is_full():
            self._pause(consumer, self._sources.values())
        for source in list(self._sources.values()):
            self._position(consumer, source)
            self._balance(consumer, source)
        self._tell_group(consumer)

    def _take(self, consumer: Consumer, message: Message) -> None:
        source = self._sources.get((str(message.topic()), int(message.partition() or 0)))
        error = message.error()
        if error is not None:
            is_gone = error.code() == KafkaError._AUTO_OFFSET_RESET
            if is_gone and source is not None:
                source.look_again()
            elif not is_gone:
                self._err(consumer, message, error)
            return
        offset = message.offset()
        if source is None or offset is None:
            return
        _, time_ms = message.timestamp()
        key, value = message.key(), message.value()
        data = value if isinstance(value, bytes) else b""
        given = key if isinstance(key, bytes) else None
        item = Item(data, offset, given or None, max(0, time_ms) * 1_000_000)
        if source.put(item):
            self._pause(consumer, [source])
        self.connector.wake(source.name)

    def _pause(self, consumer: Consumer, sources: Iterable[PartitionSource]) -> None:
        going = [source for source in sources if not source.is_paused]
        if going:
            consumer.pause([TopicPartition(*source.place) for source in going])
        for source in going:
            source.is_paused = True

    def _hear(self, error: KafkaError) -> None:
        """Handle an error of librdkafka. Unavailable brokers come back; brokers that have never
        accepted this client and say that they refuse it do not.
        """
        if error.code() in REFUSED and not self._cluster_id:
            self._refusal = error.str()

    def _err(self, consumer: Consumer, message: Message, error: KafkaError) -> None:
        away = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT)
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            known = consumer.list_topics(timeout=ASK_S).topics
            if message.topic() not in known:
                hint = guess(str(message.topic()), known) or "create it first"
                raise ConnectorError(
                    f"topic {message.topic()} does not exist in this Kafka: {hint}"
                )
        if error.retriable() or error.code() in away:
            return
        raise ConnectorError(f"Kafka cannot be read: {error.str()}")

    def _position(self, consumer: Consumer, source: PartitionSource) -> None:
        """Seek to where the connector wants to resume."""
        asked = source.asked_position()
        if asked is None:
            return
        place = TopicPartition(*source.place)
        (point,) = asked
        try:
            low, high = consumer.get_watermark_offsets(place, timeout=10.0)
            at = (low if self._start == "earliest" else high) if point is None else point + 1
            place.offset = at if low <= at <= high else self._instead(source, at, low, high)
            consumer.seek(place)
        except KafkaException:
            return  # not yet: retried in a moment
        source.begin()
        consumer.resume([place])
        source.is_paused = False

    def _instead(self, source: PartitionSource, at: int, low: int, high: int) -> int:
        if self._on_gone == "fail":
            raise ConnectorError(
                f"{source.name}: offset {at} does not exist, the first is {low} and the last "
                f"{high - 1}: Kafka has removed it, or the topic was recreated; specify where to "
                "continue (on_gone=earliest or latest)"
            )
        return low if self._on_gone == "earliest" else high

    def _balance(self, consumer: Consumer, source: PartitionSource) -> None:
        is_begun = source.has_begun and source.asked_position() is None
        if source.is_paused and is_begun and source.has_room():
            consumer.resume([TopicPartition(*source.place)])
            source.is_paused = False

    def _tell_group(self, consumer: Consumer) -> None:
        """Commit offsets for Kafka's own tools to show; Penstock does not use them."""
        news = {p: s.safe + 1 for p, s in self._sources.items() if s.safe is not None}
        changed = {p: at for p, at in news.items() if self._committed.get(p) != at}
        if changed:
            offsets = [TopicPartition(*place, at) for place, at in changed.items()]
            with contextlib.suppress(KafkaException):
                consumer.commit(offsets=offsets, asynchronous=True)
            self._committed.update(changed)

    # The group

    def _assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        for place in places:
            place.offset = OFFSET_BEGINNING  # paused until the connector says where to resume
        consumer.incremental_assign(places) if self._is_cooperative() else consumer.assign(places)
        consumer.pause(places)
        for place in places:
            place_ = (place.topic, place.partition)
            source = PartitionSource(self._cluster(consumer), place_, self._held)
            self._sources[source.place] = source
            self.connector.add(source)

    def _cluster(self, consumer: Consumer) -> str:
        """What identifies this Kafka cluster, whatever the addresses of its brokers."""
        if not self._cluster_id:
            self._cluster_id = str(consumer.list_topics(timeout=ASK_S).cluster_id)
        return self._cluster_id

    def _revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        for place in places:
            source = self._sources.pop((place.topic, place.partition), None)
            if source is not None:
                self.connector.give_back(source.name)
        if self._is_cooperative():
            consumer.incremental_unassign(places)
        else:
            consumer.unassign()

    def _is_cooperative(self) -> bool:
        return "cooperative" in str(self._settings.get("partition.assignment.strategy", ""))


def size_of(item: Item) -> int:
    return len(item.data) + len(item.key or b"") + MESSAGE_BYTES
