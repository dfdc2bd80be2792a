"""Upkeep of an embedded log while it is in use: retention, merging, sweeping.

Every step is a separate short write transaction, so writers wait only briefly, and readers
not at all. Any process may do it, but only one at a time does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import pyarrow as pa

from penstock.errors import DamagedError
from penstock.failpoints import failpoint
from penstock.log.api import Limits, Upkeep
from penstock.log.batch import CommitRun, checksum, encode_blob, unify_columns
from penstock.log.declaring.objects import Stream
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import ReaderPool, many
from penstock.log.sqlite.index import (
    IndexRow,
    WrongBatchError,
    check_row,
    decode,
    insert_row,
    read_stored,
    runs_of,
)
from penstock.log.sqlite.objects import load_stream
from penstock.records.event import now_us

TIER = 16
"""Batches are merged when this many of one tier are adjacent; the result is the next tier."""
TIERS = (TIER, TIER**2, TIER**3)
MERGE_ROWS_MAX = 16_384
MERGE_BYTES_MAX = 1 << 20
MERGE_BATCHES_MAX = 256
WINDOW = 4096
STEP = 64
FREE_PAGES_STEP = 256
PRODUCER_KEPT_US = 7 * 24 * 3600 * 1_000_000


class SqliteHousekeeper:
    """One round of upkeep; `submit` runs work in a write transaction."""

    def __init__(
        self, pool: ReaderPool, submit: Callable[[Callable[[Write], int]], int], limits: Limits
    ) -> None:
        self._pool = pool
        self._submit = submit
        self._limits = limits

    def round(self, streams: Sequence[Stream]) -> Upkeep:
        expired = sum(self._expire(stream) for stream in streams)
        merged = sum(self._merge(*place) for place in self._to_merge())
        swept = self._repeat(_sweep)
        forgotten = self._submit(_forget)
        self._submit(_shrink)
        return Upkeep(
            batches_expired=expired,
            batches_merged=merged,
            pieces_swept=swept,
            producers_forgotten=forgotten,
        )

    def _repeat(self, work: Callable[[Write], int]) -> int:
        total = 0
        while done := self._submit(work):
            total += done
        return total

    # Retention

    def _expire(self, stream: Stream) -> int:
        spec = stream.spec
        if spec.retention_ms is None and spec.retention_bytes is None:
            return 0
        before_us = None if spec.retention_ms is None else now_us() - spec.retention_ms * 1000
        total = 0
        for partition in range(stream.partitions):
            total += self._repeat(
                lambda write, partition=partition: _expire_step(  # type: ignore[misc]
                    write, stream, partition, before_us
                )
            )
        if spec.ids == "producer":
            self._submit(lambda write: _forget_ids(write, stream, before_us))
        return total

    # Merging

    def _to_merge(self) -> list[tuple[int, int, int]]:
        with self._pool.lend() as connection:
            return many(connection, "partitions_to_merge", TIER)

    def _merge(self, stream_id: int, partition: int, merged_to: int) -> int:
        with self._pool.lend() as connection:
            found = many(connection, "batches_from", stream_id, partition, merged_to, WINDOW)
            # Read after the rows: the stream's record is then at least as new as theirs.
            stream = load_stream(connection, stream_id)
        if stream is None:
            return 0
        rows = [IndexRow(*row) for row in found]
        while rows and _is_large(rows[0]):
            merged_to = rows.pop(0).next_offset
        left = TIER if len(found) == WINDOW else 0  # look again soon if there is more
        self._submit(
            lambda write: _count_changes(
                write, "merge_looked", left, merged_to, stream_id, partition
            )
        )
        merged = sum(self._merge_run(stream, partition, run) for run in runs_to_merge(rows))
        if not merged and left:
            # A whole window of batches that cannot be merged: look further on next time.
            further = rows[len(rows) // 2].first_offset if rows else merged_to
            self._submit(
                lambda write: _count_changes(
                    write, "merge_looked", left, further, stream_id, partition
                )
            )
        return merged

    def _merge_run(self, stream: Stream, partition: int, rows: Sequence[IndexRow]) -> int:
        try:
            built = self._build(stream, partition, rows)
        except (WrongBatchError, DamagedError):
            return 0  # left unchanged: verify and readers report it
        if built is None:
            return 0
        failpoint("merge.built")
        blob, runs, used = built
        merged = rows[:used]
        return self._submit(lambda write: _replace(write, stream.id, partition, merged, blob, runs))

    def _build(
        self, stream: Stream, partition: int, rows: Sequence[IndexRow]
    ) -> tuple[bytes, bytes, int] | None:
        """The merged blob, its runs, and how many of the rows it contains.

        These are fewer than all if the events, unpacked, would exceed the limit of a batch.
        """
        stored: list[pa.RecordBatch] = []
        runs: list[CommitRun] = []
        size = 0
        for row in rows:
            with self._pool.lend() as connection:
                check_row(connection, stream, partition, row)
                data = read_stored(connection, row)
            if data is None:
                return None  # another process was faster
            batch = decode(stream, partition, row, data).explicit()
            size += batch.nbytes
            if size > self._limits.batch_bytes_max:
                break
            stored.append(batch)
            runs += runs_of(row)
        if len(stored) < 2:
            return None
        whole = pa.concat_batches(unify_columns(stored))
        return encode_blob(whole, "zstd"), msgspec.msgpack.encode(_join(runs)), len(stored)


def _join(runs: Sequence[CommitRun]) -> list[CommitRun]:
    """Join adjacent runs of the same commit."""
    found: list[CommitRun] = []
    for run in runs:
        if not found or found[-1].commit != run.commit:
            found.append(run)
    return found


def _is_large(row: IndexRow) -> bool:
    return row.rows >= TIERS[-1] or row.size >= MERGE_BYTES_MAX


def runs_to_merge(rows: Sequence[IndexRow]) -> Iterator[Sequence[IndexRow]]:
    """Adjacent batches worth merging: at least `TIER`, none larger than their tier.

    Each event is rewritten at most once per tier, so merging costs little overall.
    """
    left = list(rows)
    for most in TIERS:
        for run in _neighbours(left, most):
            yield run
            merged = {row.first_offset for row in run}
            left = [row for row in left if row.first_offset not in merged]


def _neighbours(rows: Sequence[IndexRow], most: int) -> list[Sequence[IndexRow]]:
    found: list[Sequence[IndexRow]] = []
    run: list[IndexRow] = []
    for row in rows:
        if row.rows < most and _fits(run, row):
            run.append(row)
            continue
        found.append(run)
        run = [row] if row.rows < most else []
    found.append(run)
    return [run for run in found if len(run) >= TIER]


def _fits(run: Sequence[IndexRow], row: IndexRow) -> bool:
    if not run:
        return True
    return (
        len(run) < MERGE_BATCHES_MAX
        and run[-1].next_offset == row.first_offset
        and sum(r.rows for r in run) + row.rows <= MERGE_ROWS_MAX
        and sum(r.size for r in run) + row.size <= 4 * MERGE_BYTES_MAX
    )


def _replace(
    write: Write, stream_id: int, partition: int, rows: Sequence[IndexRow], blob: bytes, runs: bytes
) -> int:
    """Replace batches by the merged one, unless one of them has changed."""
    for row in rows:
        found = write.look("batch_before", stream_id, partition, row.first_offset)
        if found != row:
            return 0
    for row in rows:
        write.run("delete_batch", stream_id, partition, row.first_offset, row.blob_id)
        write.run("delete_blob", row.blob_id)
    blob_id = write.insert("insert_blob", blob)
    first, last = rows[0], rows[-1]
    row = IndexRow(
        first.first_offset,
        sum(row.rows for row in rows),
        blob_id,
        len(blob),
        checksum(blob),
        first.commit_number,
        last.time_us,
        runs,
    )
    insert_row(write, stream_id, partition, row)
    change = len(blob) - sum(row.size for row in rows)
    write.run("bytes_changed", change, stream_id, partition)
    failpoint("merge.replaced")
    return len(rows)


def _expire_step(write: Write, stream: Stream, partition: int, before_us: int | None) -> int:
    oldest = write.look_all("oldest_batches", stream.id, partition, STEP)
    (size,) = write.look("partition_bytes", stream.id, partition) or (0,)
    limit = stream.spec.retention_bytes
    freed, first = 0, 0
    gone = 0
    for first_offset, rows, blob_id, size_, time_us in oldest:
        too_old = before_us is not None and time_us < before_us
        too_much = limit is not None and size - freed - size_ >= limit
        if not (too_old or too_much):
            break
        write.run("delete_batch", stream.id, partition, first_offset, blob_id)
        write.run("delete_blob", blob_id)
        freed += size_
        first = first_offset + rows
        gone += 1
    if gone:
        write.run("retention_moved", first, freed, first, stream.id, partition)
        failpoint("retention.deleted")
    return gone


def _sweep(write: Write) -> int:
    orphans = write.look_all("orphaned_pieces", STEP)
    for (blob_id,) in orphans:
        write.run("delete_piece", blob_id)
        write.run("delete_blob", blob_id)
    if orphans:
        failpoint("sweep.deleted")
    return len(orphans)


def _forget(write: Write) -> int:
    now = write.time_us
    write.run("expire_pins", now)
    oldest = write.look("oldest_pin", now)
    horizon = oldest[0] if oldest and oldest[0] is not None else write.commit_number
    write.run("forget_old_entries", horizon)
    return _count_changes(write, "forget_producers", now - PRODUCER_KEPT_US)


def _forget_ids(write: Write, stream: Stream, before_us: int | None) -> int:
    """Forget ids that are older than every event that still exists."""
    oldest = write.look("batches_from", stream.id, 0, 0, 1)
    horizon = runs_of(IndexRow(*oldest))[0].time_us if oldest else before_us
    return 0 if horizon is None else _count_changes(write, "forget_ids", stream.id, horizon)


def _shrink(write: Write) -> int:
    """Give some free pages back to the file system."""
    if not write.connection.pragma("freelist_count"):
        return 0
    write.dirty = True
    write.connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES_STEP})").fetchall()
    return 0


def _count_changes(write: Write, name: str, *values: object) -> int:
    before = write.connection.total_changes()
    write.run(name, *values)
    return write.connection.total_changes() - before
