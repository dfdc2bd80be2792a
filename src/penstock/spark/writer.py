"""Writing with `format("penstock")`: tasks stage, the driver commits, and the first commit wins."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.app.tasks.task import STAGED
from penstock.errors import PlanChangedError, SequenceError, UsageError
from penstock.log.api import Commit, Holder, Log, Piece
from penstock.log.writing.commit import commit_surely, next_sequence
from penstock.log.writing.compose import Composer
from penstock.records.event import DELETED
from penstock.spark.options import SourceOptions
from penstock.spark.worker import quiet_log, worker_log

#: columns of the stream that was read that have no meaning in the stream written
_OF_THE_READER = ("_partition", "_offset", "_id", "_type", "_source")
PIECES = msgspec.msgpack.Decoder(list[Piece])


@dataclass
class StagedRows(WriterCommitMessage):
    """What a task staged; `query` is the id that Spark keeps in the query's checkpoint."""

    pieces: bytes
    holder: bytes
    query: str = ""


def stage_batches(
    log: Log,
    holder: Holder,
    sequence: int,
    stream: str,
    batches: Iterator[pa.RecordBatch],
    source: str,
) -> list[Piece]:
    """Stage columns of a DataFrame for a commit; raises `UsageError` for invalid ones."""
    composer = Composer(source, log.limits)
    found = log.stream(stream)
    pieces = []
    for batch in batches:
        if batch.num_rows:
            part = composer.arrow_part(found, writable(batch, found.spec.key is not None))
            pieces.append(log.stage(holder, sequence, part, STAGED))
    return pieces


def writable(batch: pa.RecordBatch, has_key: bool) -> pa.RecordBatch:
    """The columns to write: without those that belong to the stream that was read."""
    dropped = set(_OF_THE_READER)
    if has_key and DELETED not in batch.schema.names:
        dropped.add("_key")
    names = [name for name in batch.schema.names if name not in dropped]
    return batch if len(names) == batch.num_columns else batch.select(names)


class BatchWriter(DataSourceArrowWriter):
    """`df.write`: everything becomes visible at once, or nothing."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        name = options.producer or f"spark-{secrets.token_hex(8)}"
        with quiet_log(options.log, options.for_log) as log:
            log.stream(options.stream)
            self._holder = log.hold(name, ephemeral=options.producer is None)
            self._sequence = next_sequence(log, name)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        log = worker_log(self._options.log, self._options.for_log)
        pieces = stage_batches(
            log,
            self._holder,
            self._sequence,
            self._options.stream,
            iterator,
            self._holder.producer,
        )
        return StagedRows(msgspec.msgpack.encode(pieces), msgspec.msgpack.encode(self._holder))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        pieces = _all_pieces(messages)
        with quiet_log(self._options.log, self._options.for_log) as log:
            commit_surely(log, self._holder, self._sequence, Commit(pieces=pieces))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing to do: nothing is visible, and staged pieces are swept later."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`: each micro-batch is one commit, named after its number.

    The option `producer` is the permanent name of the writer. A batch that Spark runs again is
    found to be committed and changes nothing. A query with another checkpoint is refused, since
    its batch numbers stand for other batches.
    """

    def __init__(self, options: SourceOptions) -> None:
        if not options.producer:
            raise UsageError(
                "a streaming write needs the option producer: a name for this query that stays "
                "the same when it is restarted"
            )
        self._options = options
        self._producer = options.producer
        self._holder: Holder | None = None

    def __getstate__(self) -> dict[str, object]:
        # Spark creates one writer in each process on the driver's side, and sends the one that it
        # plans with to the tasks. That moment decides who writes: an older run is fenced here. The
        # writer that commits learns from the tasks which holder their pieces belong to.
        if self._holder is None:
            with quiet_log(self._options.log, self._options.for_log) as log:
                log.stream(self._options.stream)
                self._holder = log.hold(self._producer)
        return dict(self.__dict__)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None  # noqa: S101  Spark calls this in a task
        sequence = int(context.getLocalProperty("streaming.sql.batchId") or 0)
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        holder = self._holder
        assert holder is not None  # noqa: S101  set when this writer was pickled
        log = worker_log(self._options.log, self._options.for_log)
        check_checkpoint(log, self._producer, query)
        try:
            pieces = stage_batches(
                log, holder, sequence, self._options.stream, iterator, self._producer
            )
        except SequenceError:
            pieces = []  # committed by an earlier run, as the driver will find
        return StagedRows(msgspec.msgpack.encode(pieces), msgspec.msgpack.encode(holder), query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        first = next((m for m in messages if isinstance(m, StagedRows)), None)
        if first is None:
            return  # no tasks, so nothing to commit
        holder = msgspec.msgpack.decode(first.holder, type=Holder)
        with quiet_log(self._options.log, self._options.for_log) as log:
            last = log.last_commit(self._producer)
            mark = batch_mark(self._options.checkpoint, batchId)
            if last is not None and last.sequence >= batchId:
                _, known = read_checkpoint(log, self._producer)
                if last.sequence > batchId or (known and mark and known != mark):
                    raise PlanChangedError(
                        f"the producer {self._producer} has already written batch "
                        f"{last.sequence}, and this batch {batchId} is a different one: the "
                        "checkpoint is an old copy; restore the newer one"
                    )
                return
            progress = {checkpoint_key(self._producer): f"{first.query} {mark}".encode()}
            commit = Commit(pieces=_all_pieces(messages), progress=progress)
            commit_surely(log, holder, batchId, commit)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing to do: nothing is visible, and staged pieces are swept later."""


def checkpoint_key(producer: str) -> str:
    """The key under which the log saves the checkpoint of a producer's batch numbers."""
    return f"checkpoint/{producer}"


def read_checkpoint(log: Log, producer: str) -> tuple[str, str]:
    """The query whose batches the producer has written, and the mark of the last batch."""
    noted = log.progress(checkpoint_key(producer))
    query, _, mark = ("" if noted is None else noted.decode()).partition(" ")
    return query, mark


def batch_mark(checkpoint: str | None, batch: int) -> str:
    """A hash of the offsets that Spark saved for a batch; distinguishes batches of one number.

    Empty if the checkpoint is not a folder on this machine.
    """
    if checkpoint is None:
        return ""
    folder = Path(checkpoint.removeprefix("file://").removeprefix("file:"))
    try:
        return hashlib.sha256((folder / "offsets" / str(batch)).read_bytes()).hexdigest()
    except OSError:
        return ""


def check_checkpoint(log: Log, producer: str, query: str) -> None:
    known, _ = read_checkpoint(log, producer)
    if known and known != query:
        raise PlanChangedError(
            f"the producer {producer} has written batches of another checkpoint: start the query "
            "with its original checkpoint, or write under another producer name from now on"
        )


def _all_pieces(messages: Sequence[WriterCommitMessage | None]) -> list[Piece]:
    found = [PIECES.decode(m.pieces) for m in messages if isinstance(m, StagedRows)]
    return [piece for pieces in found for piece in pieces]
