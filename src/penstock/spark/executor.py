"""Runs the batches of a query on Spark, each as a job: Python tasks, or DataFrames."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from pyspark import SparkContext
from pyspark.core.broadcast import Broadcast
from pyspark.sql import DataFrame, SparkSession

from penstock.app.running.batches import count_rows
from penstock.app.tasks.task import BatchOrder, Outcome, Work, run_split
from penstock.errors import SparkGoneError
from penstock.log import OptionValue
from penstock.log.api import Log
from penstock.spark.failures import SPARK_ERRORS, spark_alive, user_failure
from penstock.spark.frames import (
    Options,
    collect_staged,
    give_order,
    read_stream,
    read_table,
    stage_frame,
    with_absent,
)
from penstock.spark.shape import Shape
from penstock.spark.shipping import pack, unpack
from penstock.spark.worker import worker_log

PROGRAMS_MAX = 100
_programs: dict[str, Sequence[Work]] = {}
_OUTCOME = msgspec.msgpack.Decoder(Outcome)


class SparkExecutor:
    """Sends the works to workers once, as Spark sends functions; for each batch, only its order."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        options: Mapping[str, OptionValue],
        works: Sequence[Work],
    ) -> None:
        self._context: SparkContext = spark.sparkContext
        self._url = url
        self._options = dict(options)
        program = pack(works)
        self._program = secrets.token_hex(8)
        self._works: Broadcast[bytes] = self._context.broadcast(program)

    def run(self, batch: BatchOrder) -> list[Outcome]:
        order = msgspec.msgpack.encode(batch)
        task = functools.partial(_run, self._program, self._works, self._url, self._options, order)
        count = len(batch.splits)
        # Only numbers of splits are distributed: the order holds the splits.
        try:
            with spark_alive():
                told = self._context.parallelize(range(count), count).mapPartitions(task).collect()
        except SPARK_ERRORS as error:
            return [Outcome(failure=user_failure(batch.query, error))]
        return [_OUTCOME.decode(outcome) for outcome in told]

    def close(self) -> None:
        with contextlib.suppress(SparkGoneError, *SPARK_ERRORS), spark_alive():
            self._works.unpersist()


def _run(
    program: str,
    works: Broadcast[bytes],
    url: str,
    options: Mapping[str, OptionValue],
    order: bytes,
    numbers: Iterator[int],
) -> Iterator[bytes]:
    batch = msgspec.msgpack.decode(order, type=BatchOrder)
    log = worker_log(url, options)
    if program not in _programs:
        while len(_programs) >= PROGRAMS_MAX:
            _programs.pop(next(iter(_programs)))
        _programs[program] = unpack(works.value)
    for number in numbers:
        outcome = run_split(log, _programs[program], batch, batch.splits[number])
        yield msgspec.msgpack.encode(outcome)


class FrameExecutor:
    """Runs a definition without state as one Spark job per batch: read, transform, stage.

    The function is called once and its plan is used for every batch, unless it is not
    deterministic: Spark chooses random seeds when it analyzes a function, so it must do so again.
    """

    def __init__(
        self, spark: SparkSession, log: Log, options: Options, app: str, shape: Shape
    ) -> None:
        self._spark = spark
        self._log = log
        self._options = dict(options)
        self._shape = shape
        self._source = f"{app}.{shape.definition.name}"
        self._tasks = spark.sparkContext.defaultParallelism
        self._plan: DataFrame | None = None

    def run(self, batch: BatchOrder) -> list[Outcome]:
        plan = self._plan if self._plan is not None else self._stage()
        if self._shape.is_deterministic:
            self._plan = plan
        try:
            with spark_alive(), give_order(self._spark, batch):
                # A new DataFrame of the same plan, so that Spark does not reuse a shuffle of the
                # last batch.
                outcomes = collect_staged(plan.select("outcome"))
        except SPARK_ERRORS as error:
            return [Outcome(failure=user_failure(self._shape.definition.name, error))]
        return [*outcomes, Outcome(rows_in=count_rows(self._log, batch))]

    def _stage(self) -> DataFrame:
        shape = self._shape
        frames = {}
        for stream in shape.streams:
            frames[stream.name] = read_stream(
                self._spark,
                self._log.url,
                self._options,
                stream.name,
                shape.columns[stream.name],
                self._tasks,
            )
        for table in shape.tables:
            columns = shape.columns[table.name]
            frames[table.name] = read_table(
                self._spark, self._log.url, self._options, table.name, columns
            )
        frames = {name: with_absent(frame, shape.offered[name]) for name, frame in frames.items()}
        result = shape.add_key(shape.apply(frames))
        return stage_frame(result, self._log.url, self._options, shape.output.name, self._source)

    def close(self) -> None:
        pass
