"""Spark as the backend that runs an app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.app.declaring.definitions import Definition
from penstock.app.running.backends import Runnable
from penstock.app.running.building import claim_groups
from penstock.app.running.positions import AppRun
from penstock.app.running.query import Clock, Executor, Query, QueryLimits
from penstock.app.running.streams import changes_for, own
from penstock.app.tasks.task import Work
from penstock.errors import AppError, PenstockError, UsageError
from penstock.log import OptionValue
from penstock.log.api import Log
from penstock.spark.executor import FrameExecutor, SparkExecutor
from penstock.spark.failures import SPARK_ERRORS, reason, user_failure
from penstock.spark.shape import Shape
from penstock.spark.streaming import StatefulQuery


class SparkBackend:
    """Runs tasks as Spark jobs, and DataFrames as jobs or streaming queries."""

    def __init__(
        self,
        spark: SparkSession,
        checkpoints: Path,
        *,
        log_options: Mapping[str, OptionValue] | None = None,
        limits: QueryLimits = QueryLimits(),
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self._checkpoints = checkpoints
        self._options = dict(log_options or {})
        self._limits = limits
        self._clock = clock

    def is_alive(self) -> bool:
        gateway = self._spark.sparkContext._gateway
        process = getattr(gateway, "proc", None)
        return process is None or process.poll() is None

    def executor(self, log: Log, works: Sequence[Work]) -> Executor:
        return SparkExecutor(self._spark, log.url, self._options, works)

    def frames(self, log: Log, run: AppRun, definition: Definition) -> Runnable:
        shape = self._shape(log, definition)
        try:
            output = own(shape.output, run.app) if shape.output.table else shape.output
            changes = changes_for(log, output)
        except UsageError as error:
            raise AppError(f"{definition.location}: {error}") from error
        if changes:
            log.apply(changes)
        if shape.is_stateful:
            stateful = StatefulQuery(
                self._spark,
                log,
                self._options,
                run,
                shape,
                self._checkpoints,
                self._limits.batch_rows_max,
            )
            stateful.claim()
            return stateful
        claim_groups(log, run, [definition])
        executor = FrameExecutor(self._spark, log, self._options, run.app, shape)
        return Query(log, run, [definition], executor, limits=self._limits, clock=self._clock)

    def _shape(self, log: Log, definition: Definition) -> Shape:
        try:
            return Shape(log, self._spark, definition)
        except PenstockError:
            raise
        except SPARK_ERRORS as error:
            why = reason(error)
            raise AppError(f"{definition.location}: {definition.name}: {why}") from error
        except Exception as error:
            failure = user_failure(definition.name, error)
            raise AppError(
                f"{definition.location}: {definition.name}: {failure.error}\n\n{failure.traceback}"
            ) from error
