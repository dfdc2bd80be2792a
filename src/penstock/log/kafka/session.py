"""Kafka transactions: who may write under a name, and the outcome of what was written.

A session is an open transactional producer. Opening one makes Kafka finish or abort whatever its
predecessor left, and refuse everything that the predecessor still sends. So after an error that
leaves the outcome open, a session is discarded and another one opened before anything else: a
commit or abort that is still in flight can then never affect a later transaction.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.errors import LogError, LogUnreachableError
from penstock.log.kafka.client import FENCED, MOMENTARY, RETRY_PAUSE_S, Cluster, code_of
from penstock.log.kafka.ledger import TOPIC, LedgerLine, ProducerState
from penstock.log.kafka.messages import Headers

T = TypeVar("T")
KafkaMessage = tuple[bytes | None, bytes | None, Headers]
OnDelivery = Callable[[KafkaError | None, Any], None]
MESSAGE_BYTES_MAX = 32 << 20
QUEUE_KIB = 128 << 10
QUEUE_MESSAGES = 500_000
ABORT_S = 5.0
CHECK_S = 0.5
PARTITION_TRIES_MAX = 100
_openings = itertools.count(1)


class TransactionFailedError(Exception):
    """A Kafka transaction failed; subclasses say what is known about its outcome."""


class NotCommittedError(TransactionFailedError):
    """The transaction certainly did not happen; the cause says why."""


class TakenError(TransactionFailedError):
    """Another process has opened a session of this name; nothing of this one was committed."""


class UnknownError(TransactionFailedError):
    """The transaction may have happened; only a new session of the name can tell."""


class Session:
    """One transactional producer. Used by one thread at a time."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.users = 0
        """How many threads use it, or wait for it."""
        self.state = ProducerState()
        """As read on opening, with what was committed since: nobody else can have changed it."""
        self.opening = 0
        """The number of this opening among all in this process."""
        self.opened_with: dict[str, int] = {}
        """Sessions that write for this one's producer, with the number of their opening."""
        self._cluster = cluster
        self._producer: Producer | None = None

    def open(self) -> None:
        """Fence the previous session of this name, and settle its transaction."""
        deadline = time.monotonic() + self._cluster.timeout_s
        timeout_ms = self._cluster.options.transaction_timeout_ms
        producer = self._cluster.producer(
            **{
                "transactional.id": self._cluster.address.own(f"penstock.{self.name}"),
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": timeout_ms,
                "message.max.bytes": MESSAGE_BYTES_MAX,
                "queue.buffering.max.kbytes": QUEUE_KIB,
                "queue.buffering.max.messages": QUEUE_MESSAGES,
                "linger.ms": 1,
                "compression.type": "lz4",
            }
        )
        # Otherwise the first request would wait for a timer of librdkafka. One topic is enough: a
        # cluster may have thousands.
        topic = self._cluster.address.own(TOPIC)
        doing = "opening a producer"
        self._cluster.ask(doing, lambda left: producer.list_topics(topic, timeout=left))
        while True:
            try:
                producer.init_transactions(max(0.1, deadline - time.monotonic()))
                break
            except KafkaException as error:
                again = error.args[0].retriable() or code_of(error) in MOMENTARY
                if not again or time.monotonic() > deadline:
                    raise self._cluster.translate_abort(
                        error, f"opening producer {self.name}"
                    ) from error
        self._producer = producer
        self.opening = next(_openings)

    @property
    def is_open(self) -> bool:
        return self._producer is not None

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # Queued messages must not be sent. The rest happens when nobody refers to it any more:
            # its own `close` fails if the producer was fenced.
            producer.purge()

    # Inside a transaction

    def send(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> None:
        """Send a message without headers."""
        self._send(topic, partition, key, value, [], None)

    def send_all(
        self,
        topic: str,
        partition: int,
        messages: Iterable[KafkaMessage],
        told: OnDelivery | None = None,
    ) -> None:
        """Send messages in order; `told` is called with the outcome of the first."""
        produce = self._open_producer().produce
        for key, value, headers in messages:
            try:
                produce(topic, value, key, partition, told, headers=headers)
            except (BufferError, KafkaException):
                self._send(topic, partition, key, value, headers, told)
            told = None

    def _send(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        told: OnDelivery | None,
    ) -> None:
        """Send one message; wait if too many are in flight, or the stream has just grown."""
        producer = self._open_producer()
        tries = 0
        while True:
            try:
                producer.produce(topic, value, key, partition, told, headers=headers)
                return
            except BufferError:
                producer.poll(0.05)
            except KafkaException as error:
                if code_of(error) not in MOMENTARY or tries >= PARTITION_TRIES_MAX:
                    raise
                # The stream has grown since the producer last looked.
                tries += 1
                producer.list_topics(topic, timeout=self._cluster.timeout_s)
                time.sleep(RETRY_PAUSE_S)

    def flush(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait until all messages have arrived and their callbacks were called.

        If that takes long, `check` is called from time to time, and may raise the reason:
        librdkafka reports the removal of a topic only after a long time.
        """
        producer = self._open_producer()
        while left := producer.flush(max(0.1, min(CHECK_S, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                servers = self._cluster.address.servers
                raise NotCommittedError from LogUnreachableError(
                    f"{left} messages did not reach Kafka at {servers} in time"
                )
            check()

    def _open_producer(self) -> Producer:
        if self._producer is None:
            raise LogError(f"the session of {self.name} is closed")
        return self._producer

    def save(self, topic: str, line: LedgerLine) -> None:
        """Write one line of the ledger, in a separate transaction."""
        deadline = time.monotonic() + self._cluster.timeout_s
        try:
            self.transact(lambda: self.send(topic, line.partition, line.key, line.value), deadline)
        except NotCommittedError:
            raise
        except BaseException:
            self.close()  # opening it again settles the outcome
            raise

    def transact(self, fill: Callable[[], T], deadline: float) -> T:
        """Send what `fill` sends, in one transaction.

        Raises `NotCommittedError`, `TakenError` or `UnknownError`; after the last two, and if even
        aborting failed, the session is closed.
        """
        producer = self._open_producer()
        try:
            producer.begin_transaction()
            made = fill()
        except KafkaException as error:
            self._undo(producer, error)
            raise NotCommittedError from self._cluster.translate_abort(error, "writing")
        except SystemError as error:
            # How librdkafka's binding raises a fatal error that occurs in a callback.
            self.close()
            raise TakenError from error
        except BaseException:
            self._abort(producer)
            raise
        self._commit(producer, deadline)
        return made

    def _commit(self, producer: Producer, deadline: float) -> None:
        while True:
            try:
                producer.commit_transaction(max(0.1, deadline - time.monotonic()))
                return
            except SystemError as error:
                self.close()
                raise UnknownError from LogError(f"committing: {error}")
            except KafkaException as error:
                found = error.args[0]
                if found.txn_requires_abort():
                    self._undo(producer, error)
                    raise NotCommittedError from self._cluster.translate_abort(error, "committing")
                if not found.retriable() or time.monotonic() > deadline:
                    self.close()
                    # Also if it was fenced: an earlier attempt of this very call may have arrived.
                    raise UnknownError from self._cluster.translate(error, "committing")

    def _undo(self, producer: Producer, error: KafkaException) -> None:
        """Abort the transaction. Raises `TakenError` if the session is no longer ours."""
        if code_of(error) in FENCED or code_of(error) == KafkaError._FATAL:
            self.close()  # this producer can do nothing more, and has committed nothing
            raise TakenError from error
        self._abort(producer)

    def _abort(self, producer: Producer) -> None:
        try:
            producer.abort_transaction(ABORT_S)
        except (KafkaException, SystemError):
            self.close()  # opening the name again aborts it


class Sessions:
    """The open sessions of a log, by name. Thread-safe.

    If there are too many, the least recently used of those not in use are closed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, Session] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[Session]:
        """The session of a name, for exclusive use by this thread; it may have to be opened."""
        with self._lock:
            session = self._known.pop(name, None) or Session(self._cluster, name)
            self._known[name] = session  # most recently used last
            session.users += 1
            idle = [other for other in self._known.values() if not other.users]
            too_many = max(0, len(self._known) - self._cluster.options.sessions_max)
            surplus = idle[:too_many]
            for other in surplus:
                del self._known[other.name]
        for other in surplus:
            other.close()
        try:
            with session.lock:
                yield session
        finally:
            with self._lock:
                session.users -= 1

    def close(self) -> None:
        with self._lock:
            known, self._known = list(self._known.values()), {}
        for session in known:
            with session.lock:
                session.close()
