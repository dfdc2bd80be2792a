"""Runs the tasks of a query on Spark: one job for each batch, one task for each split."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from pyspark import SparkContext
from pyspark.core.broadcast import Broadcast
from pyspark.sql import SparkSession

from penstock.app.task import BatchOrder, Outcome, Work, run_split
from penstock.errors import SparkGoneError
from penstock.log import OptionValue
from penstock.spark.failures import SPARK_ERRORS, spark_alive, user_failure
from penstock.spark.shipping import pack, unpack
from penstock.spark.worker import worker_log

PROGRAMS_MAX = 100
_programs: dict[str, Sequence[Work]] = {}
_OUTCOME = msgspec.msgpack.Decoder(Outcome)


class SparkExecutor:
    """Ships the works once, the way Spark ships functions; each batch is only its order."""

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
        # Numbers travel, not splits: the order holds them all.
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
