"""Clients of a Kafka cluster: their settings, the meaning of their errors, and requests to it.

Every wait has a limit. librdkafka's log messages go to the logger `penstock.kafka`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ClusterMetadata
from confluent_kafka.admin._listoffsets import OffsetSpec

from penstock.errors import (
    ClosedError,
    LimitError,
    LogAccessError,
    LogBusyError,
    LogError,
    LogUnreachableError,
    UsageError,
)
from penstock.log.declaring.names import StreamName

T = TypeVar("T")
_log = logging.getLogger("penstock.kafka")
_log.addHandler(logging.NullHandler())

_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\[\]/]+):\d{1,5}")
RETRY_PAUSE_S = 0.02
ATTEMPT_S = 2.0

#: the broker will know better in a moment: a topic was just created, or a leader just moved
MOMENTARY = frozenset({
    KafkaError._NOENT, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC,
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR, KafkaError.REPLICA_NOT_AVAILABLE, KafkaError.NOT_CONTROLLER,
    KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.CONCURRENT_TRANSACTIONS,
})  # fmt: skip
#: the topic or partition does not exist: not yet, or no longer
MISSING = frozenset({
    KafkaError._NOENT, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC,
})  # fmt: skip
_UNREACHABLE = frozenset({
    KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE, KafkaError._MSG_TIMED_OUT, KafkaError._RESOLVE,
    KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION, KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
})  # fmt: skip
REFUSED = frozenset({
    KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL,
    KafkaError.UNSUPPORTED_SASL_MECHANISM, KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SECURITY_DISABLED,
})  # fmt: skip
#: the same message will be refused again
_NEVER = frozenset({
    KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_EXCEPTION, KafkaError.UNSUPPORTED_VERSION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT, KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
})  # fmt: skip
#: what was to be read has been removed
GONE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
#: another producer has taken the transactional id since
FENCED = frozenset({
    KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
})  # fmt: skip


class KafkaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Kafka engine, besides the limits.

    `broker_timeout_ms` limits every request to the cluster; `transaction_timeout_ms` is the time
    after which the cluster aborts the transaction of a process that died; `staged_retention_ms` is
    how long staged events are kept for their commit. `cache` is the folder in which tables are
    materialised (by default PENSTOCK_CACHE). `upkeep_interval_ms` is how often a process that
    commits removes events that were staged but never committed; 0 means never. `sessions_max` is
    how many transactional producers are kept open. Options with a dot in their name are
    librdkafka's own.
    """

    broker_timeout_ms: int = 30_000
    transaction_timeout_ms: int = 20_000
    staged_retention_ms: int = 3_600_000
    upkeep_interval_ms: int = 10_000
    sessions_max: int = 32
    cache: str | None = None


class Address(msgspec.Struct, frozen=True):
    """What a `kafka://` URL names: a cluster, and one of the logs in it."""

    url: str
    servers: str
    prefix: str

    @staticmethod
    def parse(url: str) -> Address:
        """Parse `kafka://host:port,…/prefix`. Raises `UsageError` if it is not valid."""
        parts = urlsplit(url)
        servers = [server.strip() for server in parts.netloc.split(",")]
        wrong = next((server for server in servers if not _ADDRESS.fullmatch(server)), None)
        if wrong is not None:
            raise UsageError(
                f"{url!r} is not valid: {wrong!r} is not the address of a broker; use "
                "kafka://HOST:PORT, with commas between several brokers"
            )
        prefix = parts.path.strip("/")
        if (prefix and not _PREFIX.fullmatch(prefix)) or parts.query or parts.fragment:
            raise UsageError(
                f"{url!r} is not valid: only a prefix may follow the brokers, which the names of "
                "this log's topics begin with; it has 1 to 40 letters, digits, - and _"
            )
        return Address(url, ",".join(servers), prefix)

    def topic(self, name: StreamName) -> str:
        return self.own(f"{name.namespace}.{name.stream}")

    def own(self, name: str) -> str:
        """A name in the cluster that no other log uses."""
        return f"{self.prefix}.{name}" if self.prefix else name


class Cluster:
    """Makes clients of one cluster and queries its offsets. Thread-safe.

    `settings` are librdkafka's options as given by the user.
    """

    def __init__(
        self, address: Address, options: KafkaOptions, settings: Mapping[str, str | int | bool]
    ) -> None:
        self.address = address
        self.options = options
        self._settings = {name.removeprefix("kafka."): value for name, value in settings.items()}
        self._last_error = ""
        self._admin: AdminClient | None = None
        self._lock = threading.Lock()
        self._local = threading.local()
        self._is_closed = False

    @property
    def timeout_s(self) -> float:
        """How long a request may take: limited by the options, and by `within`."""
        whole = self.options.broker_timeout_ms / 1000
        deadline: float | None = getattr(self._local, "deadline", None)
        return whole if deadline is None else max(0.1, min(whole, deadline - time.monotonic()))

    @property
    def patience_s(self) -> float:
        """The same, if a dead process's transaction may have to be aborted first."""
        if getattr(self._local, "deadline", None) is not None:
            return self.timeout_s
        return self.timeout_s + self.options.transaction_timeout_ms / 1000

    @contextlib.contextmanager
    def within(self, deadline: float) -> Iterator[None]:
        """Let no request of this thread take longer than until the deadline."""
        before: float | None = getattr(self._local, "deadline", None)
        self._local.deadline = deadline
        try:
            yield
        finally:
            self._local.deadline = before

    @contextlib.contextmanager
    def watching(self, check: Callable[[], None]) -> Iterator[None]:
        """Call `check` if this thread finds a topic missing; it raises if that is permanent.

        Otherwise the topic is waited for, as it may just have been created.
        """
        before: Callable[[], None] | None = getattr(self._local, "check", None)
        self._local.check = check
        try:
            yield
        finally:
            self._local.check = before

    def _check_missing(self, error: KafkaException | TimeoutError) -> None:
        check: Callable[[], None] | None = getattr(self._local, "check", None)
        if check is None or isinstance(error, TimeoutError) or code_of(error) not in MISSING:
            return
        self._local.check = None  # `check` makes requests too
        try:
            check()
        finally:
            self._local.check = check

    def close(self) -> None:
        """End all waiting for others: for their transactions, or for answers."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise `ClosedError` if closed; called repeatedly by everyone who waits."""
        if self._is_closed:
            raise ClosedError(f"log {self.address.url} is closed")

    # Clients

    def producer(self, **settings: object) -> Producer:
        """A producer without a logger, which would be called in the middle of an error.

        Its log messages about a fatal error, such as being fenced, stay in a queue that nobody
        reads: the error itself is raised.
        """
        fixed = {"log_level": 0, "log.queue": True, "request.timeout.ms": 5000}
        return self._make(Producer, {**fixed, **settings})

    def consumer(self, **settings: object) -> Consumer:
        """A consumer that belongs to no group, and is notified when it reaches the end."""
        fixed: dict[str, object] = {
            "group.id": "penstock-none",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.error.backoff.ms": 20,
            "fetch.queue.backoff.ms": 20,
        }
        return self._make(Consumer, {**fixed, **settings})

    @property
    def admin(self) -> AdminClient:
        with self._lock:
            if self._admin is None:
                self._admin = self._make(AdminClient, {})
            return self._admin

    def _chosen(self, settings: Mapping[str, object]) -> dict[str, object]:
        return {
            "bootstrap.servers": self.address.servers,
            "client.id": "penstock",
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.fast.interval.ms": 20,
            "retry.backoff.ms": 20,
            # A broker that does not answer for this long is abandoned for another.
            "socket.timeout.ms": 6000,
            "socket.keepalive.enable": True,
            **settings,
            **self._settings,
        }

    def _make(self, kind: Callable[..., T], settings: Mapping[str, object]) -> T:
        chosen = self._chosen(settings)
        if kind is not Producer:
            chosen["error_cb"] = self._on_error
        try:
            return kind(chosen, **({} if kind is Producer else {"logger": _log}))
        except KafkaException as error:
            raise UsageError(
                f"librdkafka does not accept these options: {error.args[0].str()}"
            ) from None

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = error.str()

    def _hear(self) -> None:
        """Poll for librdkafka's errors about the connection, which it reports only on a poll."""
        with self._lock:
            if self._admin is not None:
                self._admin.poll(0)

    # Errors

    def translate(self, error: KafkaException | KafkaError | TimeoutError, doing: str) -> Exception:
        """Our error for one of librdkafka's; `doing` says what failed."""
        self._hear()
        if isinstance(error, TimeoutError):
            error = KafkaError(KafkaError._TIMED_OUT)
        found: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
        said = found.str()
        code = found.code()
        if code in REFUSED or _is_refusal(self._last_error):
            return LogAccessError(
                f"{self.address.servers} refuses this client ({doing}): "
                f"{self._last_error or said}; check the options security.protocol, sasl.* and ssl.*"
            )
        if code in (_UNREACHABLE | MOMENTARY):
            detail = f": {self._last_error}" if self._last_error else ""
            return LogUnreachableError(
                f"Kafka at {self.address.servers} did not answer in time ({doing}): {said}{detail}"
            )
        if code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE):
            return LimitError(
                f"{doing}: the message is larger than the topic allows (max.message.bytes)"
            )
        return LogError(f"{doing}: Kafka reports {said}")

    def translate_abort(self, error: KafkaException | KafkaError, doing: str) -> Exception:
        """Our error for what ended a transaction, or a send, that left nothing behind.

        It can be repeated, even after an error that is not known here: only messages that Kafka
        will never accept are given up at once.
        """
        told = self.translate(error, doing)
        found: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
        if type(told) is not LogError or found.code() in _NEVER:
            return told
        return LogBusyError(f"{doing}: Kafka aborted it ({found.str()}): try again")

    def ask(self, doing: str, question: Callable[[float], T], topic: str | None = None) -> T:
        """Make a request; repeat it while the cluster is busy with itself.

        The first attempts have short timeouts, since the broker that was asked may be dead. The
        metadata of the cluster, or only of `topic`, is then refreshed.
        """
        deadline = time.monotonic() + self.timeout_s
        patience_s = ATTEMPT_S
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                answer = question(min(patience_s, left))
                self._last_error = ""  # whatever the error was, it is over
                return answer
            except (KafkaException, TimeoutError) as error:
                self._hear()
                is_over = time.monotonic() > deadline or _is_refusal(self._last_error)
                if is_over or not _may_pass(error):
                    raise self.translate(error, doing) from error
                self._check_missing(error)
            self.check_open()
            patience_s *= 2
            time.sleep(RETRY_PAUSE_S)
            with contextlib.suppress(KafkaException):
                about = () if topic is None else (topic,)
                left = max(0.1, deadline - time.monotonic())
                self.admin.list_topics(*about, timeout=min(ATTEMPT_S, left))

    def collect(
        self, doing: str, futures: Mapping[T, Future[Any]], fine: Sequence[int] = ()
    ) -> dict[T, Any]:
        """The results of an admin request; those that failed with a `fine` code are left out."""
        answers = {}
        for name, future in futures.items():
            try:
                answers[name] = future.result(self.timeout_s)
            except (KafkaException, TimeoutError) as error:
                if isinstance(error, TimeoutError) or code_of(error) not in fine:
                    raise self.translate(error, doing) from error
        return answers

    # Questions

    def metadata(self, doing: str) -> ClusterMetadata:
        """Brokers, controller and topics, as the cluster knows them."""
        return self.ask(doing, lambda left: self.admin.list_topics(timeout=left))

    def topics(self) -> dict[str, int]:
        """All topics, with their number of partitions."""
        found = self.metadata("listing topics").topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def ends(
        self, partitions: Sequence[tuple[str, int]], *, committed: bool
    ) -> dict[tuple[str, int], int]:
        """The offset after the last event: the last committed one, or the last one written."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(partitions, OffsetSpec.latest(), level)

    def wait_for_ends(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The ends of partitions, once everything written before this call can be read.

        A commit may be acknowledged before its markers are written.
        """
        ends = self.ends(partitions, committed=False)
        deadline = time.monotonic() + self.patience_s
        while any(seen < ends[at] for at, seen in self.ends(partitions, committed=True).items()):
            if time.monotonic() > deadline:
                topic = partitions[0][0]
                raise LogUnreachableError(f"{topic} could not be read to its end in time")
            self.check_open()
            time.sleep(0.002)
        return ends

    def firsts(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        level = IsolationLevel.READ_UNCOMMITTED
        return self._offsets(partitions, OffsetSpec.earliest(), level)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        """The first offset with timestamp `time_ms` or later; `None` if there is none."""
        spec = OffsetSpec.for_timestamp(time_ms)
        level = IsolationLevel.READ_UNCOMMITTED
        found = self._offsets([(topic, partition)], spec, level)[topic, partition]
        return None if found < 0 else found

    def _offsets(
        self, partitions: Sequence[tuple[str, int]], spec: OffsetSpec, level: IsolationLevel
    ) -> dict[tuple[str, int], int]:
        if not partitions:
            return {}

        def question(left: float) -> dict[tuple[str, int], int]:
            wanted = {TopicPartition(*place): spec for place in partitions}
            answers = self.admin.list_offsets(wanted, isolation_level=level, request_timeout=left)
            found = {
                (place.topic, place.partition): int(answer.result(left).offset)
                for place, answer in answers.items()
            }
            if OFFSET_INVALID in found.values():  # a broker did not answer in time
                raise _timeout_error()
            return found

        topic = partitions[0][0]
        return self.ask(f"asking for offsets of {topic}", question, topic)


def _timeout_error() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))


def _is_refusal(said: str) -> bool:
    words = ("SASL auth", "SSL handshake", "authenticat", "certificate")
    return any(word in said for word in words)


def _may_pass(error: KafkaException | TimeoutError) -> bool:
    return isinstance(error, TimeoutError) or code_of(error) in (MOMENTARY | _UNREACHABLE)


def code_of(error: KafkaException) -> int:
    return int(error.args[0].code())
