"""Definitions whose state Spark keeps: windows, sums, joins of streams.

Each is a Spark streaming query with a checkpoint. Its micro-batches are committed under their
number, and the first commit of a number wins: the results of a replay are discarded.
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
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.streaming.query import StreamingQuery

from penstock.app.declaring.definitions import Definition, Derivation
from penstock.app.declaring.tables import AppTable
from penstock.app.declaring.windows import Windows
from penstock.app.running.batches import (
    BatchReport,
    commit_batch,
    count_rows,
    describe_batch,
    error_of,
)
from penstock.app.running.building import describe, stream_ids
from penstock.app.running.positions import (
    AppRun,
    CheckpointPosition,
    Mover,
    Position,
    StartPosition,
    producer_name,
    read_own_position,
)
from penstock.app.running.saved import SavedDefinition, find_objection, raise_objection, read_saved
from penstock.app.running.takeover import claim
from penstock.app.tasks.task import BatchOrder, Outcome, Range, Split
from penstock.errors import (
    PenstockError,
    PlanChangedError,
    SparkGoneError,
)
from penstock.log import OptionValue
from penstock.log.api import Count, Holder, Log
from penstock.log.batch import stream_columns
from penstock.log.reading.read import count_from
from penstock.spark.failures import SPARK_ERRORS, spark_alive, user_failure
from penstock.spark.frames import (
    collect_staged,
    give_order,
    read_stream,
    stage_frame,
    with_absent,
)
from penstock.spark.shape import Shape
from penstock.spark.source import PenstockSource

MARKER = "penstock.json"
WAIT_MS = 250
STOP_WAIT_S = 20.0
_REGISTERING = threading.Lock()
LATE_BATCHES = 20
NOTHING_TO_DO = "Waiting for data to arrive"


class Marker(msgspec.Struct, frozen=True):
    """A file in a checkpoint that identifies it and holds the plan it was made for."""

    id: str
    plan: str


class CheckpointOffsets(msgspec.Struct, frozen=True):
    """What Spark saved for a micro-batch before running it."""

    ends: dict[str, dict[int, int]]
    watermark_ms: int


class StatefulQuery:
    """One definition as a Spark streaming query."""

    def __init__(
        self,
        spark: SparkSession,
        log: Log,
        options: Mapping[str, OptionValue],
        run: AppRun,
        shape: Shape,
        checkpoints: Path,
        batch_rows_max: int,
    ) -> None:
        self.name = shape.definition.name
        self.definitions: tuple[Definition, ...] = (shape.definition,)
        self._spark = spark
        self._log = log
        self._options = dict(options)
        self._run = run
        self._app = run.app
        self._shape = shape
        self._batch_rows_max = batch_rows_max
        self._folder = checkpoints / run.app / self.name
        self._query: StreamingQuery | None = None
        self._holder: Holder | None = None
        self._marker = Marker("", "")
        self._order_of_sources: list[str] = []
        self._late_of: dict[int, int] = {}
        self._late_lock = threading.Lock()
        self._late_before = 0
        """Late events of batches that Spark no longer reports."""
        self._late_sent = 0
        self._error: BaseException | None = None
        self._is_busy = False
        self._is_quiet = False
        self._tell: Callable[[BatchReport], None] = lambda step: None
        self.position = CheckpointPosition(checkpoint="", plan=shape.plan)

    @property
    def producer(self) -> str:
        return producer_name(self._app, f"{self.name}@{self._marker.id}")

    # Running

    def run(self, stop: threading.Event, tell: Callable[[BatchReport], None]) -> None:
        self._tell = tell
        self._error = None
        self._read_position()
        self._holder = self._log.hold(self.producer)
        self.position = self._read_position()
        self._check_change()
        with spark_alive():
            self._follow(stop)
        if self._error is not None:
            raise self._error

    def _follow(self, stop: threading.Event) -> None:
        """Start Spark's query, and wait until it ends or `stop` is set."""
        try:
            self._query = self._start()
        except SPARK_ERRORS as error:
            raise self._error_for_user(error) from None
        try:
            while not stop.is_set():
                if self._query.awaitTermination(0.3):  # type: ignore[arg-type]  # it takes fractions
                    break
            deadline = time.monotonic() + STOP_WAIT_S
            while self._is_busy and time.monotonic() < deadline:
                time.sleep(0.02)
        except SPARK_ERRORS as error:
            raise self._error_for_user(error) from None
        finally:
            self._stop(self._query)

    def _start(self) -> StreamingQuery:
        shape = self._shape
        frames: dict[str, DataFrame] = {}
        for stream in shape.streams:
            names = ",".join(shape.columns[stream.name].names)
            settings = {"columns": names, "wait_ms": str(WAIT_MS)}
            settings["batch_rows"] = str(self._batch_rows_max // len(shape.streams) or 1)
            if stream.on_damage != "stop":
                settings["on_damage"] = "skip"
            if stream.on_gone == "skip":
                settings["on_gone"] = "earliest"
            if self.position.batch is None and stream.name in self.position.next:
                start = msgspec.json.encode(self.position.next[stream.name]).decode()
                settings["start"] = start
            frame = self._follow_stream(stream.name, settings)
            # A watermark that is not used would only cause batches without data.
            if stream.watermark_us is not None and stream.time in shape.columns[stream.name].names:
                assert stream.time is not None  # noqa: S101  a watermark needs a time
                frame = frame.withWatermark(stream.time, f"{stream.watermark_us} microseconds")
            frames[stream.name] = with_absent(frame, shape.offered[stream.name])
        result = shape.add_key(shape.apply(frames))
        self._order_of_sources = sources_in_order(result)
        is_table = isinstance(shape.definition.outputs[0], AppTable)
        return (
            result.writeStream.foreachBatch(self._handle)
            .outputMode("update" if is_table else "append")
            # With its scheme: Spark would look for a bare path in its cluster's file system.
            .option("checkpointLocation", self._folder.absolute().as_uri())
            .queryName(f"{self._app}.{self.name}")
            .start()
        )

    def _follow_stream(self, stream: str, settings: Mapping[str, str]) -> DataFrame:
        """A streaming DataFrame of a stream, read by a source of its own.

        Queries that share a source write to one unsynchronized map in Spark when they start, and
        some such starts have been seen to fail permanently.
        """
        for_log = {f"log.{name}": str(value) for name, value in self._options.items()}
        with _REGISTERING:
            self._spark.dataSource.register(PenstockSource)
            reader = self._spark.readStream.format("penstock").option("log", self._log.url)
            return reader.options(**for_log, **settings).load(stream)

    def _stop(self, query: StreamingQuery) -> None:
        with contextlib.suppress(SparkGoneError, *SPARK_ERRORS), spark_alive():
            query.stop()

    # One micro-batch

    def _handle(self, frame: DataFrame, number: int) -> None:
        self._is_busy, self._is_quiet = True, False
        try:
            self._note_late()
            self._handle_batch(frame, number)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_busy, self._is_quiet = False, False

    def _handle_batch(self, frame: DataFrame, number: int) -> None:
        """Commit a micro-batch; if it was committed before, only rebuild the state."""
        began = time.monotonic()
        offsets = read_offsets(self._folder, number, self._order_of_sources)
        last = self._log.last_commit(self.producer)
        order = self._order(number, offsets)
        if last is not None and last.sequence >= number:
            self._check_same(number, last.sequence, offsets)
            with give_order(self._spark, order):
                frame.write.format("noop").mode("overwrite").save()
            return
        staged = self._stage(frame, self._shape.output.name)
        late = self._late(number)
        if late is not None:
            staged = staged.union(late)
        with give_order(self._spark, order):
            outcomes = collect_staged(staged)
        for outcome in outcomes:
            if outcome.failure is not None:
                raise error_of(outcome.failure)
        position = CheckpointPosition(
            mover=Mover(self.producer, self._run.token),
            checkpoint=self._marker.id,
            plan=self._marker.plan,
            batch=number,
            next=offsets.ends,
            ids=self._stream_ids(),
        )
        committed = commit_batch(self._log, self._app, self.definitions, outcomes, position, order)
        self.position = position
        if late is not None:
            pieces = [piece for outcome in outcomes for piece in outcome.pieces]
            output = self._shape.output.name
            self._late_sent += sum(piece.rows for piece in pieces if piece.stream != output)
        counted = [*outcomes, Outcome(rows_in=count_rows(self._log, order))]
        took_s = time.monotonic() - began
        self._tell(describe_batch(self._log, order, counted, committed, took_s))

    def _check_same(self, number: int, latest: int, offsets: CheckpointOffsets) -> None:
        """Raise if a committed batch is not this same batch: the checkpoint is then an old copy."""
        if number < latest or offsets.ends != self.position.next:
            raise PlanChangedError(
                f"{self._shape.definition.location}: {self.name}: the checkpoint {self._folder} is "
                f"older than what the log holds (batch {number} of {latest}): restore the newer "
                f"checkpoint, or run `penstock reset APP {self.name}` to start from the beginning"
            )

    def _stream_ids(self) -> dict[str, int]:
        return {s.name: self._log.stream(s.name).id for s in self._shape.streams}

    def _order(self, number: int, offsets: CheckpointOffsets) -> BatchOrder:
        ranges = []
        for name, ends in offsets.ends.items():
            first = {p: o.first for p, o in self._log.offsets(name).items()}
            for partition, end in ends.items():
                start = self.position.next.get(name, {}).get(partition, 0)
                start = max(start, first.get(partition, 0))
                if end > start:
                    ranges.append(Range(name, partition, start, end))
        assert self._holder is not None  # noqa: S101  run holds before it starts
        return BatchOrder(
            query=self.name,
            holder=self._holder,
            sequence=number,
            now_us=time.time_ns() // 1000,
            splits=(Split(number=0, ranges=tuple(ranges)),),
            past=self._shape.definition.past,
        )

    def _stage(self, frame: DataFrame, stream: str) -> DataFrame:
        source = f"{self._app}.{self.name}"
        return stage_frame(frame, self._log.url, self._options, stream, source)

    def _late(self, number: int) -> DataFrame | None:
        """The events of this batch that arrived after their window was closed."""
        definition = self._shape.definition
        if not isinstance(definition, Derivation) or definition.late is None:
            return None
        assert definition.windows is not None  # noqa: S101  checked when it was declared
        # Spark drops events by the watermark of the previous batch.
        order = self._order_of_sources
        before = read_offsets(self._folder, number - 1, order) if number else None
        if before is None or before.watermark_ms == 0:
            return None
        stream = self._shape.streams[0]
        spec = definition.late.spec or self._shape.output
        assert spec.record is not None  # noqa: S101  a late stream is declared with one
        columns = stream_columns(self._log.stream(stream.name))
        frame = read_stream(self._spark, self._log.url, self._options, stream.name, columns, 1)
        is_late = window_end(definition.windows, str(stream.time)) <= before.watermark_ms * 1000
        names = [field.name for field in spec.record.fields]
        return self._stage(frame.where(is_late).select(names), definition.late.name)

    # How it is doing

    def lag(self) -> Count:
        waiting = Count()
        for stream in self._shape.streams:
            waiting += count_from(self._log, stream.name, self.position.next.get(stream.name, {}))
        return waiting

    def is_idle(self) -> bool:
        """Whether Spark has looked for more work since the last batch and found none.

        Having read everything is not enough: a batch without data may follow, to close windows.
        """
        query = self._query
        if query is None or self._is_busy:
            return False
        if not self._is_quiet:
            with spark_alive():
                message = query.status["message"]
            self._is_quiet = message == NOTHING_TO_DO and not self._is_busy
        return self._is_quiet and not self.lag()

    def late_rows(self) -> int:
        """The number of late events: exact if they are sent to a stream; otherwise as reported by
        Spark, which counts after partial aggregation and so may report too few."""
        if self._sends_late():
            return self._late_sent
        self._note_late()
        with self._late_lock:
            return self._late_before + sum(self._late_of.values())

    def _sends_late(self) -> bool:
        definition = self._shape.definition
        return isinstance(definition, Derivation) and definition.late is not None

    def _note_late(self) -> None:
        """Read the number of late events of each batch while Spark still reports it."""
        query = self._query
        if query is None or self._sends_late():
            return
        with spark_alive():
            told_of = query.recentProgress
        with self._late_lock:
            for progress in told_of:
                dropped = sum(o.numRowsDroppedByWatermark for o in progress.stateOperators)
                self._late_of[progress.batchId] = dropped
            while len(self._late_of) > LATE_BATCHES:
                self._late_before += self._late_of.pop(min(self._late_of))

    def close(self) -> None:
        query, self._query = self._query, None
        if query is not None:
            self._stop(query)

    def _error_for_user(self, error: Exception) -> BaseException:
        """The error that the user can act on, rather than Spark's wrapper around it."""
        if isinstance(self._error, PenstockError):
            return self._error
        cause = self._error if self._error is not None else error
        return error_of(user_failure(self.name, cause))

    # The checkpoint

    def claim(self) -> None:
        """Take the definition over; refuse a checkpoint that does not match what the log holds."""

        before = read_saved(self._log, self._app).get(self.name)
        now = describe(self._shape.definition, stream_ids(self._log), self._shape.plan)

        def decide(found: Mapping[str, Position | None]) -> dict[str, Position | None]:
            saved = found[self.name]
            self._marker = self._find_marker(saved, before, now)
            mover = Mover(self.producer, self._run.token)
            position = CheckpointPosition(
                mover=mover, checkpoint=self._marker.id, plan=self._marker.plan
            )
            if isinstance(saved, StartPosition):
                position.next, position.ids = saved.next, saved.ids
            if isinstance(saved, CheckpointPosition):
                position = msgspec.structs.replace(
                    saved, mover=mover, checkpoint=self._marker.id, plan=self._marker.plan
                )
            return {self.name: position}

        claim(self._log, self._app, [self.name], decide, {self.name: now}, self._run.check)
        self.position = self._read_position()

    def _read_position(self) -> CheckpointPosition:
        return read_own_position(self._log, self._run, self.name, self.producer, CheckpointPosition)

    def _check_change(self) -> None:
        """Raise if the saved state was made from other streams than those that exist now."""
        before = read_saved(self._log, self._app).get(self.name)
        now = describe(self._shape.definition, stream_ids(self._log), self._shape.plan)
        raise_objection(self._shape.definition, find_objection(self.name, before, now))

    def _find_marker(
        self, saved: Position | None, before: SavedDefinition | None, now: SavedDefinition
    ) -> Marker:
        found = read_marker(self._folder)
        where = f"{self._shape.definition.location}: {self.name}"
        way_out = f"run `penstock reset APP {self.name}` to start from the beginning"
        if saved is None and found is not None and any(self._folder.glob("commits/[0-9]*")):
            raise PlanChangedError(
                f"{where}: the checkpoint {self._folder} has batches that this log does not have: "
                f"use the log it was made with, or {way_out}"
            )
        if saved is not None and not isinstance(saved, StartPosition | CheckpointPosition):
            raise PlanChangedError(
                f"{where} used to keep no state in Spark and now does: {way_out}"
            )
        if isinstance(saved, CheckpointPosition) and saved.batch is not None:
            if found is None or found.id != saved.checkpoint:
                raise PlanChangedError(
                    f"{where}: its checkpoint is not in {self._folder}: restore it, name its "
                    f"folder with --checkpoints, or {way_out}"
                )
            # The position describes the state, even if no definition was saved beside it.
            known = before or now
            before = msgspec.structs.replace(
                known, plan=saved.plan, inputs={**known.inputs, **saved.ids}
            )
            raise_objection(self._shape.definition, find_objection(self.name, before, now))
            return found
        if self._folder.exists():
            shutil.rmtree(self._folder)
        return write_marker(self._folder, self._shape.plan)


def window_end(windows: Windows, time_column: str) -> Any:
    """When the last window that contains an event ends, in microseconds."""
    at = F.unix_micros(F.col(time_column))
    if windows.kind == "session":
        return at + F.lit(windows.size_us)
    return at - F.pmod(at, F.lit(windows.step_us)) + F.lit(windows.size_us)


def sources_in_order(result: DataFrame) -> list[str]:
    """The streams in the order in which Spark saves their offsets: that of its plan's leaves."""
    leaves = result._jdf.queryExecution().analyzed().collectLeaves()
    nodes = [leaves.apply(index) for index in range(leaves.size())]
    return [str(node.extraOptions().get("path")) for node in nodes if node.isStreaming()]


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


def read_offsets(folder: Path, number: int, streams: list[str]) -> CheckpointOffsets:
    """The offsets of a micro-batch, read from Spark's checkpoint."""
    _, metadata, *sources = (folder / "offsets" / str(number)).read_text().splitlines()
    ends = [
        msgspec.json.decode(line, type=dict[int, int]) if line != "-" else {} for line in sources
    ]
    watermark_ms = msgspec.json.decode(metadata)["batchWatermarkMs"]
    if len(streams) > len(ends):  # a source that is used twice may be saved once
        streams = list(dict.fromkeys(streams))
    return CheckpointOffsets(dict(zip(streams, ends, strict=True)), watermark_ms)
