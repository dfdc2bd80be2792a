"""The log contract: what every engine promises, as a Protocol and its data types.

The promises (numbered as in `penstock.testing.contract`, which tests an engine for them):

1.  Within a partition offsets only increase, and a reader sees every committed event once, in
    offset order. Offsets may have gaps.
2.  Only committed events are visible. A commit may span streams and partitions and becomes
    visible as a whole; on Kafka, partition by partition within moments, and a reader of one
    partition never sees only some of that partition's events.
3.  A commit is named (producer, sequence); sequences increase and may have gaps. Committing the
    producer's latest name again changes nothing and returns its outcome; an older one is
    refused. Opening a producer fences its older holder.
4.  When `commit` returns, the data survive kill -9 and, at acks `majority` and `all`, a power
    failure (or the loss of a minority of brokers). `write` waits for neither.
5.  A commit whose outcome is unknown raises `CommitOutcomeUnknownError`, never "failed";
    repeating it under the same name is always safe.
6.  Progress is saved in the commit and read back by key, never stale.
7.  The key decides the partition: crc32(key bytes) % partitions. Events without a key are
    spread over all partitions.
8.  Reading returns Arrow batches; memory use does not grow with the stream.
9.  An event's id is known before its commit; its offset only after.
10. A stream with ids="producer" has one partition, and appending an event whose id it already
    holds is a no-op.

Where the engines differ:

-   Commits are totally ordered on the embedded engine; on Kafka they have no order
    (`Committed.commit` is 0), and offsets have gaps where commits end.
-   Upkeep may change how events are stored (merging), but never what a reader sees.
    Retention by size keeps at least the given size; on Kafka whole segments are removed.
-   On Kafka `acks` can only be set per stream, changes of objects made by another process are
    seen within a quarter of a second, a commit may write to only one ids="producer" stream,
    conditions of a commit need tables that belong to its producer (`writer`), and a pin fixes a
    moment for each partition separately.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec
import pyarrow as pa

from penstock.log.batch import Batch, Compression
from penstock.log.declaring.objects import Acks, Change, Stream
from penstock.records.event import JsonValue


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a log; each is a log option of the same name: `penstock.open(url, **options)`."""

    event_bytes_max: int = 1 << 20
    key_bytes_max: int = 1024
    headers_bytes_max: int = 16 << 10
    batch_rows_max: int = 65_536
    batch_bytes_max: int = 16 << 20
    commit_bytes_max: int = 256 << 20
    transaction_memory_bytes_max: int = 16 << 20
    progress_key_chars_max: int = 500
    progress_value_bytes_max: int = 1 << 20
    partitions_max: int = 1000
    page_rows_max: int = 10_000


class Holder(msgspec.Struct, frozen=True):
    """Who may write as a producer: plain data, so that it can be sent to other processes.

    Only the holder with the latest epoch may stage and commit.
    """

    producer: str
    epoch: int


class Part(msgspec.Struct, frozen=True):
    """Events for one stream: a stamped batch, see `penstock.records.event`.

    `ready` is the result of `Log.prepare`, and private to the engine.
    """

    stream: str
    batch: pa.RecordBatch
    ready: object = None


class Piece(msgspec.Struct, frozen=True):
    """Staged events: a name for data that is stored, but not visible.

    Small, and encodable by msgspec: tasks send it to the process that commits.
    """

    stream: str
    batches: tuple[int, ...]
    rows: int


class Condition(msgspec.Struct, frozen=True):
    """Where a table's entry has to be before a commit: at this offset, or nowhere (`None`)."""

    table: str
    key: bytes
    offset: int | None


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes visible together: parts, staged pieces, and progress (`None` deletes a key).

    The commit is refused with `ConflictError` unless each of the `conditions` holds. They are about
    tables that it writes to; on Kafka, tables of which its producer is the declared writer.
    """

    parts: Sequence[Part] = ()
    pieces: Sequence[Piece] = ()
    progress: Mapping[str, bytes | None] = {}
    conditions: Sequence[Condition] = ()


class CommitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to commit. `acks` defaults to the streams' own; the strongest in a commit counts."""

    acks: Acks | None = None
    compression: Compression = "lz4"
    timeout_ms: int = 30_000


class Placement(msgspec.Struct, frozen=True):
    """Where one part or piece was stored: per partition, the first offset and number of events.

    `partitions` is how many partitions the stream had then; `dropped` are the rows that an
    `ids="producer"` stream already held.
    """

    stream: str
    partitions: int
    ranges: tuple[tuple[int, int, int], ...]
    dropped: tuple[int, ...] = ()


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a commit. Placements are those of the parts, then those of the pieces.

    `commit` is its number in the order of all commits of the log; an engine that has no
    such order gives 0. `repeated` says that this name had been committed before.
    """

    producer: str
    sequence: int
    commit: int
    time: dt.datetime
    placements: tuple[Placement, ...]
    repeated: bool = False


class Offsets(msgspec.Struct, frozen=True):
    """The first offset that still exists, and the one that the next event will have or exceed."""

    first: int
    next: int


class Count(msgspec.Struct, frozen=True):
    """How many events there are; unless `is_exact`, this is an upper bound."""

    events: int = 0
    is_exact: bool = True

    def __add__(self, other: Count) -> Count:
        return Count(self.events + other.events, self.is_exact and other.is_exact)

    def __bool__(self) -> bool:
        return self.events > 0

    def __str__(self) -> str:
        return f"{self.events:,}" if self.is_exact else f"up to {self.events:,}"


class Pin(msgspec.Struct, frozen=True):
    """A moment of the log's tables that stays readable until `expires`; plain data."""

    token: str
    expires: dt.datetime


class TableEntry(msgspec.Struct, frozen=True):
    """A table's latest value for a key, packed; see `penstock.log.reading.table`."""

    key: bytes
    value: bytes
    partition: int
    offset: int


class Damage(msgspec.Struct, frozen=True):
    """One finding of `verify`. Damage outside events has no place or offsets."""

    message: str
    stream: str | None = None
    partition: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None


class Upkeep(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of `maintain` did."""

    batches_expired: int = 0
    batches_merged: int = 0
    pieces_swept: int = 0
    producers_forgotten: int = 0


Report = Callable[[int, int], None]
"""Called from time to time during long work with (done, total)."""


class Log(Protocol):
    """A durable log of streams. Every method may be called from any thread.

    Any method raises `ClosedError` after `close`, `LogError` kinds when storage fails, and
    `UnknownObjectError` for a stream that does not exist.
    """

    @property
    def url(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    # Objects

    def namespaces(self) -> list[str]:
        """Every namespace, including the system's, ordered by name."""

    def streams(self) -> list[Stream]:
        """Every stream, ordered by name."""

    def stream(self, name: str) -> Stream:
        """The stream that `name` addresses, as of now."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply all changes or none; each becomes an event on `_system.objects`."""

    # Writing

    def hold(self, producer: str, *, ephemeral: bool = False) -> Holder:
        """Open a producer and fence its older holder.

        Whatever the older holder staged but did not commit is discarded. An `ephemeral` producer
        is forgotten some days after its last commit; others never are. A producer that was ever
        opened without `ephemeral` stays permanent.
        """

    def last_commit(self, producer: str) -> Committed | None:
        """The producer's latest commit, by any holder."""

    def prepare(self, part: Part, options: CommitOptions = CommitOptions()) -> Part:
        """Do the work on a part that needs no ordering (encoding, compressing) ahead of its commit.

        Optional; it lets one thread prepare the next commit while another commits.
        """

    def stage(
        self, holder: Holder, sequence: int, part: Part, options: CommitOptions = CommitOptions()
    ) -> Piece:
        """Store events durably without making them visible, for the commit `sequence`.

        At acks `write` a power failure may lose them until that commit, which makes them durable.
        Raises `FencedError`, or `SequenceError` if that commit has already happened. Pieces that
        no commit names are removed once the sequence is committed or the holder fenced.
        """

    def commit(
        self,
        holder: Holder,
        sequence: int,
        commit: Commit,
        options: CommitOptions = CommitOptions(),
    ) -> Committed:
        """Make exactly these parts and pieces visible, and save the progress, atomically.

        The first commit of a name wins: a repeated one changes nothing, whatever it contains,
        and what it staged is discarded. Raises `FencedError`, `SequenceError`, `PieceError`
        (nothing was changed), or `CommitOutcomeUnknownError` (commit again).
        """

    def progress(self, key: str) -> bytes | None:
        """The latest committed value of a progress key."""

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        """All progress whose key starts with `prefix`, in order of key."""

    # Reading

    def offsets(self, stream: str) -> dict[int, Offsets]:
        """What can be read now, for each partition."""

    def offset_at(self, stream: str, partition: int, time: dt.datetime) -> int:
        """The first offset that was appended at `time` or later; the next one if none was."""

    def advance(self, stream: str, partition: int, start: int, rows: int) -> int:
        """The end of a batch of `rows` events that begins at `start`: the offset after it.

        The batch never has more events, but may have fewer: if offsets have gaps, or if the
        partition ends earlier.
        """

    def retreat(self, stream: str, partition: int, end: int, rows: int) -> int:
        """The start of a batch of `rows` events that ends before `end`: its first offset.

        As with `advance`, it never has more events, but may have fewer.
        """

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        """How many events there are from `start` to before `end`, both within `offsets`.

        Offsets may have gaps, so only the engine knows how many events lie between two of them.
        """

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        """Committed events of a partition, from `start` to before `end` (or the present end).

        Raises `OffsetGoneError` if retention has removed them, `DamagedError` if the stored bytes
        are not what was written; reading can continue after the damage.
        """

    def wait(self, places: Mapping[str, Mapping[int, int]], timeout_s: float) -> bool:
        """Wait until a partition has an event at or after its place; False after the timeout.

        `places` gives an offset for each partition to wait for, by stream name.
        """

    # Tables: streams declared with table=True

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[TableEntry | None]:
        """The entries of these keys, in the given order, as of one moment: now, or the pinned one.

        `settled` waits for commits that are just becoming visible: a caller that derives new
        entries from these must not miss one that was acknowledged.
        """

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[TableEntry]:
        """The next entries, ordered by key."""

    def snapshot(self, stream: str) -> Iterator[list[TableEntry]]:
        """All entries as of one moment, ordered by key; close the iterator if you stop early."""

    def pin(self, duration_s: float = 600.0) -> Pin:
        """Keep the present state of the tables readable for a while."""

    def unpin(self, pin: Pin) -> None:
        """Release a pin early, if that is possible now; unknown or expired pins are ignored."""

    # Upkeep

    def maintain(self) -> Upkeep:
        """Run one round of retention, merging and sweeping, alongside readers and writers."""

    def verify(self, progress: Report | None = None) -> Iterator[Damage]:
        """Check everything that is stored; yield what is damaged."""

    def backup(self, target: Path, progress: Report | None = None) -> None:
        """Copy the log as of one moment, while it is in use."""

    def facts(self) -> dict[str, JsonValue]:
        """What `penstock doctor` shows about this log: engine, versions, sizes."""

    def close(self) -> None:
        """Release all resources; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


Start = Literal["earliest", "latest"] | int | dt.datetime
"""Where to start reading: a name, an offset, or a time of append."""
