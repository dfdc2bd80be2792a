"""Which partition an event belongs to, and how large a stored batch may be."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.log.api import Limits, Part, Placement
from penstock.log.declaring.objects import Stream
from penstock.records.event import (
    add_numbers,
    first_id,
    keys_of,
    partition_of,
    partitions_of,
    slice_stamped,
)


def split_part(stream: Stream, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """The events of a stamped batch by partition, in their order; see promise 7."""
    if not batch.num_rows:
        return []
    if stream.partitions == 1:
        return [(0, batch)]
    homes = homes_of(batch, stream.partitions)
    found: list[tuple[int, pa.RecordBatch]] = []
    present = sorted(pc.unique(homes).to_pylist())
    if len(present) == 1:
        return [(present[0], batch)]
    batch = add_numbers(batch)
    for partition in present:
        found.append((partition, batch.filter(pc.equal(homes, partition))))
    return found


def homes_of(batch: pa.RecordBatch, partitions: int) -> pa.Array:
    """The partition of each row. Rows without a key stay together, chosen by the first id."""
    if partitions == 1 or not batch.num_rows:
        return pa.repeat(pa.scalar(0, pa.int32()), batch.num_rows)
    keyless = partition_of(first_id(batch).encode(), partitions)
    return partitions_of(keys_of(batch), partitions, keyless)


def chunks(batch: pa.RecordBatch, limits: Limits) -> list[pa.RecordBatch]:
    """A batch split so that no stored batch exceeds the limits on rows and bytes."""
    rows = batch.num_rows
    if rows > limits.batch_rows_max:
        step = limits.batch_rows_max
    elif rows > 1 and batch.nbytes > limits.batch_bytes_max:
        step = (rows + 1) // 2
    else:
        return [batch]
    cut = [slice_stamped(batch, at, min(step, rows - at)) for at in range(0, rows, step)]
    return [chunk for piece in cut for chunk in chunks(piece, limits)]


def cut(
    stream: Stream, batch: pa.RecordBatch, limits: Limits
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The events of a stamped batch by partition, in batches small enough to be stored."""
    for partition, part in split_part(stream, batch):
        for chunk in chunks(part, limits):
            yield partition, chunk


def without(batch: pa.RecordBatch, rows: Collection[int]) -> pa.RecordBatch:
    """A stamped batch without these rows; the others keep their ids."""
    gone = pa.array(rows, pa.int64())
    keep = pc.invert(pc.is_in(pa.arange(0, batch.num_rows), value_set=gone))
    return add_numbers(batch).filter(keep)


def widen(ranges: list[tuple[int, int, int]], partition: int, first: int, rows: int) -> None:
    """Add events to a placement's ranges: to the last one, if they directly follow it."""
    if ranges and ranges[-1][0] == partition and ranges[-1][1] + ranges[-1][2] == first:
        ranges[-1] = (partition, ranges[-1][1], ranges[-1][2] + rows)
    else:
        ranges.append((partition, first, rows))


def places(placement: Placement, part: Part) -> Iterator[tuple[int, int | None]]:
    """Partition and offset of each event of a part, in its order."""
    homes = homes_of(part.batch, placement.partitions).to_pylist()
    dropped = set(placement.dropped)
    offsets: dict[int, Iterator[int]] = {}
    for partition in {p for p, _, _ in placement.ranges}:
        ranges = [range(first, first + n) for p, first, n in placement.ranges if p == partition]
        offsets[partition] = (offset for found in ranges for offset in found)
    for row, partition in enumerate(homes):
        yield partition, None if row in dropped else next(offsets[partition])
