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
    Entry,
    Holder,
    Limits,
    Offsets,
    Part,
    Piece,
    Pin,
    Progress,
    Upkeep,
)
from penstock.log.batch import Batch
from penstock.log.caretaker import Caretaker
from penstock.log.checks import check_call, check_limits
from penstock.log.compose import Composer
from penstock.log.folders import cache_folder
from penstock.log.kafka.applier import Applier
from penstock.log.kafka.client import Address, Cluster, KafkaOptions
from penstock.log.kafka.health import Health, health
from penstock.log.kafka.ledger import Ledger
from penstock.log.kafka.objects import FORMATS, Catalogue, Draft, KafkaStream, StreamGoneError
from penstock.log.kafka.producers import Producers
from penstock.log.kafka.reading import Reader
from penstock.log.kafka.session import Sessions
from penstock.log.kafka.staging import Staging
from penstock.log.kafka.store import FILE_FORMAT
from penstock.log.kafka.tables import Tables
from penstock.log.kafka.topics import PIN_MS_MAX, Topics, own_topics
from penstock.log.kafka.upkeep import Housekeeper
from penstock.log.kafka.writing import Writer
from penstock.log.names import check_producer
from penstock.log.objects import (
    Change,
    Defaults,
    ObjectChanged,
    Stream,
    StreamSpec,
    describe_change,
    system_streams,
    to_event,
)
from penstock.records.event import JsonValue, microseconds

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
        self._catalogue = Catalogue(self._cluster)
        self._sessions = Sessions(self._cluster)
        self._ledger = Ledger(self._cluster)
        self._producers = Producers(self._sessions, self._ledger, self._catalogue)
        self._staging = Staging(self._cluster)
        self._reader = Reader(self._cluster, limits, self._catalogue.check_there)
        self._composer = Composer("penstock", limits)
        self._opened = False
        self._process = os.getpid()
        self._caretaker = Caretaker(options.upkeep_interval_ms / 1000, self.maintain)
        self._closing = contextlib.ExitStack()
        """Closes everything, the last one first, however far opening got."""
        for part in (self._catalogue, self._ledger, self._reader, self._staging, self._sessions):
            self._closing.callback(part.close)

    def open(self) -> Self:
        """Find the log in the cluster, or make it.

        Raises `LogUnreachableError`, `LogAccessError`, or `LogFormatError` if there is none.
        """
        there = self._cluster.metadata("looking for the cluster")
        copies = min(3, len(there.brokers))
        if self._defaults.replication is None:
            self._defaults = msgspec.structs.replace(self._defaults, replication=copies)
        if self._catalogue.topic not in there.topics:
            if not self._create:
                raise LogFormatError(
                    f"there is no log at {self._address.url}: create a stream there first "
                    "(penstock stream create)"
                )
            Topics(self._cluster).make_own(own_topics(self._options), copies)
        self._applier = Applier(
            self._cluster, self._sessions, self._catalogue, self._composer, self._defaults,
            self._limits.partitions_max,
        )  # fmt: skip
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
        with contextlib.suppress(LogError):  # who may only read leaves it to others
            self._applier.settle_leftovers()
        self._tables = Tables(self._cluster, self._reader, self._limits, self._cache(about.id))
        self._writer = Writer(
            self._cluster, self._producers, self._ledger, self._catalogue, self._staging,
            self._tables, self._limits,
        )  # fmt: skip
        self._housekeeper = Housekeeper(
            self._cluster, self._producers, self._ledger, self._staging, self._tables.store
        )
        self._closing.callback(self._tables.store.close)
        self._closing.callback(self._caretaker.close)
        self._opened = True
        return self

    def _cache(self, log_id: str) -> Path:
        """Where tables are materialised: a file for each log, shared by the processes here."""
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
            raise ClosedError(f"the log {self.url} is closed")
        if os.getpid() != self._process:
            raise ClosedError(
                f"the log {self.url} was opened before this process was forked: open it in the "
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
        """Make a topic that somebody else made a stream of the log.

        It is there as it is: its partitions are the stream's, its retention stays its own.
        Raises `UsageError` if there is no such topic, or it has another number of partitions.
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

    def _found(self, name: str) -> KafkaStream:
        self._check_open()
        return self._catalogue.stream(name)

    def _on(self, name: str, ask: Callable[[KafkaStream], T]) -> T:
        """Ask of a stream."""
        return self._on_all(lambda: [self._found(name)], lambda found: ask(found[0]))

    def _on_all(
        self, find: Callable[[], list[KafkaStream]], ask: Callable[[list[KafkaStream]], T]
    ) -> T:
        """Ask of streams; again if one turns out to be gone, or another than a moment ago."""
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
        return start + rows  # an event has an offset of its own; so have marks of transactions

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        del stream, partition
        distance = max(0, end - start)  # marks and what was compacted are counted too
        return Count(distance, is_exact=distance == 0)

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        return self._reader.read(self._found(stream), partition, start, end)

    def wait(self, stream: str, positions: Mapping[int, int], timeout_s: float) -> bool:
        return self._reader.wait(self._found(stream), positions, timeout_s)

    # Tables

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[Entry | None]:
        return self._on(stream, lambda found: self._tables.get(found, keys, at, settled=settled))

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[Entry]:
        return self._on(stream, lambda found: self._tables.page(found, after, limit, at))

    def snapshot(self, stream: str) -> Iterator[list[Entry]]:
        return self._tables.snapshot(self._found(stream))

    def pin(self, duration_s: float = 600.0) -> Pin:
        if not 0 < duration_s * 1000 <= PIN_MS_MAX:
            raise UsageError(f"a pin lasts up to {PIN_MS_MAX // 1000} seconds, not {duration_s}")
        return self._on_all(
            self._catalogue.streams, lambda found: self._tables.pin(found, duration_s)
        )

    def unpin(self, pin: Pin) -> None:
        self._tables.unpin(pin)

    # Upkeep

    def maintain(self) -> Upkeep:
        self._check_open()
        self._applier.settle_leftovers()
        return self._on_all(self._catalogue.streams, self._housekeeper.round)

    def verify(self, progress: Progress | None = None) -> Iterator[Damage]:
        """Read every message of every stream; those that cannot be decoded are damage."""
        self._check_open()
        streams = self._catalogue.streams()
        ends = {stream.id: self._reader.offsets(stream) for stream in streams}
        total = sum(found.next - found.first for parts in ends.values() for found in parts.values())
        done = 0
        for stream in streams:
            for partition, found in ends[stream.id].items():
                yield from self._verify(stream, partition, found)
                done += found.next - found.first
                if progress is not None:
                    progress(done, total)
        if progress is not None:
            progress(total, total)

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

    def backup(self, target: Path, progress: Progress | None = None) -> None:
        del progress
        raise UsageError(
            f"a log on Kafka cannot be copied to {target}: replicate its topics with Kafka's own "
            "tools (MirrorMaker), or raise the replication of its streams"
        )

    def health(self) -> Health:
        """How the cluster is doing, and who leads and holds the streams' partitions."""
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
        Address.parse(url), create=create, limits=limits, defaults=defaults, options=options,
        settings=settings,
    )  # fmt: skip
    try:
        return log.open()
    except BaseException:
        log.close()
        raise
