"""Runs an app: starts its queries, keeps them going, and stops them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from penstock.app.declaring.definitions import (
    Definition,
)
from penstock.app.declaring.plan import Plan
from penstock.app.running.backends import Runnable
from penstock.app.running.batches import BatchReport
from penstock.errors import (
    ClaimLostError,
    FencedError,
    PenstockError,
    QueryFailedError,
    SinkGoneError,
    SparkGoneError,
    UsageError,
)
from penstock.log.api import Log

QueryState = Literal["starting", "running", "restarting", "failed", "stopped"]
RATE_WINDOW_S = 10.0
STEPS_MAX = 1000
GONE_S = 5.0
"""How long to wait for queries to end once Spark is gone."""


class RunnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How queries are kept running.

    After a failure, a query is restarted after `backoff_ms`, then after twice that, up to
    `backoff_ms_max`; after `tries_max` failures without a batch in between, it is given up.
    Metrics are appended to `_system.metrics` every `metrics_interval_ms` (0: never). If a process
    has not renewed its claims for `lease_ms`, another one may take over the app.
    """

    tries_max: int = 5
    backoff_ms: int = 500
    backoff_ms_max: int = 30_000
    stop_timeout_ms: int = 30_000
    metrics_interval_ms: int = 5_000
    lease_ms: int = 15_000


class QueryStatus(msgspec.Struct, kw_only=True):
    """The status of a query, for display."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: QueryState = "starting"
    rows_in: int = 0
    rows_out: int = 0
    rows_skipped: int = 0
    rows_late: int = 0
    batches: int = 0
    restarts: int = 0
    batch_ms: float = 0.0
    hop_ms: float = 0.0
    rate: float = 0.0
    lag: int = 0
    lag_is_exact: bool = True
    error: str = ""


class _KeptQuery:
    """A query with its thread and history."""

    def __init__(self, query: Runnable) -> None:
        self.query = query
        first: Definition = query.definitions[0]
        self.status = QueryStatus(
            name=query.name,
            inputs=tuple(place.name for place in first.inputs),
            outputs=tuple(p.name for d in query.definitions for p in d.outputs),
        )
        self.recent: deque[tuple[float, BatchReport]] = deque(maxlen=STEPS_MAX)
        self.untold: deque[BatchReport] = deque(maxlen=STEPS_MAX)
        self.failures = self.faults = 0
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def tell(self, step: BatchReport) -> None:
        status = self.status
        self.failures = self.faults = 0
        status.state = "running"
        status.rows_in += step.rows_in
        status.rows_out += step.rows_out
        status.rows_skipped += step.rows_skipped
        status.batches += 1
        status.batch_ms = step.took_s * 1000
        if step.hops_ms:
            status.hop_ms = weighted_median(step.hops_ms)
        status.error = ""
        self.recent.append((time.monotonic(), step))
        self.untold.append(step)

    def rate(self) -> float:
        since = time.monotonic() - RATE_WINDOW_S
        return sum(step.rows_in for at, step in self.recent.copy() if at >= since) / RATE_WINDOW_S


class Runner:
    """The queries of a plan, each in a thread that restarts it when it fails."""

    def __init__(
        self,
        log: Log,
        plan: Plan,
        queries: Sequence[Runnable],
        options: RunnerOptions,
        is_alive: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.log = log
        self._is_alive = is_alive
        self._check = check
        self._lost: ClaimLostError | None = None
        self.app = plan.app.name
        self._options = options
        self._stop = threading.Event()
        self._kept = [_KeptQuery(query) for query in queries]

    def start(self) -> None:
        for kept in self._kept:
            kept.thread = threading.Thread(
                target=self._keep_going, args=(kept,), name=f"query {kept.query.name}", daemon=True
            )
            kept.thread.start()

    def stop(self) -> None:
        """Let each query finish its batch, then end. Raises nothing; see `failure`.

        Without Spark no batch can be finished: queries that still wait for the log are abandoned.
        """
        self._stop.set()
        wait_s = self._options.stop_timeout_ms / 1000
        deadline = time.monotonic() + (wait_s if self._is_alive() else min(GONE_S, wait_s))
        for kept in self._kept:
            if kept.thread is not None:
                kept.thread.join(max(0.0, deadline - time.monotonic()))
            kept.query.close()
            if kept.status.state not in ("failed",):
                kept.status.state = "stopped"

    def lose(self, error: ClaimLostError) -> None:
        """End all queries, even idle ones, because another run has the app."""
        self._lost = error
        self._stop.set()

    def statuses(self) -> list[QueryStatus]:
        """The current status of each query."""
        for kept in self._kept:
            kept.status.rate = kept.rate()
            with contextlib.suppress(PenstockError):
                lag = kept.query.lag()
                kept.status.lag, kept.status.lag_is_exact = lag.events, lag.is_exact
                kept.status.rows_late = kept.query.late_rows()
                if kept.status.state in ("starting", "restarting") and kept.query.is_idle():
                    kept.status.state, kept.status.error = "running", ""
        return [msgspec.structs.replace(kept.status) for kept in self._kept]

    def steps(self) -> Iterator[tuple[QueryStatus, list[BatchReport]]]:
        """The batches of each query since the last call."""
        for kept in self._kept:
            found = [kept.untold.popleft() for _ in range(len(kept.untold))]
            yield kept.status, found

    def failure(self) -> PenstockError | None:
        """Why the app failed: the claim was lost, a query was given up, or Spark has died."""
        if self._lost is not None:
            return self._lost
        for kept in self._kept:
            if kept.status.state == "failed" and kept.error is not None:
                return QueryFailedError(f"query {kept.query.name}: {kept.error}")
        if not self._is_alive() and not self._stop.is_set():
            return QueryFailedError("the Spark process has died: restart the app")
        return None

    def is_over(self) -> bool:
        """Whether every query was given up, the app was lost to another run, or Spark has died."""
        if self._lost is not None or not self._is_alive():
            return True
        return all(kept.status.state == "failed" for kept in self._kept)

    def is_idle(self) -> bool:
        """Whether all queries that are still running have handled everything."""
        before = self._ends()
        going = [kept for kept in self._kept if kept.status.state != "failed"]
        return all(kept.query.is_idle() for kept in going) and self._ends() == before

    def _ends(self) -> list[int]:
        return [
            offsets.next
            for stream in self.log.streams()
            if stream.name.namespace != "_system"
            for offsets in self.log.offsets(str(stream.name)).values()
        ]

    def until_idle(self, timeout_s: float) -> bool:
        """Wait until there is nothing left to do (true), or until a failure or the timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.failure() is not None:
                return False
            if self.is_idle():
                return True
            self._stop.wait(0.005)
        return False

    def _keep_going(self, kept: _KeptQuery) -> None:
        while not self._stop.is_set():
            try:
                kept.query.run(self._stop, kept.tell)
                return
            except Exception as error:
                if self._stop.is_set() or self._is_lost(error):
                    return
                kept.error = error
                kept.status.error = str(error)
                kept.failures += 1
                # An unreachable sink is waited for: the log keeps the events for it.
                kept.faults += not isinstance(error, SinkGoneError)
                if not is_worth_trying(error) or kept.faults >= self._options.tries_max:
                    kept.status.state = "failed"
                    return
                kept.status.state = "restarting"
                kept.status.restarts += 1
                self._stop.wait(self._backoff_s(kept.failures))

    def _is_lost(self, error: Exception) -> bool:
        """Whether a query was fenced because another run has the app."""
        if isinstance(error, FencedError):
            try:
                self._check()
            except ClaimLostError as lost:
                self.lose(lost)
            except PenstockError:
                pass  # it cannot be determined now
        return self._lost is not None

    def _backoff_s(self, failures: int) -> float:
        limit = self._options.backoff_ms_max
        delay = min(limit, self._options.backoff_ms << (failures - 1))
        return delay / 1000 * random.uniform(0.8, 1.2)  # noqa: S311  jitter: not all at once


def is_worth_trying(error: Exception) -> bool:
    """Whether a retry could succeed."""
    return not isinstance(error, ClaimLostError | SparkGoneError | UsageError)


def weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """The median of values, each weighted by a number of events."""
    if len(values) == 1:
        return values[0][0]
    half = sum(rows for _, rows in values) / 2
    seen = 0
    for value, rows in sorted(values):
        seen += rows
        if seen >= half:
            return value
    return max(value for value, _ in values)
