"""Records (the data of events), events, and how both map to Arrow and CloudEvents."""

from penstock.records.arrow import RecordCodec, arrow_schema, codec_of
from penstock.records.event import Event, Key, StoredEvent, key_bytes, partition_of
from penstock.records.evolution import check_evolution
from penstock.records.schema import Digits, Record, Schema, schema_of

__all__ = [
    "Digits",
    "Event",
    "Key",
    "Record",
    "RecordCodec",
    "Schema",
    "StoredEvent",
    "arrow_schema",
    "check_evolution",
    "codec_of",
    "key_bytes",
    "partition_of",
    "schema_of",
]
