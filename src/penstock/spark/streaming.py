"""Definitions whose state Spark keeps: windows, sums, joins of streams.

Each is a streaming query of Spark with a checkpoint. Its micro-batches are committed under
their number, and the first commit of a number wins: what a replay computes is discarded.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock.app.definitions import Definition, Derivation
from penstock.app.positions import Position, producer_name, progress_key, saved_position
from penstock.app.query import Step, failed, told
from penstock.app.tables import AppTable
from penstock.app.task import BatchOrder, Outcome, Range, Split
from penstock.app.windows import Windows
from penstock.errors import (
    CommitOutcomeUnknownError,
    PenstockError,
    PlanChangedError,
    SparkGoneError,
)
from penstock.log import OptionValue
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.spark.columns import stream_columns
from penstock.spark.failures import spark_alive, user_failure
from penstock.spark.frames import (
    Shape,
    collect_staged,
    ordered,
    read_stream,
    read_table,
    stage_frame,
)

MARKER = "penstock.json"
WAIT_MS = 250
COMMIT_TRIES = 5
PIN_S = 600.0
NOTHING_TO_DO = "Waiting for data to arrive"


class Marker(msgspec.Struct, frozen=True):
    """Lies in a checkpoint and says which it is, and for which plan it was made."""

    id: str
    plan: str


class Offsets(msgspec.Struct, frozen=True):
    """What Spark wrote down for a micro-batch before it ran it."""

    ends: dict[str, dict[int, int]]
    watermark_ms: int


class StatefulQuery:
    """One definition as a streaming query of Spark."""

    def __init__(
        self,
        spark: SparkSession,
        log: Log,
        options: Mapping[str, OptionValue],
        app: str,
        shape: Shape,
        checkpoints: Path,
        batch_rows_max: int,
    ) -> None:
        self.name = shape.definition.name
        self.definitions: tuple[Definition, ...] = (shape.definition,)
        self._spark = spark
        self._log = log
        self._options = dict(options)
        self._app = app
        self._shape = shape
        self._batch_rows_max = batch_rows_max
        self._folder = checkpoints / app / self.name
        self._query: StreamingQuery | None = None
        self._holder: Holder | None = None
        self._marker = Marker("", "")
        self._error: BaseException | None = None
        self._is_busy = False
        self._is_quiet = False
        self._tell: Callable[[Step], None] = lambda step: None
        self.position = saved_position(log, app, self.name) or Position(
            producer="", sequence=0, next={}
        )

    @property
    def producer(self) -> str:
        return producer_name(self._app, f"{self.name}@{self._marker.id}")

    # Running

    def run(self, stop: threading.Event, tell: Callable[[Step], None]) -> None:
        self._tell = tell
        self._error = None
        self._marker = self._checked_marker()
        self._holder = self._log.hold(self.producer)
        with spark_alive():
            self._follow(stop)
        if self._error is not None:
            raise self._error

    def _follow(self, stop: threading.Event) -> None:
        """Start Spark's query and stay with it until it ends, or is told to."""
        self._query = self._start()
        try:
            while not stop.is_set():
                if self._query.awaitTermination(0.1):  # type: ignore[arg-type]  # it takes fractions
                    break
        except PySparkException as error:
            raise self._known(error) from None
        finally:
            self._stop(self._query)

    def _start(self) -> StreamingQuery:
        shape = self._shape
        frames: dict[str, DataFrame] = {}
        for stream in shape.streams:
            reader = self._spark.readStream.format("penstock").option("log", self._log.url)
            for name, value in self._options.items():
                reader = reader.option(f"log.{name}", str(value))
            names = ",".join(shape.columns[stream.name].names)
            reader = reader.option("columns", names).option("wait_ms", WAIT_MS)
            reader = reader.option("batch_rows", self._batch_rows_max // len(shape.streams) or 1)
            frame = reader.load(stream.name)
            # A watermark nobody asks about would only cause batches without data.
            if stream.watermark_us is not None and stream.time in shape.columns[stream.name].names:
                assert stream.time is not None  # noqa: S101  a watermark needs a time
                frame = frame.withWatermark(stream.time, f"{stream.watermark_us} microseconds")
            frames[stream.name] = frame
        for table in shape.tables:
            columns = shape.columns[table.name]
            frames[table.name] = read_table(
                self._spark, self._log.url, self._options, table.name, columns
            )
        result = shape.prepared(shape.applied(frames))
        is_table = isinstance(shape.definition.outputs[0], AppTable)
        return (
            result.writeStream.foreachBatch(self._handle)
            .outputMode("update" if is_table else "append")
            .option("checkpointLocation", str(self._folder))
            .queryName(f"{self._app}.{self.name}")
            .start()
        )

    def _stop(self, query: StreamingQuery) -> None:
        with contextlib.suppress(PySparkException, SparkGoneError), spark_alive():
            query.stop()

    # One micro-batch

    def _handle(self, frame: DataFrame, number: int) -> None:
        self._is_busy, self._is_quiet = True, False
        try:
            self._handle_batch(frame, number)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_busy, self._is_quiet = False, False

    def _handle_batch(self, frame: DataFrame, number: int) -> None:
        """Commit a micro-batch, unless it has been committed; then only rebuild the state."""
        assert self._holder is not None  # noqa: S101  run holds before it starts
        began = time.monotonic()
        offsets = read_offsets(self._folder, number, [s.name for s in self._shape.streams])
        last = self._log.last_commit(self.producer)
        if last is not None and last.sequence >= number:
            order = self._order(number, offsets)
            with ordered(self._spark, order):
                frame.write.format("noop").mode("overwrite").save()
            return
        order = self._order(number, offsets)
        staged = self._staged(frame, self._shape.output.name)
        late = self._late(offsets, number)
        if late is not None:
            staged = staged.union(late)
        with ordered(self._spark, order):
            outcomes = collect_staged(staged)
        if order.pin is not None:
            self._log.unpin(order.pin)
        position = Position(
            producer=self.producer, sequence=number, next=offsets.ends,
            time_us=order.now_us, checkpoint=self._marker.id, plan=self._marker.plan,
        )  # fmt: skip
        committed = self._commit(order, outcomes, position)
        self.position = position
        rows = sum(r.end - r.start for split in order.splits for r in split.ranges)
        self._tell(
            told(self._log, order, [*outcomes, Outcome(rows_in=rows)], committed,
                 time.monotonic() - began)
        )  # fmt: skip

    def _order(self, number: int, offsets: Offsets) -> BatchOrder:
        ranges = []
        for name, ends in offsets.ends.items():
            for partition, end in ends.items():
                start = self.position.next.get(name, {}).get(partition, 0)
                if end > start:
                    ranges.append(Range(name, partition, start, end))
        assert self._holder is not None  # noqa: S101  run holds before it starts
        return BatchOrder(
            query=self.name, holder=self._holder, sequence=number,
            now_us=time.time_ns() // 1000, splits=(Split(number=0, ranges=tuple(ranges)),),
            pin=self._log.pin(PIN_S) if self._shape.tables else None,
        )  # fmt: skip

    def _staged(self, frame: DataFrame, stream: str) -> DataFrame:
        source = f"{self._app}.{self.name}"
        return stage_frame(frame, self._log.url, self._options, stream, source)

    def _late(self, offsets: Offsets, number: int) -> DataFrame | None:
        """Events of this batch that came after their window was closed."""
        definition = self._shape.definition
        if not isinstance(definition, Derivation) or definition.late is None:
            return None
        assert definition.windows is not None  # noqa: S101  checked when it was declared
        # Spark drops by the watermark of the batch before.
        before = read_offsets(self._folder, number - 1, list(offsets.ends)) if number else None
        if before is None or before.watermark_ms == 0:
            return None
        stream = self._shape.streams[0]
        spec = definition.late.spec or self._shape.output
        assert spec.record is not None  # noqa: S101  a late stream is declared with one
        columns = stream_columns(self._log.stream(stream.name))
        frame = read_stream(self._spark, self._log.url, self._options, stream.name, columns, 1)
        is_late = window_end(definition.windows, str(stream.time)) <= before.watermark_ms * 1000
        names = [field.name for field in spec.record.fields]
        return self._staged(frame.where(is_late).select(names), definition.late.name)

    def _commit(self, order: BatchOrder, outcomes: list[Outcome], position: Position) -> Committed:
        pieces = [piece for outcome in outcomes for piece in outcome.pieces]
        progress: dict[str, bytes | None] = {
            progress_key(self._app, self.name): msgspec.json.encode(position)
        }
        for attempt in range(COMMIT_TRIES):
            try:
                return self._log.commit(
                    order.holder, order.sequence, Commit(pieces=pieces, progress=progress)
                )
            except CommitOutcomeUnknownError:
                if attempt + 1 == COMMIT_TRIES:
                    raise
        raise AssertionError

    # How it is doing

    def lag(self) -> int:
        waiting = 0
        for stream in self._shape.streams:
            at = self.position.next.get(stream.name, {})
            for partition, offsets in self._log.offsets(stream.name).items():
                waiting += max(0, offsets.next - max(at.get(partition, 0), offsets.first))
        return waiting

    def is_idle(self) -> bool:
        """Whether Spark has looked for more to do since the last batch, and found nothing.

        Having read everything is not enough: a batch without data may follow, to close windows.
        """
        query = self._query
        if query is None or self._is_busy:
            return False
        if not self._is_quiet:
            with spark_alive():
                message = query.status["message"]
            self._is_quiet = message == NOTHING_TO_DO and not self._is_busy
        return self._is_quiet and self.lag() == 0

    def late_rows(self) -> int:
        """How many events of the last batch came too late."""
        progress = None if self._query is None else self._query.lastProgress
        return (
            0
            if progress is None
            else sum(operator.numRowsDroppedByWatermark for operator in progress.stateOperators)
        )

    def close(self) -> None:
        if self._query is not None:
            self._stop(self._query)

    def _known(self, error: PySparkException) -> BaseException:
        """The error that the user can do something about, rather than Spark's wrapping of it."""
        if isinstance(self._error, PenstockError):
            return self._error
        cause = self._error if self._error is not None else error
        return failed(user_failure(self.name, cause))

    # The checkpoint

    def _checked_marker(self) -> Marker:
        """The checkpoint's marker; refuses one that does not belong to what the log holds."""
        saved = saved_position(self._log, self._app, self.name)
        found = read_marker(self._folder)
        where = f"{self._shape.definition.location}: {self.name}"
        way_out = f"`penstock reset {self.name}` lets it start again"
        if saved is None and found is not None and any(self._folder.glob("commits/[0-9]*")):
            raise PlanChangedError(
                f"{where}: the checkpoint {self._folder} has batches that this log does not know; "
                f"use the log it was made with, or {way_out}"
            )
        if saved is not None and not saved.checkpoint:
            raise PlanChangedError(f"{where} had no state in Spark before, and has now: {way_out}")
        if saved is not None and (found is None or found.id != saved.checkpoint):
            raise PlanChangedError(
                f"{where}: its checkpoint is not in {self._folder}: bring it back, or name its "
                f"place with --checkpoints; {way_out}"
            )
        if saved is not None and saved.plan != self._shape.plan:
            raise PlanChangedError(
                f"{where}: what it keeps has changed, and its state does not fit any more.\n"
                f"before:\n{saved.plan}\nnow:\n{self._shape.plan}\n{way_out}"
            )
        if found is not None and (saved is not None or found.plan == self._shape.plan):
            return found
        if self._folder.exists():
            shutil.rmtree(self._folder)
        return write_marker(self._folder, self._shape.plan)


def window_end(windows: Windows, time_column: str) -> Any:
    """When the last window that holds an event ends, in microseconds."""
    at = F.unix_micros(F.col(time_column))
    if windows.kind == "session":
        return at + F.lit(windows.size_us)
    return at - F.pmod(at, F.lit(windows.step_us)) + F.lit(windows.size_us)


def read_marker(folder: Path) -> Marker | None:
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except FileNotFoundError:
        return None


def write_marker(folder: Path, plan: str) -> Marker:
    made = Marker(secrets.token_hex(8), plan)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{MARKER}.new"
    draft.write_bytes(msgspec.json.encode(made))
    draft.rename(folder / MARKER)
    return made


def read_offsets(folder: Path, number: int, streams: list[str]) -> Offsets:
    """The offsets of a micro-batch, as Spark's checkpoint has them."""
    _, metadata, *sources = (folder / "offsets" / str(number)).read_text().splitlines()
    ends = [
        msgspec.json.decode(line, type=dict[int, int]) if line != "-" else {} for line in sources
    ]
    watermark_ms = msgspec.json.decode(metadata)["batchWatermarkMs"]
    return Offsets(dict(zip(streams, ends, strict=True)), watermark_ms)
