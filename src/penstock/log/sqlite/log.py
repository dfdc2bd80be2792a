"""The embedded engine: a log in one SQLite file, used by any number of processes at once."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import apsw
import msgspec

from penstock.errors import (
    CommitOutcomeUnknownError,
    LogBusyError,
    LogError,
    LogFullError,
    LogIOError,
    PenstockError,
    UsageError,
)
from penstock.failpoints import failpoint
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
from penstock.log.checks import check_call, check_limits, may_be_over
from penstock.log.compose import Composer, EventOptions
from penstock.log.names import OBJECTS, check_producer
from penstock.log.objects import (
    ACKS_ORDER,
    Change,
    Defaults,
    ObjectChanged,
    Stream,
    describe_change,
    system_streams,
    to_event,
)
from penstock.log.sqlite import connection as sqlite
from penstock.log.sqlite.check import Verifier, back_up
from penstock.log.sqlite.committer import Committer, Write
from penstock.log.sqlite.objects import Changer, Directory, create_system_objects, stream_in
from penstock.log.sqlite.reading import Reader, Waiter
from penstock.log.sqlite.tables import Tables, write_pin
from penstock.log.sqlite.upkeep import Housekeeper
from penstock.log.sqlite.writing import (
    Prepared,
    StreamChangedError,
    check_holder,
    place,
    prepare_part,
    prepare_piece,
    write_commit,
    write_stage,
)
from penstock.records.event import JsonValue, microseconds, now_us

T = TypeVar("T")
PREPARE_TRIES_MAX = 20
PIN_S_MAX = 24 * 3600.0
UNPIN_MS_MAX = 1_000


class SqliteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the embedded engine, beside the limits.

    `upkeep_interval_ms` is how often a process that writes looks after the log; 0 is never. With
    `read_only` nothing is written, not even beside the file if its directory is read-only.
    """

    upkeep_interval_ms: int = 2_000
    read_only: bool = False
    vfs: str | None = None


class SqliteLog:
    """See `penstock.log.api.Log` for what each method promises."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        limits: Limits = Limits(),
        defaults: Defaults = Defaults(),
        options: SqliteOptions = SqliteOptions(),
    ) -> None:
        self._path = path
        self._create = create
        self._limits = limits
        self._defaults = defaults
        self._options = options
        self._open = False
        self._pool = sqlite.ReaderPool(path, options.vfs)
        self._reader = Reader(self._pool)
        self._waiter = Waiter(self._pool)
        self._tables = Tables(self._pool)
        self._directory = Directory()
        self._committer = Committer(
            path, options.vfs, self._waiter.tell, read_only=options.read_only
        )
        self._caretaker = Caretaker(options.upkeep_interval_ms / 1000, self._keep_up)
        self._housekeeper = Housekeeper(self._pool, self._submit_quietly, limits)
        self._composer = Composer("penstock", limits)
        self._uncertain: set[tuple[str, int]] = set()

    def open(self) -> Self:
        """Open or create the file. Raises `LogFormatError` and other kinds of `LogError`."""
        sqlite.check_sqlite_version()
        if self._options.read_only:
            self._pool.restrict(sqlite.reading_access(self._path, self._options.vfs))
        else:
            sqlite.prepare_file(self._path, self._options.vfs, self._create)
            if not self.namespaces():
                self._submit(self._populate)
        self._open = True
        return self

    def _populate(self, write: Write) -> None:
        if not write.look("namespaces"):
            create_system_objects(write, self._changer(write), system_streams())

    def close(self) -> None:
        self._open = False
        self._caretaker.close()
        self._waiter.close()
        self._committer.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self if self._open else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return str(self._path)

    @property
    def limits(self) -> Limits:
        return self._limits

    # Objects

    def namespaces(self) -> list[str]:
        with self._pool.lend() as connection:
            return [row[0] for row in sqlite.many(connection, "namespaces")]

    def streams(self) -> list[Stream]:
        with self._pool.lend() as connection:
            return self._directory.all(connection)

    def stream(self, name: str) -> Stream:
        with self._pool.lend() as connection:
            return self._directory.get(connection, name)

    def apply(self, changes: Sequence[Change]) -> None:
        changes = list(changes) if isinstance(changes, Sequence) else [changes]

        def work(write: Write) -> None:
            notes: list[ObjectChanged] = []
            self._changer(write).apply(
                changes,
                lambda change, before: notes.append(
                    to_event(change, describe_change(change, before))
                ),
            )
            self._note(write, notes)

        self._submit(work)

    def _changer(self, write: Write) -> Changer:
        return Changer(write, self._defaults, self._limits.partitions_max)

    def _note(self, write: Write, notes: Sequence[ObjectChanged]) -> None:
        """Append to `_system.objects` inside the change's own transaction."""
        if not notes:
            return
        stream = stream_in(write, OBJECTS)
        events = [self._composer.admit(stream, note, EventOptions(), system=True) for note in notes]
        part = self._composer.part(stream, events)
        prepared = prepare_part(stream, part, self._limits, CommitOptions())
        number = write.next_commit()
        place(write, prepared, number, pinned=False)
        failpoint("objects.event")

    # Writing

    def hold(self, producer: str, *, ephemeral: bool = False) -> Holder:
        check_producer(producer)

        def work(write: Write) -> Holder:
            write.epoch += 1
            values = {
                "name": producer,
                "epoch": write.epoch,
                "ephemeral": int(ephemeral),
                "now": write.time_us,
            }
            write.run("hold_producer", values)
            failpoint("hold.epoch")
            return Holder(producer, write.epoch)

        return self._submit(work)

    def last_commit(self, producer: str) -> Committed | None:
        with self._pool.lend() as connection:
            row = sqlite.one(connection, "producer", producer)
        if row is None or row[2] is None:
            return None
        return msgspec.msgpack.decode(row[2], type=Committed)

    def prepare(self, part: Part, options: CommitOptions = CommitOptions()) -> Part:
        ready = self._prepare_part(part, options)
        return msgspec.structs.replace(part, ready=ready)

    def _prepare_part(
        self, part: Part, options: CommitOptions, *, staged: bool = False
    ) -> Prepared:
        stream = self.stream(part.stream)
        if isinstance(part.ready, Prepared) and part.ready.stream is stream:
            return part.ready
        return prepare_part(stream, part, self._limits, options, staged=staged)

    def stage(
        self, holder: Holder, sequence: int, part: Part, options: CommitOptions = CommitOptions()
    ) -> Piece:
        check_call(sequence, options)
        check_limits(Commit(parts=[part]), self._limits)

        def attempt() -> Piece:
            prepared = self._prepare_part(part, options, staged=True)
            return self._submit(
                lambda write: write_stage(write, holder, sequence, prepared),
                durable=self._durable([prepared.stream], options),
                timeout_ms=options.timeout_ms,
            )

        piece = self._until_steady(attempt, part.stream)
        failpoint("stage.committed")
        return piece

    def commit(
        self,
        holder: Holder,
        sequence: int,
        commit: Commit,
        options: CommitOptions = CommitOptions(),
    ) -> Committed:
        check_call(sequence, options)
        check_limits(commit, self._limits)
        name = (holder.producer, sequence)
        try:
            done = self._until_steady(lambda: self._commit(holder, sequence, commit, options), name)
        except CommitOutcomeUnknownError:
            self._uncertain.add(name)
            raise
        except PenstockError as error:
            last = self.last_commit(holder.producer) if may_be_over(error) else None
            if last is not None and last.sequence == sequence:
                self._uncertain.discard(name)
                return self._repeat(holder, last, options)
            if name not in self._uncertain:
                raise
            if not error.retriable:
                self._uncertain.discard(name)
            raise CommitOutcomeUnknownError(
                f"an earlier try of this commit may have happened, and now {error}"
            ) from error
        self._uncertain.discard(name)
        return done

    def _repeat(self, holder: Holder, last: Committed, options: CommitOptions) -> Committed:
        """The outcome of a commit that has happened, although it could not be prepared again."""

        def work(write: Write) -> None:
            check_holder(write, holder)
            write.dirty = True  # so that it is synced, as the first time

        self._submit(work, durable=self._durable([], options))
        return msgspec.structs.replace(last, repeated=True)

    def _commit(
        self, holder: Holder, sequence: int, commit: Commit, options: CommitOptions
    ) -> Committed:
        prepared = self._prepare(commit, options)
        failpoint("commit.prepared")
        progress = dict(commit.progress)
        done = self._submit(
            lambda write: write_commit(write, holder, sequence, prepared, progress),
            durable=self._durable([item.stream for item in prepared], options),
            timeout_ms=options.timeout_ms,
        )
        self._caretaker.start()
        return done

    def _prepare(self, commit: Commit, options: CommitOptions) -> list[Prepared]:
        prepared = [self._prepare_part(part, options) for part in commit.parts]
        if commit.pieces:
            with self._pool.lend() as connection:
                for piece in commit.pieces:
                    stream = self._directory.get(connection, piece.stream)
                    prepared.append(prepare_piece(connection, stream, piece))
        return prepared

    @staticmethod
    def _durable(streams: Sequence[Stream], options: CommitOptions) -> bool:
        """Whether COMMIT must wait for the disk: unless everything asks only for `write`."""
        if options.acks is not None:
            return ACKS_ORDER[options.acks] > 0
        return not streams or any(ACKS_ORDER[stream.spec.acks] > 0 for stream in streams)

    def _until_steady(self, attempt: Callable[[], T], what: object) -> T:
        for _ in range(PREPARE_TRIES_MAX):
            try:
                return attempt()
            except StreamChangedError:
                continue
        raise LogError(f"{what}: the stream kept changing while events were written to it")

    def progress(self, key: str) -> bytes | None:
        with self._pool.lend() as connection:
            row = sqlite.one(connection, "progress", key)
        return None if row is None else bytes(row[0])

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        with self._pool.lend() as connection:
            rows = sqlite.many(connection, "progress_items", {"prefix": prefix})
            return dict(rows)

    # Reading

    def offsets(self, stream: str) -> dict[int, Offsets]:
        return self._reader.offsets(self.stream(stream))

    def offset_at(self, stream: str, partition: int, time: dt.datetime) -> int:
        return self._reader.offset_at(self.stream(stream), partition, microseconds(time))

    def advance(self, stream: str, partition: int, start: int, rows: int) -> int:
        del stream, partition  # offsets have no gaps here
        return start + rows

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        del stream, partition
        return Count(max(0, end - start))

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        return self._reader.read(self.stream(stream), partition, start, end)

    def wait(self, stream: str, positions: Mapping[int, int], timeout_s: float) -> bool:
        return self._waiter.wait(self.stream(stream), positions, timeout_s)

    # Tables

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[Entry | None]:
        del settled  # a commit is seen by everybody as soon as it is one
        return self._tables.get(self.stream(stream), keys, at)

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[Entry]:
        return self._tables.page(self.stream(stream), after, limit, at, self._limits.page_rows_max)

    def snapshot(self, stream: str) -> Iterator[list[Entry]]:
        return self._tables.snapshot(self.stream(stream))

    def pin(self, duration_s: float = 600.0) -> Pin:
        if not 0 < duration_s <= PIN_S_MAX:
            raise UsageError(f"a pin lasts up to {PIN_S_MAX} seconds, not {duration_s}")
        return self._submit(lambda write: write_pin(write, duration_s), durable=False)

    def unpin(self, pin: Pin) -> None:
        # It ends by itself: nobody's work is to fail because it could not be given back early.
        with contextlib.suppress(LogBusyError, LogFullError, LogIOError):
            self._submit(
                lambda write: write.run("delete_pin", int(pin.token)),
                durable=False,
                timeout_ms=UNPIN_MS_MAX,
            )

    # Upkeep

    def maintain(self) -> Upkeep:
        return self._housekeeper.round(self.streams())

    def _keep_up(self) -> None:
        """A round in the background, unless another process did one just now."""
        values = {
            "now": now_us(),
            "interval": self._options.upkeep_interval_ms * 1000 // 2,
        }

        def claim(write: Write) -> int:
            before = write.connection.total_changes()
            write.run("claim_maintenance", values)
            write.dirty = write.connection.total_changes() > before
            return int(write.dirty)

        if self._submit_quietly(claim):
            self.maintain()

    def verify(self, progress: Progress | None = None) -> Iterator[Damage]:
        return Verifier(self._pool, progress).run(self._directory)

    def backup(self, target: Path, progress: Progress | None = None) -> None:
        back_up(self._pool, target, progress)

    def facts(self) -> dict[str, JsonValue]:
        with self._pool.lend() as connection:
            batches = sqlite.one(connection, "batch_count")
            streams = len(sqlite.many(connection, "stream_names"))
        wal = sqlite.wal_of(self._path)
        return {
            "engine": "embedded",
            "path": str(self._path),
            "format": sqlite.FORMAT,
            "sqlite": apsw.sqlite_lib_version(),
            "bytes": self._path.stat().st_size,
            "wal_bytes": wal.stat().st_size if wal.exists() else 0,
            "streams": streams,
            "upkeep_error": self._caretaker.last_error,
            "batches": int(batches[0]) if batches else 0,
        }

    # Inside

    def _submit(
        self, work: Callable[[Write], T], *, durable: bool = True, timeout_ms: int = 30_000
    ) -> T:
        return self._committer.submit(work, durable=durable, timeout_s=timeout_ms / 1000)

    def _submit_quietly(self, work: Callable[[Write], int]) -> int:
        return self._submit(work, durable=False)
