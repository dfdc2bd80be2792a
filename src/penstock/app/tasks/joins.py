"""What re-keying, lookups and joins of tables do with a split: columns in, columns out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from penstock.app.declaring.definitions import Lookup, Rekey, TableJoin
from penstock.app.declaring.streams import How
from penstock.app.declaring.tables import AppTable, Values
from penstock.app.tasks.state import changes_part
from penstock.app.tasks.task import BatchOrder, Inputs, Outcome, Split, derived_id, stage
from penstock.log.api import Log, Part, Pin
from penstock.log.batch import Batch, in_order_of_commit
from penstock.log.declaring.objects import Stream
from penstock.log.writing.compose import Composer
from penstock.records.arrow import codec_of_schema
from penstock.records.event import partitions_of
from penstock.records.schema import Record, Schema, record_type


class RekeyWork:
    """Copies events to a stream with another key; their ids follow from those of the input."""

    def __init__(self, app: str, definition: Rekey) -> None:
        self.name = definition.name
        self._source = f"{app}.{definition.name}"
        self._output = definition.outputs[0].name

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        composer = Composer(self._source, log.limits)
        output = log.stream(self._output)
        made = [_envelope(self._source, item, item.data(), output) for item in inputs.batches]
        if split.as_stored and made:
            made = [in_order_of_commit(inputs.batches, made)]
        else:
            pairs = zip(inputs.batches, made, strict=True)
            made = [_of_slot(item, whole, split) for item, whole in pairs]
        parts = [composer.arrow_part(output, whole) for whole in made]
        return Outcome(pieces=stage(log, batch, parts), rows_out=_rows(parts))


class LookupWork:
    """Adds to each event the entry of its key, as of the moment that the batch has pinned."""

    def __init__(self, app: str, definition: Lookup) -> None:
        self.name = definition.name
        self._source = f"{app}.{definition.name}"
        self._output = definition.outputs[0].name
        self._table = definition.reads[0]
        self._how = definition.how

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        composer = Composer(self._source, log.limits)
        parts = [self._join_part(log, composer, item, batch.pin, split) for item in inputs.batches]
        return Outcome(pieces=stage(log, batch, parts), rows_out=_rows(parts))

    def _join_part(
        self, log: Log, composer: Composer, item: Batch, pin: Pin | None, split: Split
    ) -> Part:
        output = log.stream(self._output)
        schema = cast(Schema, output.record)
        encoded = item.keys().dictionary_encode()
        keys = encoded.dictionary.to_pylist()
        values = read_values(log, self._table, keys, pin)
        # A record of the joined column alone, so that it is encoded like any other.
        field = cast(Any, schema.field(self._table.name))
        single = Schema("Joined", (field,))
        made: Any = record_type(single)
        rows = [made(**{self._table.name: value}) for value in values]
        column = codec_of_schema(single).to_arrow(rows).column(0)
        data = item.data()
        wide = data.append_column(
            pa.field(self._table.name, column.type), column.take(encoded.indices)
        )
        whole = _of_slot(item, _envelope(self._source, item, wide, output), split)
        if self._how == "inner":
            whole = whole.filter(pc.is_valid(whole.column(self._table.name)))
        return composer.arrow_part(output, whole)


class TableJoinWork:
    """Keeps a table equal to the join of two others: recomputes every key that changed."""

    def __init__(self, app: str, definition: TableJoin) -> None:
        self.name = definition.name
        self._source = f"{app}.{definition.name}"
        self._output: AppTable[object] = cast(AppTable[object], definition.outputs[0])
        self._sides = definition.reads
        self._how = definition.how

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        keys = sorted({key for item in inputs.batches for key in _keys_of_slot(item, split)})
        stream = log.stream(self._output.name)
        values = Values(self._output, stream)
        before = log.get(self._output.name, keys, settled=True)
        sides = [read_values(log, table, keys, batch.pin) for table in self._sides]
        made: Any = record_type(cast(Schema, stream.record))
        names = [table.name for table in self._sides]
        rows: list[Record | None] = []
        changed: list[bytes] = []
        entries: list[bytes | None] = []
        for key, old, left, right in zip(keys, before, *sides, strict=True):
            row = None
            if _is_paired(self._how, left, right):
                row = made(**{names[0]: left, names[1]: right})
            packed = None if row is None else values.pack(row)
            if packed != (None if old is None else old.value):
                rows.append(row)
                changed.append(key)
                entries.append(packed)
        if not rows:
            return Outcome()
        composer = Composer(self._source, log.limits)
        part = changes_part(composer, stream, rows, changed, entries)
        return Outcome(pieces=stage(log, batch, [part]), rows_out=len(rows))


def read_values(
    log: Log, table: AppTable[object], keys: Sequence[bytes], pin: Pin | None
) -> list[object]:
    """The values of these keys at one moment; `None` for a key without an entry."""
    wanted = [key for key in keys if key is not None]
    unpack = Values(table, log.stream(table.name)).unpack
    found = log.get(table.name, wanted, pin)
    return [None if entry is None else unpack(entry.value) for entry in found]


def _is_paired(how: How, left: object, right: object) -> bool:
    match how:
        case "inner":
            return left is not None and right is not None
        case "left":
            return left is not None
        case "right":
            return right is not None
        case "outer":
            return left is not None or right is not None


def _keys_of_slot(item: Batch, split: Split) -> list[bytes]:
    keys = item.keys().unique()
    if split.slots > 1:
        keys = keys.filter(pc.equal(partitions_of(keys, split.slots, 0), split.slot))
    return [key for key in keys.to_pylist() if key is not None]


def _of_slot(item: Batch, whole: pa.RecordBatch, split: Split) -> pa.RecordBatch:
    """The rows whose keys belong to this task."""
    if split.slots == 1:
        return whole
    return whole.filter(pc.equal(partitions_of(item.keys(), split.slots, 0), split.slot))


def _envelope(source: str, item: Batch, data: pa.RecordBatch, output: Stream) -> pa.RecordBatch:
    """The data columns with an id derived from the input's, and the rest of the envelope.

    Fields that the output lacks are dropped: a newer version of the app may have added them to the
    input.
    """
    if output.record is not None:
        known = {field.name for field in output.record.fields}
        data = data.select([name for name in data.schema.names if name in known])
    ids = [derived_id(source, id_, 0) for id_ in item.ids().to_pylist()]
    made = data.append_column(pa.field("_id", pa.string()), pa.array(ids, pa.string()))
    kept = ["_headers"]
    kept += [] if output.spec.time else ["_time"]
    kept += [] if output.spec.key else ["_key"]
    for name in kept:
        column = item.to_arrow([name]).column(0)
        if column.null_count < len(column):
            made = made.append_column(pa.field(name, column.type), column)
    return made


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.batch.num_rows for part in parts)
