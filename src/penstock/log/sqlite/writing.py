"""Staging and committing in the embedded log.

Encoding, compressing and splitting happen before the writer's lock is taken; inside it
only small rows are checked and written, and blobs inserted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NewType

import apsw
import msgspec
import pyarrow as pa

from penstock.errors import PieceError
from penstock.failpoints import failpoint
from penstock.log.api import (
    Commit,
    CommitOptions,
    Committed,
    Holder,
    Limits,
    Part,
    Piece,
    Placement,
)
from penstock.log.batch import checksum, decode_blob, encode_blob
from penstock.log.declaring.objects import Stream
from penstock.log.engine.checks import check_columns, check_conditions, check_writer
from penstock.log.engine.ids import take_new
from penstock.log.reading.table import NO_CHANGES, Changes, entry_changes
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import SqlRow, one, read_blob, sql
from penstock.log.sqlite.index import IndexRow, insert_row
from penstock.log.writing.fate import (
    ProducerStanding,
    RefusedCommit,
    RepeatedCommit,
    check_stageable,
    judge,
)
from penstock.log.writing.partitioning import cut, widen, without
from penstock.records.event import from_microseconds, ids_of

BlobId = NewType("BlobId", int)


class StreamChangedError(Exception):
    """The stream changed after its events were prepared; prepare them again."""


class SqliteChunk(msgspec.Struct, frozen=True):
    """Events of one partition: a blob to insert or, for a piece, the id of a stored one."""

    partition: int
    rows: int
    size: int
    checksum: int
    blob: bytes | BlobId
    entries: Changes
    batch: pa.RecordBatch | None
    """Kept only if ids must be compared."""


class SqlitePrepared(msgspec.Struct, frozen=True):
    """A part or a piece, prepared outside the writer's lock."""

    stream: Stream
    partitions: int
    chunks: Sequence[SqliteChunk]
    piece: Piece | None = None


class _StoredOutcome(Committed, frozen=True, kw_only=True):
    """The outcome of a commit as it is stored, with the epoch of the holder that made it."""

    epoch: int


class _Epoch(msgspec.Struct, frozen=True):
    """The part of a stored outcome that version 0.1 does not write."""

    epoch: int | None = None


_COMMITTED = msgspec.msgpack.Decoder(Committed)
_EPOCH = msgspec.msgpack.Decoder(_Epoch)


def prepare_part(
    stream: Stream, part: Part, limits: Limits, options: CommitOptions, *, staged: bool = False
) -> SqlitePrepared:
    """Split by partition and encode. Raises `RecordError` if the columns do not match the stream.

    For a `staged` part, table entries are computed only by the commit.
    """
    check_columns(stream, part.batch)
    made = [
        _prepare_chunk(stream, partition, batch, options, staged=staged)
        for partition, batch in cut(stream, part.batch, limits)
    ]
    return SqlitePrepared(stream, stream.partitions, made)


def _prepare_chunk(
    stream: Stream,
    partition: int,
    batch: pa.RecordBatch,
    options: CommitOptions,
    *,
    staged: bool = False,
) -> SqliteChunk:
    blob = encode_blob(batch, options.compression)
    entries = entry_changes(stream, batch) if stream.spec.table and not staged else NO_CHANGES
    kept = batch if stream.spec.ids == "producer" else None
    return SqliteChunk(partition, batch.num_rows, len(blob), checksum(blob), blob, entries, kept)


def prepare_piece(connection: apsw.Connection, stream: Stream, piece: Piece) -> SqlitePrepared:
    """Look up a staged piece; its blobs are read only if the commit needs their contents."""
    made = []
    partitions = stream.partitions
    by_producer = stream.spec.ids == "producer"
    for blob_id in map(BlobId, piece.batches):
        row = one(connection, "piece", blob_id)
        if row is None:
            raise _no_piece(piece)
        *_, partition, partitions, rows, size, check = row
        kept, entries = None, NO_CHANGES
        if by_producer or stream.spec.table:
            batch = _staged_batch(connection, piece, blob_id, check)
            entries = entry_changes(stream, batch) if stream.spec.table else NO_CHANGES
            kept = batch if by_producer else None
        made.append(SqliteChunk(partition, rows, size, check, blob_id, entries, kept))
    return SqlitePrepared(stream, partitions, made, piece)


def _staged_batch(
    connection: apsw.Connection, piece: Piece, blob_id: BlobId, check: int
) -> pa.RecordBatch:
    data = read_blob(connection, blob_id)
    if data is None:
        raise _no_piece(piece)
    if checksum(data) != check:
        raise PieceError(f"a staged piece of stream {piece.stream} is damaged: stage it again")
    return decode_blob(data)


def _no_piece(piece: Piece) -> PieceError:
    return PieceError(
        f"a staged piece of stream {piece.stream} does not exist: it was already committed, or was "
        "removed when another holder opened its producer; stage it again"
    )


def standing_of(row: SqlRow | None, *, is_final: bool = False) -> ProducerStanding:
    """The standing of a producer, from its row."""
    if row is None:
        return ProducerStanding(is_final=is_final)
    epoch, _, outcome = row
    if outcome is None:
        return ProducerStanding(epoch, is_final=is_final)
    return ProducerStanding(
        epoch, _COMMITTED.decode(outcome), _EPOCH.decode(outcome).epoch, is_final
    )


def look_finally(write: Write, producer: str) -> ProducerStanding:
    """The standing of a producer, such that no commit attempted before can appear any more.

    This transaction writes, and so overwrites whatever a failed COMMIT has left in the file.
    """
    write.dirty = True
    return standing_of(write.look("producer", producer), is_final=True)


def sync(write: Write) -> None:
    """Make durable what others committed without waiting for the disk."""
    write.dirty = True


def _check_streams(write: Write, streams: Iterable[Stream]) -> None:
    for stream in {s.id: s for s in streams}.values():
        row = write.look("stream_version", *stream.name)
        if row != (stream.id, stream.version):
            raise StreamChangedError


def write_stage(write: Write, holder: Holder, sequence: int, prepared: SqlitePrepared) -> Piece:
    """Insert the blobs and record their owner; nothing becomes visible."""
    check_stageable(standing_of(write.look("producer", holder.producer)), holder, sequence)
    _check_streams(write, [prepared.stream])
    check_writer(prepared.stream, holder.producer)
    failpoint("stage.begun")
    names = []
    for chunk in prepared.chunks:
        blob_id = _blob_id(write, chunk)
        write.run(
            "insert_piece",
            blob_id,
            holder.producer,
            holder.epoch,
            sequence,
            prepared.stream.id,
            chunk.partition,
            prepared.partitions,
            chunk.rows,
            chunk.size,
            chunk.checksum,
        )
        names.append(blob_id)
    failpoint("stage.blobs")
    rows = sum(chunk.rows for chunk in prepared.chunks)
    return Piece(str(prepared.stream.name), tuple(names), rows)


def _blob_id(write: Write, chunk: SqliteChunk) -> BlobId:
    """The blob of a chunk, which is inserted unless it is stored already."""
    if isinstance(chunk.blob, bytes):
        return BlobId(write.insert("insert_blob", chunk.blob))
    return chunk.blob


def write_commit(
    write: Write,
    holder: Holder,
    sequence: int,
    prepared: Sequence[SqlitePrepared],
    commit: Commit,
) -> Committed:
    """Make everything prepared visible and save the progress.

    1. The holder must hold the producer, and the sequence must be new; a repeated name returns
       its first outcome.
    2. The streams must be unchanged since the events were prepared, and open to this producer, and
       the pieces must exist; the commit's conditions must hold.
    3. Blobs and index rows are written, and offsets assigned.
    4. Table entries, progress, and the producer's outcome follow.
    """
    match judge(standing_of(write.look("producer", holder.producer)), holder, sequence):
        case RepeatedCommit(outcome):
            write.dirty = True  # so that it is synced, whoever wrote it, before it is repeated
            return outcome
        case RefusedCommit(error):
            raise error
    _check_streams(write, (item.stream for item in prepared))
    for item in prepared:
        check_writer(item.stream, holder.producer)
    _check_pieces(write, holder, sequence, prepared)
    check_conditions(
        commit, (item.stream for item in prepared), lambda table, key: _offset_of(write, table, key)
    )
    number = write.next_commit()
    tables = any(item.stream.spec.table for item in prepared)
    pinned = tables and write.look("oldest_pin", write.time_us) != (None,)
    placements = [place(write, item, number, pinned) for item in prepared]
    _save_progress(write, dict(commit.progress))
    failpoint("commit.progress")
    committed = Committed(
        producer=holder.producer,
        sequence=sequence,
        commit=number,
        time=from_microseconds(write.time_us),
        placements=tuple(placements),
    )
    outcome = _StoredOutcome(**msgspec.structs.asdict(committed), epoch=holder.epoch)
    packed = msgspec.msgpack.encode(outcome)
    write.run("save_producer", sequence, packed, write.time_us, holder.producer)
    return committed


def _offset_of(write: Write, table: Stream, key: bytes) -> int | None:
    row = write.look("entry_offset", table.id, key)
    return None if row is None else int(row[0])


def _check_pieces(
    write: Write, holder: Holder, sequence: int, prepared: Sequence[SqlitePrepared]
) -> None:
    named: set[int] = set()
    for item in prepared:
        if item.piece is None:
            continue
        for blob_id in item.piece.batches:
            row = write.look("piece", blob_id)
            if row is None or row[:3] != (holder.producer, holder.epoch, sequence):
                raise _no_piece(item.piece)
            if row[3] != item.stream.id or blob_id in named:
                raise PieceError(
                    f"a piece of stream {item.stream.name} is listed twice, or belongs to "
                    "another stream"
                )
            named.add(blob_id)


def place(write: Write, item: SqlitePrepared, number: int, pinned: bool) -> Placement:
    """Assign offsets to the events, as part of the commit with this number."""
    ranges: list[tuple[int, int, int]] = []
    dropped: list[int] = []
    row = 0
    for chunk in item.chunks:
        kept = chunk
        if chunk.batch is not None:
            kept, gone = _without_held(write, item.stream, chunk, chunk.batch)
            dropped += [row + index for index in gone]
            failpoint("commit.ids")
        row += chunk.rows
        if kept.rows:
            first = _index(write, item.stream, kept, number)
            widen(ranges, kept.partition, first, kept.rows)
            _save_entries(write, item.stream, kept, first, number, pinned)
        if not isinstance(chunk.blob, bytes):
            write.run("delete_piece", chunk.blob)
            failpoint("publish.pieces")
    return Placement(str(item.stream.name), item.partitions, tuple(ranges), tuple(dropped))


def _without_held(
    write: Write, stream: Stream, chunk: SqliteChunk, batch: pa.RecordBatch
) -> tuple[SqliteChunk, list[int]]:
    """The chunk without events whose ids the stream already holds, and the rows of those."""
    gone = take_new(write, stream.id, ids_of(batch).to_pylist())
    if not gone:
        return chunk, gone
    if not isinstance(chunk.blob, bytes):
        write.run("delete_blob", chunk.blob)
    left = without(batch, gone)
    return _prepare_chunk(stream, chunk.partition, left, CommitOptions()), gone


def _index(write: Write, stream: Stream, chunk: SqliteChunk, number: int) -> int:
    blob_id = _blob_id(write, chunk)
    failpoint("commit.blobs")
    first = write.take_offsets(stream.id, chunk.partition, chunk.rows, chunk.size)
    row = IndexRow(first, chunk.rows, blob_id, chunk.size, chunk.checksum, number, write.time_us)
    insert_row(write, stream.id, chunk.partition, row)
    failpoint("commit.index")
    return first


def _save_entries(
    write: Write, stream: Stream, chunk: SqliteChunk, first: int, number: int, pinned: bool
) -> None:
    changes = chunk.entries
    if not changes.keys:
        return
    write.dirty = True
    connection = write.connection
    own, new = repeat(stream.id), repeat(number)
    if pinned:
        connection.executemany(sql("keep_entry"), zip(new, own, changes.keys, strict=False))
    if None in changes.values:
        deleted, changes = changes.split_deletions()
        connection.executemany(sql("delete_entry"), zip(own, deleted, strict=False))
    offsets = [first + row for row in changes.rows]
    places = (repeat(chunk.partition), offsets, new)
    connection.executemany(
        sql("save_entry"), zip(own, changes.keys, changes.values, *places, strict=False)
    )
    failpoint("commit.table")


def _save_progress(write: Write, progress: dict[str, bytes | None]) -> None:
    for key, value in progress.items():
        if value is None:
            write.run("delete_progress", key)
        else:
            write.run("save_progress", key, value)
