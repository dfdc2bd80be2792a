"""Staging and committing in the embedded log.

Encoding, compressing and splitting happen before the writer's lock is taken; inside it
only small rows are checked and written, and blobs inserted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import cast

import apsw
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import (
    PieceError,
)
from penstock.failpoints import failpoint
from penstock.log.api import (
    CommitOptions,
    Committed,
    Holder,
    Limits,
    Part,
    Piece,
    Placement,
)
from penstock.log.batch import checksum, decode_blob, encode_blob
from penstock.log.checks import check_columns, check_held, check_stageable, repeated
from penstock.log.objects import Stream
from penstock.log.partitioning import chunks, split_part, widen
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import one, read_blob, sql
from penstock.log.sqlite.ids import take_new
from penstock.log.table import NO_CHANGES, Changes, entry_changes
from penstock.records.event import from_microseconds, ids_of, numbered

_OUTCOME = msgspec.msgpack.Decoder(Committed)


class StreamChangedError(Exception):
    """The stream changed after its events were prepared; prepare them again."""


class Chunk(msgspec.Struct, frozen=True):
    """Events of one partition, ready to be inserted; of a piece, already inserted."""

    partition: int
    rows: int
    size: int
    checksum: int
    blob: bytes | None
    blob_id: int | None
    entries: Changes
    batch: pa.RecordBatch | None
    """Kept only where ids must be compared."""


class Prepared(msgspec.Struct, frozen=True):
    """A part or a piece, made ready outside the writer's lock."""

    stream: Stream
    partitions: int
    chunks: Sequence[Chunk]
    piece: Piece | None = None


def seal(
    place: tuple[int, int, int], rows: int, blob_id: int, blob_checksum: int, commit: int,
    time_us: int, runs: bytes | None,
) -> int:  # fmt: skip
    """A checksum over an index row, so that neither it nor its blob can change unnoticed."""
    fixed = struct.pack(">8q", *place, rows, blob_id, blob_checksum, commit, time_us)
    return checksum(fixed + (runs or b""))


def prepare_part(
    stream: Stream, part: Part, limits: Limits, options: CommitOptions, *, staged: bool = False
) -> Prepared:
    """Split by partition and encode. Raises `RecordError` if the columns are not the stream's.

    Of what is only `staged`, entries are worked out by whoever commits it.
    """
    check_columns(stream, part.batch)
    made = []
    by_producer = stream.spec.ids == "producer"
    for partition, batch in split_part(stream, part.batch):
        for piece in chunks(batch, limits):
            chunk = _chunk(stream, partition, piece, options, keep=by_producer, staged=staged)
            made.append(chunk)
    return Prepared(stream, stream.partitions, made)


def _chunk(
    stream: Stream, partition: int, batch: pa.RecordBatch, options: CommitOptions, *,
    keep: bool, staged: bool = False,
) -> Chunk:  # fmt: skip
    blob = encode_blob(batch, options.compression)
    entries = entry_changes(stream, batch) if stream.spec.table and not staged else NO_CHANGES
    return Chunk(
        partition, batch.num_rows, len(blob), checksum(blob), blob, None, entries,
        batch if keep else None,
    )  # fmt: skip


def prepare_piece(connection: apsw.Connection, stream: Stream, piece: Piece) -> Prepared:
    """Look a staged piece up; its blobs are read only where the commit needs their content."""
    made = []
    partitions = stream.partitions
    by_producer = stream.spec.ids == "producer"
    for blob_id in piece.batches:
        row = one(connection, "piece", blob_id)
        if row is None:
            raise _no_piece(piece)
        *_, partition, partitions, rows, size, check = row
        batch, entries = None, NO_CHANGES
        if by_producer or stream.spec.table:
            batch = _staged_batch(connection, piece, blob_id, check)
            entries = entry_changes(stream, batch) if stream.spec.table else NO_CHANGES
        made.append(
            Chunk(partition, rows, size, check, None, blob_id, entries,
                  batch if by_producer else None)
        )  # fmt: skip
    return Prepared(stream, partitions, made, piece)


def _staged_batch(
    connection: apsw.Connection, piece: Piece, blob_id: int, check: int
) -> pa.RecordBatch:
    data = read_blob(connection, blob_id)
    if data is None:
        raise _no_piece(piece)
    if checksum(data) != check:
        raise PieceError(f"a staged piece of stream {piece.stream} is damaged: stage it again")
    return decode_blob(data)


def _no_piece(piece: Piece) -> PieceError:
    return PieceError(
        f"a staged piece of stream {piece.stream} is not there: it was swept because its producer "
        "was opened by another holder, or committed already"
    )


def check_holder(write: Write, holder: Holder) -> tuple[int | None, bytes | None]:
    """The producer's latest sequence and outcome; `FencedError` unless the holder holds it."""
    row = write.look("producer", holder.producer)
    epoch, sequence, outcome = row or (None, None, None)
    check_held(holder, epoch)
    return sequence, outcome


def _check_streams(write: Write, streams: Iterable[Stream]) -> None:
    for stream in {s.id: s for s in streams}.values():
        row = write.look("stream_version", *stream.name)
        if row != (stream.id, stream.version):
            raise StreamChangedError


def write_stage(write: Write, holder: Holder, sequence: int, prepared: Prepared) -> Piece:
    """Insert the blobs and note whose they are; nothing becomes visible."""
    latest, _ = check_holder(write, holder)
    check_stageable(holder, sequence, latest)
    _check_streams(write, [prepared.stream])
    failpoint("stage.begun")
    names = []
    for chunk in prepared.chunks:
        blob_id = _insert_blob(write, chunk)
        write.run(
            "insert_piece", blob_id, holder.producer, holder.epoch, sequence, prepared.stream.id,
            chunk.partition, prepared.partitions, chunk.rows, chunk.size, chunk.checksum,
        )  # fmt: skip
        names.append(blob_id)
    failpoint("stage.blobs")
    rows = sum(chunk.rows for chunk in prepared.chunks)
    return Piece(str(prepared.stream.name), tuple(names), rows)


def _insert_blob(write: Write, chunk: Chunk) -> int:
    return write.insert("insert_blob", chunk.blob)


def write_commit(
    write: Write,
    holder: Holder,
    sequence: int,
    prepared: Sequence[Prepared],
    progress: dict[str, bytes | None],
) -> Committed:
    """Make everything prepared visible and save the progress.

    1. The holder must hold the producer, and the sequence be new; a repeated name returns
       its first outcome.
    2. The streams must be as they were when the events were prepared, and the pieces there.
    3. Blobs and index rows are written, and offsets given.
    4. Table entries, progress, and the producer's outcome follow.
    """
    latest, outcome = check_holder(write, holder)
    if latest is not None and sequence <= latest:
        first = repeated(holder, sequence, _OUTCOME.decode(cast(bytes, outcome)))
        write.dirty = True  # so that it is synced, whoever wrote it, before it is said again
        return first
    _check_streams(write, (item.stream for item in prepared))
    _check_pieces(write, holder, sequence, prepared)
    number = write.next_commit()
    tables = any(item.stream.spec.table for item in prepared)
    pinned = tables and write.look("oldest_pin", write.time_us) != (None,)
    placements = [place(write, item, number, pinned) for item in prepared]
    _save_progress(write, progress)
    failpoint("commit.progress")
    committed = Committed(
        producer=holder.producer,
        sequence=sequence,
        commit=number,
        time=from_microseconds(write.time_us),
        placements=tuple(placements),
    )
    packed = msgspec.msgpack.encode(committed)
    write.run("save_producer", sequence, packed, write.time_us, holder.producer)
    return committed


def _check_pieces(
    write: Write, holder: Holder, sequence: int, prepared: Sequence[Prepared]
) -> None:
    named: set[int] = set()
    for item in prepared:
        for blob_id in item.piece.batches if item.piece else ():
            row = write.look("piece", blob_id)
            if row is None or row[:3] != (holder.producer, holder.epoch, sequence):
                assert item.piece is not None  # noqa: S101  only pieces have batches
                raise _no_piece(item.piece)
            if row[3] != item.stream.id or blob_id in named:
                raise PieceError(f"a piece of stream {item.stream.name} is named twice, or wrongly")
            named.add(blob_id)


def place(write: Write, item: Prepared, number: int, pinned: bool) -> Placement:
    ranges: list[tuple[int, int, int]] = []
    dropped: list[int] = []
    row = 0
    for chunk in item.chunks:
        kept = chunk
        if chunk.batch is not None:
            kept, gone = _without_held(write, item.stream, chunk)
            dropped += [row + index for index in gone]
            failpoint("commit.ids")
        row += chunk.rows
        if kept.rows:
            first = _index(write, item.stream, kept, number)
            widen(ranges, kept.partition, first, kept.rows)
            _save_entries(write, item.stream, kept, first, number, pinned)
        if chunk.blob_id is not None:
            write.run("delete_piece", chunk.blob_id)
            failpoint("publish.pieces")
    return Placement(str(item.stream.name), item.partitions, tuple(ranges), tuple(dropped))


def _without_held(write: Write, stream: Stream, chunk: Chunk) -> tuple[Chunk, list[int]]:
    """The chunk without the events whose ids the stream holds, and the rows of those."""
    batch = chunk.batch
    assert batch is not None  # noqa: S101  kept for this very purpose
    gone = take_new(write, stream.id, ids_of(batch).to_pylist())
    if not gone:
        return chunk, gone
    if chunk.blob_id is not None:
        write.run("delete_blob", chunk.blob_id)
    keep = pc.invert(pc.is_in(pa.arange(0, batch.num_rows), value_set=pa.array(gone, pa.int64())))
    left = numbered(batch).filter(keep)
    made = _chunk(stream, chunk.partition, left, CommitOptions(), keep=False)
    return made, gone


def _index(write: Write, stream: Stream, chunk: Chunk, number: int) -> int:
    blob_id = chunk.blob_id if chunk.blob is None else _insert_blob(write, chunk)
    assert blob_id is not None  # noqa: S101  a chunk has a blob or the id of one
    failpoint("commit.blobs")
    first = write.take_offsets(stream.id, chunk.partition, chunk.rows, chunk.size)
    insert_batch(
        write, (stream.id, chunk.partition, first), chunk.rows, blob_id, chunk.size,
        chunk.checksum, number, write.time_us, None,
    )  # fmt: skip
    failpoint("commit.index")
    return first


def insert_batch(  # noqa: PLR0913  the columns of one row
    write: Write, place: tuple[int, int, int], rows: int, blob_id: int, size: int,
    blob_checksum: int, commit: int, time_us: int, runs: bytes | None,
) -> None:  # fmt: skip
    """Add a row to the offset index, sealed."""
    mark = seal(place, rows, blob_id, blob_checksum, commit, time_us, runs)
    values = (rows, blob_id, size, blob_checksum, commit, time_us, runs, mark)
    write.run("insert_batch", *place, *values)


def _save_entries(
    write: Write, stream: Stream, chunk: Chunk, first: int, number: int, pinned: bool
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
        deleted, changes = changes.parted()
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
