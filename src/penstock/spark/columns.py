"""Columns of streams in Spark's types."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.log.batch import Batch
from penstock.records.arrow import schema_of_arrow
from penstock.records.schema import Schema


def spark_schema(columns: pa.Schema) -> StructType:
    """The same columns in Spark's types."""
    return from_arrow_schema(columns)


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """The Arrow types in which Spark accepts columns of this schema from Python."""
    return to_arrow_schema(schema, timezone="UTC", error_on_duplicated_field_names_in_struct=False)


def for_spark(batch: Batch, wanted: pa.Schema) -> pa.RecordBatch:
    """A batch of the log with exactly these columns."""
    made = batch.to_arrow(wanted.names)
    if made.schema.equals(wanted):
        return made
    arrays = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(made.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def record_of(name: str, schema: StructType, required: Sequence[str] = ()) -> Schema:
    """The record that rows of such a DataFrame are stored as; `required` are never null."""
    columns = arrow_schema_of(schema)
    fields = [
        field.with_nullable(field.nullable and field.name not in required) for field in columns
    ]
    return schema_of_arrow(name, pa.schema(fields))
