"""The offset index: a sealed row for each stored batch, and the batch that it refers to."""

from __future__ import annotations

import struct
from typing import NamedTuple

import apsw
import msgspec
import pyarrow as pa

from penstock.errors import DamagedError
from penstock.log.batch import Batch, CommitRun, checksum, decode_blob
from penstock.log.declaring.objects import Stream
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import one, read_blob
from penstock.records.ranges import OUT_OF_RANGE

_RUNS = msgspec.msgpack.Decoder(list[CommitRun])


class IndexRow(NamedTuple):
    """A row of the offset index, in column order; a row to be inserted has no seal."""

    first_offset: int
    rows: int
    blob_id: int
    size: int
    checksum: int
    commit_number: int
    time_us: int
    runs: bytes | None = None
    seal: int | None = None

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.rows


def insert_row(write: Write, stream_id: int, partition: int, row: IndexRow) -> None:
    """Add a row to the index, sealed."""
    sealed = row._replace(seal=_seal_of(stream_id, partition, row))
    write.run("insert_batch", stream_id, partition, *sealed)


def _seal_of(stream_id: int, partition: int, row: IndexRow) -> int:
    """A checksum of a row, so that neither it nor its blob can change unnoticed."""
    fixed = struct.pack(
        ">8q",
        stream_id,
        partition,
        row.first_offset,
        row.rows,
        row.blob_id,
        row.checksum,
        row.commit_number,
        row.time_us,
    )
    return checksum(fixed + (row.runs or b""))


class WrongBatchError(Exception):
    """A stored batch is not what was written."""


def row_near(
    connection: apsw.Connection, stream: Stream, partition: int, offset: int
) -> IndexRow | None:
    """The index row whose batch contains an offset, or the next one.

    Raises `DamagedError` if the row found there cannot be trusted.
    """
    for name, values in (("batch_before", ()), ("batches_from", (1,))):
        found = one(connection, name, stream.id, partition, offset, *values)
        if found is not None:
            row = IndexRow(*found)
            check_row(connection, stream, partition, row)
            if row.next_offset > offset:
                return row
    return None


def check_row(connection: apsw.Connection, stream: Stream, partition: int, row: IndexRow) -> None:
    """Raise `DamagedError` unless the row's seal is correct."""
    if row.seal != _seal_of(stream.id, partition, row):
        why = "its index entry does not match its seal"
        raise damage_at(connection, stream, partition, row, why)


def read_stored(connection: apsw.Connection, row: IndexRow) -> pa.Buffer | None:
    """The blob of a row; `None` if there is none."""
    try:
        return read_blob(connection, row.blob_id)
    except apsw.CorruptError as error:
        raise WrongBatchError(str(error)) from error


def decode(stream: Stream, partition: int, row: IndexRow, data: pa.Buffer) -> Batch:
    """Check and decode a stored batch. Raises `WrongBatchError` if it is not what was written."""
    if checksum(data) != row.checksum:
        raise WrongBatchError("its checksum does not match")
    try:
        stored = decode_blob(data)
    except (pa.ArrowException, OSError) as error:
        raise WrongBatchError(str(error)) from error
    if stored.num_rows != row.rows:
        raise WrongBatchError("its number of events does not match the index")
    return Batch(stream, partition, row.first_offset, stored, runs_of(row))


def decode_runs(packed: bytes) -> list[CommitRun]:
    """The commits that the events of a merged batch belong to."""
    return _RUNS.decode(packed)


def runs_of(row: IndexRow) -> list[CommitRun]:
    if row.runs is None:
        return [CommitRun(row.first_offset, row.commit_number, row.time_us)]
    return decode_runs(row.runs)


def unreadable(stream: Stream, partition: int, offset: int) -> DamagedError:
    """The error for an event that is stored as it was written, but still cannot be read."""
    return DamagedError(
        f"stream {stream.name}, partition {partition}: the event at offset {offset} contains "
        f"{OUT_OF_RANGE}; everything else can be read: continue at offset {offset + 1}",
        str(stream.name),
        partition,
        offset,
        offset,
    )


def damage_at(
    connection: apsw.Connection, stream: Stream, partition: int, row: IndexRow, why: str
) -> DamagedError:
    """The error for a damaged batch. It extends to the next batch, whatever the row says."""
    after = one(connection, "batches_from", stream.id, partition, row.first_offset + 1, 1)
    bounds = one(connection, "offsets_of_partition", stream.id, partition)
    end = after[0] if after is not None else bounds[1] if bounds is not None else 0
    last = max(end - 1, row.first_offset)
    return DamagedError(
        f"stream {stream.name}, partition {partition}: offsets {row.first_offset} to {last} are "
        f"damaged ({why}); everything else can be read: continue at offset {last + 1}, and "
        "restore these from a backup",
        str(stream.name),
        partition,
        row.first_offset,
        last,
    )
