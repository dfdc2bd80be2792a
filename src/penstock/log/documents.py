"""Events as the documents that others read: JSON, or the bytes that they are."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.log.objects import Stream
from penstock.records.documents import to_documents
from penstock.records.event import DATA, DELETED, data_columns


def documents_of(stream: Stream, batch: pa.RecordBatch) -> pa.Array:
    """The document of each row, as bytes; null for an entry that was deleted."""
    plain = data_columns(batch)
    if stream.record is None:
        documents = plain.column(DATA).cast(pa.binary())
    else:
        documents = to_documents(plain, stream.record)
    if DELETED not in batch.schema.names:
        return documents
    return pc.if_else(batch.column(DELETED), pa.scalar(None, pa.binary()), documents)
