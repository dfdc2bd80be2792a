"""Runs an app: makes its streams, starts its queries, keeps them going, and stops them."""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from penstock.app.agents import AgentWork
from penstock.app.damage import DamageWork
from penstock.app.definitions import (
    Agent,
    DeadLetters,
    Definition,
    Feed,
    Listening,
    Lookup,
    Place,
    Rekey,
    Sinking,
    TableJoin,
    keeps_timers,
)
from penstock.app.feeds import FeedQuery
from penstock.app.joins import LookupWork, RekeyWork, TableJoinWork
from penstock.app.listening import ListenQuery
from penstock.app.plan import Plan, kind_of
from penstock.app.positions import Run
from penstock.app.query import Clock, Executor, Query, QueryLimits
from penstock.app.sinks import SinkQuery, SinkWork
from penstock.app.step import Step
from penstock.app.takeover import check_plan, claimed_groups
from penstock.app.task import BatchOrder, Outcome, Work, run_split
from penstock.errors import (
    AppError,
    ClaimLostError,
    EvolutionError,
    FencedError,
    PenstockError,
    QueryFailedError,
    SinkGoneError,
    SparkGoneError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.api import Count, Log
from penstock.log.objects import (
    AlterStream,
    Change,
    CreateStream,
    GrowStream,
    StreamSpec,
    check_alter,
)
from penstock.records.evolution import evolution_reasons
from penstock.records.schema import Schema

State = Literal["starting", "running", "restarting", "failed", "stopped"]
RATE_WINDOW_S = 10.0
STEPS_MAX = 1000


class RunnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How queries are kept going.

    After a failure a query is started again, after `backoff_ms`, then twice that, up to
    `backoff_ms_max`; after `tries_max` failures without a batch in between it is given up.
    Progress is appended to `_system.metrics` every `metrics_interval_ms` (0: never). An app is
    another process's if it was not heard of for `lease_ms`.
    """

    tries_max: int = 5
    backoff_ms: int = 500
    backoff_ms_max: int = 30_000
    stop_timeout_ms: int = 30_000
    metrics_interval_ms: int = 5_000
    lease_ms: int = 15_000


class Runnable(Protocol):
    """One query, whatever it runs on."""

    name: str
    definitions: tuple[Any, ...]

    def run(self, stop: threading.Event, tell: Callable[[Step], None]) -> None: ...

    def lag(self) -> Count: ...

    def is_idle(self) -> bool: ...

    def late_rows(self) -> int:
        """How many events came after their window was closed."""

    def close(self) -> None: ...


class Backend(Protocol):
    """What queries run on: Spark, or this very process."""

    def executor(self, log: Log, works: Sequence[Work]) -> Executor:
        """For definitions that are plain Python tasks."""

    def frames(self, log: Log, run: Run, definition: Definition) -> Runnable:
        """For definitions that are DataFrames; makes its output streams too."""

    def is_alive(self) -> bool:
        """Whether it still runs; if not, only a new process can start it again."""


class InlineExecutor:
    """Runs the splits of a batch one after the other, here."""

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

    def frames(self, log: Log, run: Run, definition: Definition) -> Runnable:
        del log, run
        raise AppError(
            f"{definition.location}: {definition.name} is made of DataFrames and needs Spark"
        )


class QueryStatus(msgspec.Struct, kw_only=True):
    """How a query is doing, for people who watch."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: State = "starting"
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


class _Kept:
    """A query with its thread and its history."""

    def __init__(self, query: Runnable) -> None:
        self.query = query
        first: Definition = query.definitions[0]
        self.status = QueryStatus(
            name=query.name,
            inputs=tuple(place.name for place in first.inputs),
            outputs=tuple(p.name for d in query.definitions for p in d.outputs),
        )
        self.recent: deque[tuple[float, Step]] = deque(maxlen=STEPS_MAX)
        self.untold: deque[Step] = deque(maxlen=STEPS_MAX)
        self.failures = self.faults = 0
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def tell(self, step: Step) -> None:
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
    """The queries of a plan, each in a thread that starts it again when it fails."""

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
        self._kept = [_Kept(query) for query in queries]

    def start(self) -> None:
        for kept in self._kept:
            kept.thread = threading.Thread(
                target=self._keep_going, args=(kept,), name=f"query {kept.query.name}", daemon=True
            )
            kept.thread.start()

    def stop(self) -> None:
        """Let each query finish its batch, and end. Raises nothing; see `failure`."""
        self._stop.set()
        deadline = time.monotonic() + self._options.stop_timeout_ms / 1000
        for kept in self._kept:
            if kept.thread is not None:
                kept.thread.join(max(0.0, deadline - time.monotonic()))
            kept.query.close()
            if kept.status.state not in ("failed",):
                kept.status.state = "stopped"

    def lose(self, error: ClaimLostError) -> None:
        """Another run has the app: end, the idle queries too."""
        self._lost = error
        self._stop.set()

    def statuses(self) -> list[QueryStatus]:
        """How each query is doing now."""
        for kept in self._kept:
            kept.status.rate = kept.rate()
            with contextlib.suppress(PenstockError):
                lag = kept.query.lag()
                kept.status.lag, kept.status.lag_is_exact = lag.events, lag.is_exact
                kept.status.rows_late = kept.query.late_rows()
                if kept.status.state in ("starting", "restarting") and kept.query.is_idle():
                    kept.status.state, kept.status.error = "running", ""
        return [msgspec.structs.replace(kept.status) for kept in self._kept]

    def steps(self) -> Iterator[tuple[QueryStatus, list[Step]]]:
        """The batches of each query since this was last asked."""
        for kept in self._kept:
            found = [kept.untold.popleft() for _ in range(len(kept.untold))]
            yield kept.status, found

    def failure(self) -> PenstockError | None:
        """Why the first query that was given up was given up, or all of them."""
        if self._lost is not None:
            return self._lost
        for kept in self._kept:
            if kept.status.state == "failed" and kept.error is not None:
                return QueryFailedError(f"query {kept.query.name}: {kept.error}")
        if not self._is_alive() and not self._stop.is_set():
            return QueryFailedError("Spark's process has died: start the app again")
        return None

    def is_over(self) -> bool:
        """Whether every query was given up, or what they run on has died."""
        if self._lost is not None or not self._is_alive():
            return True
        return all(kept.status.state == "failed" for kept in self._kept)

    def is_idle(self) -> bool:
        """Whether all queries that still run have handled everything there is."""
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
        """Wait until there is nothing left to do, or a query was given up, or for so long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.failure() is not None:
                return False
            if self.is_idle():
                return True
            self._stop.wait(0.005)
        return False

    def _keep_going(self, kept: _Kept) -> None:
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
                # A sink that is away is waited for: the log keeps what is for it.
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
                pass  # nobody knows
        return self._lost is not None

    def _backoff_s(self, failures: int) -> float:
        limit = self._options.backoff_ms_max
        delay = min(limit, self._options.backoff_ms << (failures - 1))
        return delay / 1000 * random.uniform(0.8, 1.2)  # noqa: S311  so that not all start at once


def is_worth_trying(error: Exception) -> bool:
    """Whether the same could succeed a little later."""
    return not isinstance(error, ClaimLostError | SparkGoneError | UsageError)


def weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """The median of values, each of which stands for a number of events."""
    if len(values) == 1:
        return values[0][0]
    half = sum(rows for _, rows in values) / 2
    seen = 0
    for value, rows in sorted(values):
        seen += rows
        if seen >= half:
            return value
    return max(value for value, _ in values)


def build(
    log: Log,
    plan: Plan,
    backend: Backend,
    *,
    limits: QueryLimits = QueryLimits(),
    options: RunnerOptions = RunnerOptions(),
    clock: Clock | None = None,
    run: Run | None = None,
) -> Runner:
    """A runner for the plan: makes the streams it needs, and groups definitions into queries.

    Takes the definitions over from whoever runs them.
    """
    check_plan(log, plan)
    make_streams(log, plan)
    run = run or Run(plan.app.name, secrets.token_hex(8))
    queries: list[Runnable] = []
    for definition in plan.definitions:
        match kind_of(definition):
            case "frames":
                queries.append(backend.frames(log, run, definition))
            case "here" if isinstance(definition, Feed):
                claimed_groups(log, run, [definition])
                queries.append(FeedQuery(log, run, definition))
            case "here" if isinstance(definition, Listening):
                queries.append(ListenQuery(log, definition))
    tasks = [definition for definition in plan.definitions if kind_of(definition) == "tasks"]
    for group in claimed_groups(log, run, tasks):
        works = [work_of(plan.app.name, definition) for definition in group]
        executor = backend.executor(log, works)
        kind = SinkQuery if isinstance(group[0], Sinking) else Query
        queries.append(kind(log, run, group, executor, limits=limits, clock=clock))
    return Runner(log, plan, queries, options, backend.is_alive, run.check)


def work_of(app: str, definition: Definition) -> Work:
    match definition:
        case Agent():
            return AgentWork(app, definition)
        case Rekey():
            return RekeyWork(app, definition)
        case Lookup():
            return LookupWork(app, definition)
        case TableJoin():
            return TableJoinWork(app, definition)
        case DeadLetters():
            return DamageWork(app, definition)
        case Sinking():
            return SinkWork(app, definition)
    raise AssertionError(definition)


def make_streams(log: Log, plan: Plan) -> None:
    """Make the streams and tables that the plan declares, or bring them up to date."""
    wanted: dict[str, tuple[StreamSpec, object]] = {}
    places: list[Place] = [*plan.app.streams.values(), *plan.app.tables.values()]
    for place in places:
        if place.spec is not None:
            wanted[place.name] = (place.spec, place.location)
    for definition in plan.definitions:
        if isinstance(definition, Agent) and definition.timers and keeps_timers(definition):
            spec = definition.timers.spec
            assert spec is not None  # noqa: S101  made by the app itself
            wanted[spec.name] = (spec, definition.location)
    changes: list[Change] = []
    for spec, location in wanted.values():
        try:
            changes += changes_for(log, spec)
        except UsageError as error:
            raise AppError(f"{location}: {error}") from error
    if changes:
        log.apply(changes)


def changes_for(log: Log, spec: StreamSpec) -> list[Change]:
    """What makes the stream be there as declared; nothing if it is.

    An app adds to what is there, and takes nothing away: what it leaves open stays as it is, and
    a record with fields that this app does not know stays too (a newer version has added them,
    or another app).
    """
    try:
        found = log.stream(spec.name)
    except UnknownObjectError:
        return [CreateStream(spec)]
    said = {
        name: getattr(spec, name)
        for name in ("key", "time", "partitions", "retention_ms", "retention_bytes")
        if getattr(spec, name) is not None
    }
    if None not in (found.spec.time, spec.time) and found.spec.time != spec.time:
        raise EvolutionError(
            f"stream {found.name} takes the time of its events from {found.spec.time!r}, and here "
            f"from {spec.time!r}: that would change it for everybody who reads it; use the same "
            "field, or a stream of your own"
        )
    wanted = msgspec.structs.replace(
        found.spec, record=_newest(found.record, spec.record), content=spec.content,
        table=spec.table, entries=spec.entries, **said,
    )  # fmt: skip
    if wanted.partitions is not None and wanted.partitions < found.partitions:
        wanted = msgspec.structs.replace(wanted, partitions=found.partitions)  # grown since
    check_alter(found, wanted)
    changes: list[Change] = []
    if wanted.partitions is not None and wanted.partitions > found.partitions:
        changes.append(GrowStream(spec.name, wanted.partitions))
    as_it_is = msgspec.structs.replace(found.spec, record=found.record, partitions=None)
    if msgspec.structs.replace(wanted, partitions=None) != as_it_is:
        changes.append(AlterStream(msgspec.structs.replace(wanted, partitions=None)))
    return changes


def _newest(there: Schema | None, declared: Schema | None) -> Schema | None:
    """The record that has all fields of both, where one has grown out of the other."""
    if there is None or declared is None or evolution_reasons(declared, there):
        return declared
    return there
