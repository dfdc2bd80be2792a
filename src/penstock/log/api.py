"""The log contract: what every engine promises, as a Protocol and the data it speaks.

The promises (numbered as in `penstock.testing.contract`, which proves them on an engine):

1.  Within a partition offsets only grow, and a reader sees every committed event once, in
    offset order. Offsets may have gaps.
2.  Only committed events are visible. A commit may span streams and partitions and becomes
    visible as a whole; on Kafka, partition by partition within moments, and a reader of one
    partition never sees half of its part.
3.  A commit is named (producer, sequence); sequences grow and may skip. Committing the
    producer's latest name again changes nothing and returns its outcome; an older one is
    refused. Opening a producer fences its older holder.
4.  When `commit` returns, the data survive kill -9 and, at acks `majority` and `all`, loss
    of power (or of a minority of brokers). `write` waits for neither.
5.  A commit whose outcome is unknown raises `CommitOutcomeUnknownError`, never "failed";
    trying it again under the same name is always safe.
6.  Progress is saved in the commit and read back by key, never stale.
7.  The key decides the partition: crc32(key bytes) % partitions. Without a key: spread.
8.  Reading gives batches of Arrow; memory does not grow with the stream.
9.  An event's id is known before its commit; its offset only after.
10. A stream with ids="producer" has one partition, and an event whose id it holds already
    is a no-op.

Where the engines differ:

-   Commits have one order on the embedded engine; on Kafka they have none (`Committed.commit`
    is 0), and offsets have gaps where commits end.
-   Upkeep may store events in another way (merging), and never changes what a reader sees.
    Retention by size keeps at least what it says; on Kafka whole segments go.
-   On Kafka `acks` is the stream's alone, another process's changes of objects are seen
    within a quarter of a second, a commit may write to one ids="producer" stream, and a
    pinned moment is one of each partition.
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
from penstock.log.objects import Acks, Change, Stream
from penstock.records.event import JsonValue


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a log accepts; each is a log option of its name: `penstock.open(url, **options)`."""

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
    """Who may write as a producer: plain data, so that it can travel to other processes.

    Only the holder with the latest epoch may stage and commit.
    """

    producer: str
    epoch: int


class Part(msgspec.Struct, frozen=True):
    """Events for one stream: a stamped batch, see `penstock.records.event`.

    `ready` is what `Log.prepare` made of it, and the engine's own business.
    """

    stream: str
    batch: pa.RecordBatch
    ready: object = None


class Piece(msgspec.Struct, frozen=True):
    """Staged events: a name for data that is stored and not visible.

    Small, and encodable by msgspec: tasks send it to whoever commits.
    """

    stream: str
    batches: tuple[int, ...]
    rows: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes visible together: parts, staged pieces, and progress (`None` deletes)."""

    parts: Sequence[Part] = ()
    pieces: Sequence[Piece] = ()
    progress: Mapping[str, bytes | None] = {}


class CommitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to commit. `acks` is the stream's own unless given; the strongest of a commit counts."""

    acks: Acks | None = None
    compression: Compression = "lz4"
    timeout_ms: int = 30_000


class Placement(msgspec.Struct, frozen=True):
    """Where one part or piece went: per partition its first offset and number of events.

    `partitions` is how many the stream had then; `dropped` are the rows that an
    `ids="producer"` stream held already.
    """

    stream: str
    partitions: int
    ranges: tuple[tuple[int, int, int], ...]
    dropped: tuple[int, ...] = ()


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a commit. Placements are those of the parts, then those of the pieces.

    `commit` is its number in the order of all commits of the log; an engine that has no
    such order gives 0. `repeated` says that this name was committed before.
    """

    producer: str
    sequence: int
    commit: int
    time: dt.datetime
    placements: tuple[Placement, ...]
    repeated: bool = False


class Offsets(msgspec.Struct, frozen=True):
    """The first offset that is still there, and the one that the next event will exceed or get."""

    first: int
    next: int


class Count(msgspec.Struct, frozen=True):
    """How many events there are; not `is_exact`: at most so many."""

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


class Entry(msgspec.Struct, frozen=True):
    """A table's latest value for a key, packed; see `penstock.log.table`."""

    key: bytes
    value: bytes
    partition: int
    offset: int


class Damage(msgspec.Struct, frozen=True):
    """One finding of `verify`. `stream` is empty where the damage is not in a stream's events."""

    message: str
    stream: str = ""
    partition: int = 0
    first_offset: int = -1
    last_offset: int = -1


class Upkeep(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of `maintain` did."""

    batches_expired: int = 0
    batches_merged: int = 0
    pieces_swept: int = 0
    producers_forgotten: int = 0


Progress = Callable[[int, int], None]
"""Called now and then during long work with (done, total)."""


class Log(Protocol):
    """A durable log of streams. Every method may be called from any thread.

    Any method raises `ClosedError` after `close`, `LogError` kinds when storage fails, and
    `UnknownObjectError` for a stream that is not there.
    """

    @property
    def url(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    # Objects

    def namespaces(self) -> list[str]:
        """Every namespace, the system's included, in order of name."""

    def streams(self) -> list[Stream]:
        """Every stream, in order of name."""

    def stream(self, name: str) -> Stream:
        """The stream that `name` addresses, as of now."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply all changes or none; each becomes an event on `_system.objects`."""

    # Writing

    def hold(self, producer: str, *, ephemeral: bool = False) -> Holder:
        """Open a producer and fence its older holder.

        What the older holder staged and did not commit is gone. An `ephemeral` producer is
        forgotten some days after its last commit; others never are. One that was ever opened as
        a lasting producer stays one.
        """

    def last_commit(self, producer: str) -> Committed | None:
        """The producer's latest commit, by whatever holder."""

    def prepare(self, part: Part, options: CommitOptions = CommitOptions()) -> Part:
        """Do the work on a part that needs no order (encoding, compressing) ahead of its commit.

        Never necessary; lets one thread prepare the next commit while another commits.
        """

    def stage(
        self, holder: Holder, sequence: int, part: Part, options: CommitOptions = CommitOptions()
    ) -> Piece:
        """Store events durably without making them visible, for the commit `sequence`.

        At acks `write` they may be lost with the power until that commit, which makes them last.
        Raises `FencedError`, or `SequenceError` if that commit has happened already. What no
        commit names is swept, once the sequence is committed or the holder fenced.
        """

    def commit(
        self,
        holder: Holder,
        sequence: int,
        commit: Commit,
        options: CommitOptions = CommitOptions(),
    ) -> Committed:
        """Make exactly these parts and pieces visible, and save the progress, as one.

        The first commit of a name wins: a repeated one changes nothing, whatever it brings,
        and what it staged is discarded. Raises `FencedError`, `SequenceError`, `PieceError`
        (nothing was changed), or `CommitOutcomeUnknownError` (commit again).
        """

    def progress(self, key: str) -> bytes | None:
        """The latest committed value of a progress key."""

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        """All progress whose key starts with `prefix`, in order of key."""

    # Reading

    def offsets(self, stream: str) -> dict[int, Offsets]:
        """For each partition what can be read now."""

    def offset_at(self, stream: str, partition: int, time: dt.datetime) -> int:
        """The first offset that was appended at `time` or later; the next one if none was."""

    def advance(self, stream: str, partition: int, start: int, rows: int) -> int:
        """Where a batch of `rows` events that begins at `start` ends: the offset behind it.

        It never has more events, and may have fewer: where offsets have gaps, and where the
        partition ends before it.
        """

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        """How many events there are from `start` up to before `end`, both within `offsets`.

        Offsets may have gaps: nobody but the engine knows what their distance means.
        """

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        """Committed events of a partition, from `start` up to before `end` (or what is there now).

        Raises `OffsetGoneError` where retention was faster, `DamagedError` where the stored
        bytes are not what was written; reading may go on behind the damage.
        """

    def wait(self, stream: str, positions: Mapping[int, int], timeout_s: float) -> bool:
        """Wait until a partition has an event at or past its position; False after the timeout."""

    # Tables: streams declared with table=True

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[Entry | None]:
        """The entries of these keys, in their order, all of one moment: now, or the pinned one.

        `settled` waits for commits that are just becoming visible: whoever writes entries that
        follow from these must not miss one that was acknowledged.
        """

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[Entry]:
        """The next entries in order of key."""

    def snapshot(self, stream: str) -> Iterator[list[Entry]]:
        """All entries of one moment, in order of key; close the iterator if you stop early."""

    def pin(self, duration_s: float = 600.0) -> Pin:
        """Keep the tables as they are now readable for a while."""

    def unpin(self, pin: Pin) -> None:
        """Give a pin back early, if that can be done now; unknown or expired pins are ignored."""

    # Upkeep

    def maintain(self) -> Upkeep:
        """One round of retention, merging and sweeping, beside readers and writers."""

    def verify(self, progress: Progress | None = None) -> Iterator[Damage]:
        """Check everything that is stored; what is damaged, if anything."""

    def backup(self, target: Path, progress: Progress | None = None) -> None:
        """Copy the log as of one moment, while it is used."""

    def facts(self) -> dict[str, JsonValue]:
        """What `penstock doctor` shows of this log: engine, versions, sizes."""

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


Start = Literal["earliest", "latest"] | int | dt.datetime
"""Where to start reading: a name, an offset, or a time of append."""
