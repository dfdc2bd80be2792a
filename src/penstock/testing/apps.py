"""Runs an app in a test, in a few lines.

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea", 3))
        run.until_idle()
        assert run.events(alerts) == [Alert("ada", "tea")]
        assert run.table(seen) == {"ada": {"tea"}}

Without a Spark session, only agents, lookups and joins of tables can run, in this process; with
one (`test_session()`), everything can.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from penstock import failpoints
from penstock.app.declaring.app import App
from penstock.app.declaring.plan import plan
from penstock.app.declaring.streams import AppStream, Emit
from penstock.app.declaring.tables import AppTable, Values, without_window
from penstock.app.declaring.windows import Duration, duration_us
from penstock.app.running.backends import Backend, InlineBackend
from penstock.app.running.building import build
from penstock.app.running.query import QueryLimits
from penstock.app.running.runner import QueryStatus, Runner, RunnerOptions
from penstock.errors import PenstockError
from penstock.log import OptionValue, open_log
from penstock.log.api import Log
from penstock.log.reading.read import ReadOptions, read_batches
from penstock.producer import Producer, ProducerOptions
from penstock.records.event import Key, StoredEvent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
V = TypeVar("V")
IDLE_TIMEOUT_S = 120.0


@functools.cache
def test_session() -> SparkSession:
    """The one Spark session of a test run: two cores, fast to start, and silent."""
    from penstock.spark.session import open_session

    return open_session(
        "local[2]", "tests", {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
    )


test_session.__test__ = False  # type: ignore[attr-defined]  # for pytest: it is no test


class AppTest:
    """An app on a log of its own, with a clock that can be moved.

    The log is an embedded one in `folder`, unless `log` names another.
    """

    __test__ = False

    def __init__(
        self,
        app: App,
        folder: Path,
        spark: SparkSession | None = None,
        *,
        only: Sequence[str] = (),
        limits: QueryLimits = QueryLimits(),
        tries_max: int = 3,
        log: str | None = None,
        log_options: Mapping[str, OptionValue] | None = None,
    ) -> None:
        self.app = app
        self.folder = folder
        self._url = log or str(folder / "test.db")
        self._log_options: dict[str, OptionValue] = {"upkeep_interval_ms": 0}
        self._log_options.update(log_options or {})
        self._spark = spark
        self._only = only
        self._limits = limits
        self._options = RunnerOptions(tries_max=tries_max, backoff_ms=10, metrics_interval_ms=0)
        self._ahead_us = 0
        self.log: Log = None  # type: ignore[assignment]
        self.runner: Runner = None  # type: ignore[assignment]
        self._producer: Producer = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        self.log = open_log(self._url, create=True, **self._log_options)
        try:
            self._start()
            self._producer = Producer(self.log, ProducerOptions(batch_delay_ms=0)).__enter__()
        except BaseException:
            self.log.close()
            raise
        return self

    def _start(self) -> None:
        self.runner = build(
            self.log,
            plan(self.app).only(self._only),
            self._backend(),
            limits=self._limits,
            options=self._options,
            clock=self.now_us,
        )
        self.runner.start()

    def _backend(self) -> Backend:
        if self._spark is None:
            return InlineBackend()
        from penstock.spark.backend import SparkBackend

        return SparkBackend(
            self._spark,
            self.folder / "checkpoints",
            limits=self._limits,
            clock=self.now_us,
            log_options=self._log_options,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.runner.stop()
        self._producer.close()
        self.log.close()
        failpoints.disarm()

    def restart(self) -> None:
        """Stop the app and start it again, as a new deployment would."""
        self.runner.stop()
        self._start()

    # Input

    def send(
        self, to: AppStream[T] | AppTable[object], *data: T | Emit, key: Key | None = None
    ) -> None:
        """Append events; one made by `stream.new(…)` has an envelope of its own."""
        for item in data:
            if isinstance(item, Emit):
                given = item.options
                self._producer.send(
                    to.name,
                    item.data,
                    key=given.key,
                    id=given.id,
                    time=given.time,
                    headers=given.headers,
                )
            else:
                self._producer.send(to.name, item, key=key)
        self._producer.flush()

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._ahead_us

    def advance(self, length: Duration) -> None:
        """Move the app's clock forward, for timers and windows relative to the clock."""
        self._ahead_us += duration_us(length, "the advance")

    @contextmanager
    def fault(self, name: str, at: int = 1) -> Iterator[None]:
        """Make the named failpoint raise when it is next reached for the `at`-th time; the app must
        recover."""
        failpoints.arm(name, "raise", at)
        try:
            yield
        finally:
            failpoints.disarm()

    # Output

    def until_idle(self, timeout_s: float = IDLE_TIMEOUT_S) -> None:
        """Wait until everything has been handled; raises the error of a query that was given up."""
        done = self.runner.until_idle(timeout_s)
        failure = self.runner.failure()
        if failure is not None:
            raise failure
        if not done:
            raise PenstockError(f"the app was not idle after {timeout_s} s: {self.statuses()}")

    def until_failed(self, timeout_s: float = IDLE_TIMEOUT_S) -> PenstockError:
        """Wait until a query is given up, and return its error."""
        deadline = time.monotonic() + timeout_s
        while (failure := self.runner.failure()) is None:
            if time.monotonic() > deadline:
                raise PenstockError(f"no query failed within {timeout_s} s")
            time.sleep(0.01)
        return failure

    def statuses(self) -> dict[str, QueryStatus]:
        return {status.name: status for status in self.runner.statuses()}

    def whole_events(self, stream: AppStream[T] | AppTable[object] | str) -> list[StoredEvent[Any]]:
        """The events of a stream or of a table's changelog, in order of commit and offset.

        A stream without a handle is given by name: dead letters are in `NAME_dead`.
        """
        if isinstance(stream, str):
            known = self.app.streams.get(stream) or self.app.tables.get(stream)
            return self._events(stream, known)
        return self._events(stream.name, stream)

    def _events(
        self, name: str, place: AppStream[object] | AppTable[object] | None
    ) -> list[StoredEvent[Any]]:
        record = None if place is None or place.spec is None else place.record
        found: list[StoredEvent[Any]] = []
        for batch in read_batches(self.log, name, ReadOptions()):
            found.extend(batch.events(record))
        return found

    @overload
    def events(self, stream: AppStream[T]) -> list[T]: ...

    @overload
    def events(self, stream: AppTable[object] | str) -> list[Any]: ...

    def events(self, stream: AppStream[T] | AppTable[object] | str) -> list[Any]:
        """The data of these events."""
        return [event.data for event in self.whole_events(stream)]

    def table(self, table: AppTable[V]) -> dict[Any, V]:
        """All entries by key; for a windowed table, by key and start of the window in ms."""
        values = Values(table, self.log.stream(table.name))
        found: dict[Any, V] = {}
        for entries in self.log.snapshot(table.name):
            for entry in entries:
                if table.windows is None:
                    key: object = table.key_of(entry.key)
                else:
                    own, start_ms = without_window(entry.key)
                    key = (table.key_of(own), start_ms)
                found[key] = values.unpack(entry.value)  # type: ignore[assignment]
        return found
