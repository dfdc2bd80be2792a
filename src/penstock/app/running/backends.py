"""What queries run on: Spark, or the current process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.app.declaring.definitions import Definition
from penstock.app.running.batches import BatchReport
from penstock.app.running.positions import AppRun
from penstock.app.running.query import Executor
from penstock.app.tasks.task import BatchOrder, Outcome, Work, run_split
from penstock.errors import AppError
from penstock.log.api import Count, Log


class Runnable(Protocol):
    """One query, whatever it runs on."""

    name: str
    definitions: tuple[Any, ...]

    def run(self, stop: threading.Event, tell: Callable[[BatchReport], None]) -> None: ...

    def lag(self) -> Count: ...

    def is_idle(self) -> bool: ...

    def late_rows(self) -> int:
        """How many events came after their window was closed."""

    def close(self) -> None: ...


class Backend(Protocol):
    """What queries run on: Spark, or the current process."""

    def executor(self, log: Log, works: Sequence[Work]) -> Executor:
        """The executor for definitions that run as plain Python tasks."""

    def frames(self, log: Log, run: AppRun, definition: Definition) -> Runnable:
        """The query for a definition made of DataFrames; creates its output streams too."""

    def is_alive(self) -> bool:
        """Whether it is still running; if not, only a new process can start it again."""


class InlineExecutor:
    """Runs the splits of a batch one after the other in this process."""

    def __init__(self, log: Log, works: Sequence[Work]) -> None:
        self._log = log
        self._works = works

    def run(self, batch: BatchOrder) -> list[Outcome]:
        return [run_split(self._log, self._works, batch, split) for split in batch.splits]

    def close(self) -> None:
        pass


class InlineBackend:
    """Runs agents, lookups and joins of tables in this process: for tests, without Spark."""

    def is_alive(self) -> bool:
        return True

    def executor(self, log: Log, works: Sequence[Work]) -> Executor:
        return InlineExecutor(log, works)

    def frames(self, log: Log, run: AppRun, definition: Definition) -> Runnable:
        del log, run
        raise AppError(
            f"{definition.location}: {definition.name} is made of DataFrames and needs Spark: run "
            "the app on Spark"
        )
