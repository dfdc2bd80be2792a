"""`format("penstock.sink")`: writes any DataFrame to a sink connector, each row exactly once.

    (orders.writeStream.format("penstock.sink")
        .option("log", "shop.db").option("address", "127.0.0.1:6068")
        .option("producer", "large-orders").option("key", "user")
        .option("checkpointLocation", …).start())

Each row goes to one of a fixed number of workers, chosen by its key, whatever tasks Spark runs. So
tasks write to a stream that has a partition for each worker. The first attempt of a batch that
commits there fixes its contents, and the driver delivers it from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.connect.addresses import check_address
from penstock.connect.push.delivery import Delivery, DeliveryKind, patiently
from penstock.connect.push.remote import RemoteSink
from penstock.connect.push.worker import DialOptions
from penstock.errors import ObjectExistsError, UsageError
from penstock.log.api import Log
from penstock.log.declaring.names import parse_stream
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.declaring.quantities import parse_duration_ms
from penstock.records.arrow import conform
from penstock.records.documents import to_documents
from penstock.records.event import DATA, DELETED, key_column
from penstock.records.schema import Schema
from penstock.spark.columns import record_of
from penstock.spark.options import SourceOptions, checkpoint_of, split_options
from penstock.spark.worker import quiet_log
from penstock.spark.writer import BatchWriter, StreamWriter

FORMAT = "penstock.sink"
WORKERS_MAX = 256


class SinkWriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a write into a sink.

    `key` names the column that determines the worker; the default is the column `_key`, if there
    is one. Rows wait for delivery in the stream `PRODUCER_sink`, for at most `retention`.
    """

    log: str = "penstock.db"
    address: str
    producer: str
    workers: int = 1
    key: str | None = None
    cookie: str = ""
    timeout: str = "60 seconds"
    retention: str = "7 days"
    checkpoint: str | None = None
    log_options: tuple[tuple[str, str], ...] = ()

    @property
    def stream(self) -> str:
        return f"{self.producer}_sink"

    @property
    def timeout_s(self) -> float:
        return parse_duration_ms(self.timeout) / 1000

    @property
    def target(self) -> RemoteSink:
        options = DialOptions(cookie=self.cookie, timeout_s=self.timeout_s)
        way_out = "restore what the sink had, or write under another producer name"
        return RemoteSink(self.producer, self.address, self.workers, options, way_out)

    @property
    def for_writer(self) -> SourceOptions:
        return SourceOptions(
            log=self.log, stream=self.stream, producer=self.producer, checkpoint=self.checkpoint,
            log_options=self.log_options,
        )  # fmt: skip

    def delivery(self, log: Log, kind: DeliveryKind) -> Delivery:
        return Delivery(log, self.target, self.stream, kind)

    def open_log(self) -> Log:
        return quiet_log(self.log, dict(self.log_options))


def parse(options: Mapping[str, str]) -> SinkWriteOptions:
    """Raise `UsageError` for an option that is missing, unknown or invalid."""
    given, of_log = split_options(options, FORMAT, SinkWriteOptions)
    if "path" in given:  # the argument of save and start
        given["address"] = given.pop("path")
    for name in ("address", "producer"):
        if not given.get(name):
            raise UsageError(f"format({FORMAT!r}) needs the option {name}")
    values = {**given, "log_options": of_log, "checkpoint": checkpoint_of(options)}
    try:
        made = msgspec.convert(values, SinkWriteOptions, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid option of format({FORMAT!r}): {error}") from None
    if not 1 <= made.workers <= WORKERS_MAX:
        raise UsageError(
            f"the option workers is {made.workers}; it must be between 1 and {WORKERS_MAX}"
        )
    check_address(made.address)
    parse_stream(made.stream)
    if parse_duration_ms(made.timeout) < 1:
        raise UsageError(f"the option timeout is {made.timeout!r}; it must be positive")
    return made


class SinkSource(DataSource):
    """Created by Spark for each write, in a process of its own."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = parse({k: str(v) for k, v in options.items()})

    def writer(self, schema: StructType, overwrite: bool) -> BatchPusher:
        check_appends(overwrite)
        return BatchPusher(self._options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamPusher:
        check_appends(overwrite)
        return StreamPusher(self._options, schema)


def check_appends(overwrite: bool) -> None:
    if overwrite:
        raise UsageError("a sink can only be appended to: use mode append or update")


class StreamPusher(StreamWriter):
    """Commits each micro-batch to the stream, then delivers it."""

    def __init__(self, options: SinkWriteOptions, schema: StructType) -> None:
        super().__init__(options.for_writer)
        self._sink = options
        self._messages = Messages(options, schema)

    def __getstate__(self) -> dict[str, object]:
        ensure_stream(self._sink)
        return super().__getstate__()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(map(self._messages.of, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        super().commit(messages, batchId)
        options = self._sink
        with options.open_log() as log:
            frozen = log.last_commit(options.producer)
            patiently(options.timeout_s, lambda: options.delivery(log, "stream").deliver(frozen))


class BatchPusher(BatchWriter):
    """Everything becomes visible at once, or nothing: what was not decided is never delivered."""

    def __init__(self, options: SinkWriteOptions, schema: StructType) -> None:
        self._sink = options
        self._messages = Messages(options, schema)
        ensure_stream(options)
        super().__init__(options.for_writer)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(map(self._messages.of, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        options = self._sink
        with options.open_log() as log:
            # A single delivery: another write under this name would fence it.
            delivery = patiently(options.timeout_s, lambda: options.delivery(log, "batch"))
            delivery.skip()
            super().commit(messages)
            delivery.deliver(log.last_commit(options.producer))


class Messages:
    """Rows as messages for a sink: a key, a time, and a JSON document of the other columns."""

    def __init__(self, options: SinkWriteOptions, schema: StructType) -> None:
        names = schema.fieldNames()
        if options.key is not None and options.key not in names:
            raise UsageError(
                f"the key column {options.key!r} does not exist; the columns are {', '.join(names)}"
            )
        self._key = options.key or ("_key" if "_key" in names else None)
        self._has_time = "_time" in names
        data = StructType([field for field in schema if not field.name.startswith("_")])
        if not data:
            raise UsageError("the rows have no data columns: add one whose name has no leading _")
        is_raw = data.fieldNames() == [DATA] and data[0].dataType.typeName() in ("binary", "string")
        self._record: Schema | None = None if is_raw else record_of("Row", data)

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns to store. A single column `data` of text or bytes is sent unchanged."""
        if self._record is None:
            documents = batch.column(DATA).cast(pa.binary())
        else:
            names = [field.name for field in self._record.fields]
            documents = to_documents(conform(batch.select(names), self._record), self._record)
        if DELETED in batch.schema.names:
            gone = batch.column(DELETED).fill_null(False)
            documents = pc.if_else(gone, pa.scalar(b"", pa.binary()), documents)
        columns = {DATA: documents}
        if self._key is not None:
            columns["_key"] = key_column(batch.column(self._key))
        if self._has_time:
            columns["_time"] = batch.column("_time")
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def ensure_stream(options: SinkWriteOptions) -> None:
    """Create the stream in which rows wait, or check that the existing one fits this sink."""
    with options.open_log() as log:
        spec = declare(
            options.stream, content="bytes", partitions=options.workers,
            retention_ms=parse_duration_ms(options.retention),
        )  # fmt: skip
        if options.stream not in {str(stream.name) for stream in log.streams()}:
            with contextlib.suppress(ObjectExistsError):  # another run made it just now
                log.apply([CreateStream(spec)])
        found = log.stream(options.stream)
        if (found.partitions, found.spec.content) != (spec.partitions, spec.content):
            raise UsageError(
                f"the stream {options.stream} has {found.partitions} partitions with "
                f"{found.spec.content} content, but {options.workers} workers need as many "
                "partitions with bytes content: the number of workers cannot change; write under "
                "another producer name"
            )
