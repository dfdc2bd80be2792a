"""The Kafka engine: a log in a Kafka cluster, used by any number of machines at once."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from confluent_kafka import libversion

from penstock.errors import (
    ClosedError,
    DamagedError,
    LogAccessError,
    LogError,
    LogFormatError,
    UsageError,
)
from penstock.log.api import (
    Commit,
    CommitOptions,
    Committed,
    Count,
    Damage,
    Holder,
    Limits,
    Offsets,
    Part,
    Piece,
    Pin,
    Report,
    TableEntry,
    Upkeep,
)
from penstock.log.batch import Batch
from penstock.log.declaring.names import check_producer
from penstock.log.declaring.objects import (
    Change,
    Defaults,
    ObjectChanged,
    Stream,
    StreamSpec,
    describe_change,
    system_streams,
    to_event,
)
from penstock.log.engine.caretaker import Caretaker
from penstock.log.engine.checks import check_call, check_limits
from penstock.log.kafka.applier import Applier
from penstock.log.kafka.client import Address, Cluster, KafkaOptions
from penstock.log.kafka.health import Health, health
from penstock.log.kafka.ledger import Ledger
from penstock.log.kafka.objects import FORMATS, Draft, KafkaCatalogue, KafkaStream, StreamGoneError
from penstock.log.kafka.producers import Producers
from penstock.log.kafka.reading import KafkaReader
from penstock.log.kafka.session import Sessions
from penstock.log.kafka.staging import Staging
from penstock.log.kafka.store import FILE_FORMAT
from penstock.log.kafka.tables import KafkaTables
from penstock.log.kafka.topics import PIN_MS_MAX, Topics, own_topics
from penstock.log.kafka.upkeep import KafkaHousekeeper
from penstock.log.kafka.writing import KafkaWriter
from penstock.log.writing.compose import Composer
from penstock.records.event import JsonValue, microseconds
from penstock.resources import cache_folder

T = TypeVar("T")


class KafkaLog:
    """See `penstock.log.api.Log` for what each method promises."""

    def __init__(
        self,
        address: Address,
        *,
        create: bool = True,
        limits: Limits = Limits(),
        defaults: Defaults = Defaults(),
        options: KafkaOptions = KafkaOptions(),
        settings: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        self._address = address
        self._create = create
        self._limits = limits
        self._defaults = defaults
        self._options = options
        self._cluster = Cluster(address, options, settings or {})
        self._catalogue = KafkaCatalogue(self._cluster)
        self._sessions = Sessions(self._cluster)
        self._ledger = Ledger(self._cluster)
        self._producers = Producers(self._sessions, self._ledger, self._catalogue)
        self._staging = Staging(self._cluster)
        self._reader = KafkaReader(self._cluster, limits, self._catalogue.check_there)
        self._composer = Composer("penstock", limits)
        self._opened = False
        self._process = os.getpid()
        self._caretaker = Caretaker(options.upkeep_interval_ms / 1000, self.maintain)
        self._closing = contextlib.ExitStack()
        """Closes everything in reverse order, however far opening got."""
        for part in (self._catalogue, self._ledger, self._reader, self._staging, self._sessions):
            self._closing.callback(part.close)

    def open(self) -> Self:
        """Find the log in the cluster, or create it.

        Raises `LogUnreachableError`, `LogAccessError`, or `LogFormatError` if there is none.
        """
        there = self._cluster.metadata("looking for the cluster")
        copies = min(3, len(there.brokers))
        if self._defaults.replication is None:
            self._defaults = msgspec.structs.replace(self._defaults, replication=copies)
        topics = own_topics(self._options)
        missing = {n: v for n, v in topics.items() if self._address.own(n) not in there.topics}
        if self._catalogue.topic not in there.topics:
            if not self._create:
                raise LogFormatError(
                    f"there is no log at {self._address.url}: create a stream there first "
                    "(penstock stream create)"
                )
            Topics(self._cluster).make_own(topics, copies)
        elif missing:  # made by an earlier version; readers need no permission to add them
            with contextlib.suppress(LogAccessError):
                Topics(self._cluster).make_own(missing, copies)
        self._applier = Applier(
            self._cluster,
            self._sessions,
            self._catalogue,
            self._composer,
            self._defaults,
            self._limits.partitions_max,
        )
        self._catalogue.look()
        if self._catalogue.about() is None:
            self._applier.change(self._populate)
        about = self._catalogue.about()
        if about is None or about.format not in FORMATS:
            found = "damaged" if about is None else f"of format {about.format}"
            raise LogFormatError(
                f"the log at {self._address.url} is {found}: this version reads "
                f"{' and '.join(map(str, FORMATS))}"
            )
        with contextlib.suppress(LogError):  # a process that may only read leaves this to others
            self._applier.finish_leftovers()
        self._tables = KafkaTables(self._cluster, self._reader, self._limits, self._cache(about.id))
        self._writer = KafkaWriter(
            self._cluster, self._producers, self._staging, self._tables, self._limits
        )
        self._housekeeper = KafkaHousekeeper(
            self._cluster, self._producers, self._ledger, self._staging, self._tables.store
        )
        self._closing.callback(self._tables.store.close)
        self._closing.callback(self._caretaker.close)
        self._opened = True
        return self

    def _cache(self, log_id: str) -> Path:
        """Where tables are materialised: one file per log, shared by this machine's processes."""
        folder = self._options.cache or cache_folder("tables", "PENSTOCK_CACHE")
        return Path(folder) / f"{log_id}.{FILE_FORMAT}.db"

    def _populate(self, draft: Draft) -> list[ObjectChanged]:
        if draft.is_empty:
            draft.populate(system_streams())
        return []

    def close(self) -> None:
        self._opened = False
        self._cluster.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self if self._opened else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def limits(self) -> Limits:
        return self._limits

    def _check_open(self) -> None:
        if not self._opened:
            raise ClosedError(f"log {self.url} is closed")
        if os.getpid() != self._process:
            raise ClosedError(
                f"log {self.url} was opened before this process was forked: open it in the "
                "process that uses it"
            )

    # Objects

    def namespaces(self) -> list[str]:
        self._check_open()
        return self._catalogue.namespaces()

    def streams(self) -> list[Stream]:
        self._check_open()
        return list(self._catalogue.streams())

    def stream(self, name: str) -> Stream:
        self._check_open()
        return self._catalogue.stream(name)

    def apply(self, changes: Sequence[Change]) -> None:
        self._check_open()
        changes = list(changes) if isinstance(changes, Sequence) else [changes]

        def work(draft: Draft) -> list[ObjectChanged]:
            notes = []
            for change in changes:
                before = draft.change(change)
                notes.append(to_event(change, describe_change(change, before)))
            return notes

        self._applier.change(work)

    def adopt(self, spec: StreamSpec) -> None:
        """Make an existing topic a stream of the log.

        The topic is used as it is: its partitions are the stream's, and it keeps its own retention.
        Raises `UsageError` if there is no such topic, or if its number of partitions differs.
        """
        self._check_open()
        self._applier.change(lambda draft: [draft.adopt(spec)])

    # Writing

    def hold(self, producer: str, *, ephemeral: bool = False) -> Holder:
        self._check_open()
        check_producer(producer)
        return self._producers.hold(producer, ephemeral)

    def last_commit(self, producer: str) -> Committed | None:
        self._check_open()
        found = self._ledger.producer(producer)
        return None if found is None else found.committed

    def prepare(self, part: Part, options: CommitOptions = CommitOptions()) -> Part:
        self._check_open()
        check_call(0, options)
        return self._writer.prepare(part)

    def stage(
        self, holder: Holder, sequence: int, part: Part, options: CommitOptions = CommitOptions()
    ) -> Piece:
        self._check_open()
        check_call(sequence, options)
        check_limits(Commit(parts=[part]), self._limits)
        with self._cluster.within(time.monotonic() + options.timeout_ms / 1000):
            return self._writer.stage(holder, sequence, part, options)

    def commit(
        self,
        holder: Holder,
        sequence: int,
        commit: Commit,
        options: CommitOptions = CommitOptions(),
    ) -> Committed:
        self._check_open()
        check_call(sequence, options)
        check_limits(commit, self._limits)
        done = self._writer.commit(holder, sequence, commit, options)
        if commit.pieces:
            self._caretaker.start()
        return done

    def progress(self, key: str) -> bytes | None:
        self._check_open()
        return self._ledger.progress(key)

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        self._check_open()
        return self._ledger.progress_items(prefix)

    # Reading

    def _find(self, name: str) -> KafkaStream:
        self._check_open()
        return self._catalogue.stream(name)

    def _on(self, name: str, ask: Callable[[KafkaStream], T]) -> T:
        """Call `ask` with a stream."""
        return self._on_all(lambda: [self._find(name)], lambda found: ask(found[0]))

    def _on_all(
        self, find: Callable[[], list[KafkaStream]], ask: Callable[[list[KafkaStream]], T]
    ) -> T:
        """Call `ask` with streams; again if one turns out to be dropped, or recreated meanwhile."""
        self._check_open()
        streams = find()
        try:
            with self._cluster.watching(lambda: self._catalogue.check_there(*streams)):
                return ask(streams)
        except StreamGoneError:
            return ask(find())

    def offsets(self, stream: str) -> dict[int, Offsets]:
        return self._on(stream, self._reader.offsets)

    def offset_at(self, stream: str, partition: int, time: dt.datetime) -> int:
        time_us = microseconds(time)
        return self._on(stream, lambda found: self._reader.offset_at(found, partition, time_us))

    def advance(self, stream: str, partition: int, start: int, rows: int) -> int:
        del stream, partition
        return start + rows  # every event has its own offset; so have transaction markers

    def retreat(self, stream: str, partition: int, end: int, rows: int) -> int:
        del stream, partition
        return max(0, end - rows)

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        del stream, partition
        distance = max(0, end - start)  # transaction markers and compacted events are counted too
        return Count(distance, is_exact=distance == 0)

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        return self._reader.read(self._find(stream), partition, start, end)

    def wait(self, places: Mapping[str, Mapping[int, int]], timeout_s: float) -> bool:
        found = [(self._find(name), wanted) for name, wanted in places.items()]
        return self._reader.wait(found, timeout_s)

    # Tables

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[TableEntry | None]:
        return self._on(stream, lambda found: self._tables.get(found, keys, at, settled=settled))

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[TableEntry]:
        return self._on(stream, lambda found: self._tables.page(found, after, limit, at))

    def snapshot(self, stream: str) -> Iterator[list[TableEntry]]:
        return self._tables.snapshot(self._find(stream))

    def pin(self, duration_s: float = 600.0) -> Pin:
        if not 0 < duration_s * 1000 <= PIN_MS_MAX:
            raise UsageError(f"a pin can last up to {PIN_MS_MAX // 1000} seconds, not {duration_s}")
        return self._on_all(
            self._catalogue.streams, lambda found: self._tables.pin(found, duration_s)
        )

    def unpin(self, pin: Pin) -> None:
        self._tables.unpin(pin)

    # Upkeep

    def maintain(self) -> Upkeep:
        self._check_open()
        self._applier.finish_leftovers()
        return self._on_all(self._catalogue.streams, self._housekeeper.round)

    def verify(self, progress: Report | None = None) -> Iterator[Damage]:
        """Read every message of every stream; those that cannot be decoded are damage."""
        self._check_open()
        parts = [
            (stream, partition, found)
            for stream in self._catalogue.streams()
            for partition, found in self._reader.offsets(stream).items()
        ]
        sizes = [
            self.count(str(stream.name), partition, found.first, found.next).events
            for stream, partition, found in parts
        ]
        done = 0
        for (stream, partition, found), size in zip(parts, sizes, strict=True):
            yield from self._verify(stream, partition, found)
            done += size
            if progress is not None:
                progress(done, sum(sizes))

    def _verify(self, stream: KafkaStream, partition: int, found: Offsets) -> Iterator[Damage]:
        at = found.first
        while at < found.next:
            try:
                for batch in self._reader.read(stream, partition, at, found.next):
                    at = batch.next_offset
                return
            except DamagedError as error:
                yield Damage(
                    str(error), str(stream.name), partition, error.first_offset, error.last_offset
                )
                at = error.last_offset + 1

    def backup(self, target: Path, progress: Report | None = None) -> None:
        del progress
        raise UsageError(
            f"a log on Kafka cannot be copied to {target}: replicate its topics with Kafka's own "
            "tools (MirrorMaker), or raise the replication of its streams"
        )

    def health(self) -> Health:
        """The health of the cluster, and the leaders and replicas of the streams' partitions."""
        self._check_open()
        return health(self._cluster, self._catalogue.streams())

    def facts(self) -> dict[str, JsonValue]:
        there = self._cluster.metadata("looking at the cluster")
        return {
            "engine": "kafka",
            "url": self.url,
            "format": getattr(self._catalogue.about(), "format", 0),
            "librdkafka": libversion()[0],
            "cluster": there.cluster_id or "",
            "brokers": len(there.brokers),
            "streams": len(self.streams()),
            "tables": str(self._tables.store.path),
            "upkeep_error": self._caretaker.last_error,
        }


def open_kafka(
    url: str,
    *,
    create: bool,
    limits: Limits,
    defaults: Defaults,
    options: KafkaOptions,
    settings: Mapping[str, str | int | bool],
) -> KafkaLog:
    log = KafkaLog(
        Address.parse(url),
        create=create,
        limits=limits,
        defaults=defaults,
        options=options,
        settings=settings,
    )
    try:
        return log.open()
    except BaseException:
        log.close()
        raise
