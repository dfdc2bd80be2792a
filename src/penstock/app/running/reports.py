"""What a runner reports to the log: metrics, and that it is alive."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from penstock.app.running.batches import BatchReport
from penstock.app.running.positions import (
    BatchPosition,
    CheckpointPosition,
    SinkPosition,
    unpack_position,
)
from penstock.app.running.runner import QueryStatus, Runner, weighted_median
from penstock.connect.push.books import SinkBooks, totals
from penstock.connect.push.delivery import deliveries
from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.declaring.objects import Metric
from penstock.log.metrics import MetricWriter

ALIVE_S = 15.0


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's heartbeat, saved as progress."""

    runner: str
    host: str
    pid: int
    started_us: int
    time_us: int
    queries: dict[str, str]


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a definition in one partition, as `penstock agent list` shows it."""

    app: str
    agent: str
    stream: str
    partition: int
    offset: int
    lag: int
    worker: str
    state: str


class Reporter:
    """Appends metrics to `_system.metrics` at a regular interval, in a thread of its own."""

    def __init__(self, runner: Runner, interval_ms: int) -> None:
        self._runner = runner
        self._interval_s = interval_ms / 1000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._id = secrets.token_hex(8)
        self._started_us = time.time_ns() // 1000
        source = f"app/{runner.app}"
        self._writer = MetricWriter(runner.log, source, f"{source}/runner-{self._id}")

    def start(self) -> None:
        if self._interval_s:
            self._thread.start()

    def stop(self) -> None:
        """Report once more, then end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._interval_s)
            # A report that fails may succeed later; it must not stop the queries.
            with contextlib.suppress(PenstockError):
                self._report(alive=not is_last)

    def _report(self, *, alive: bool) -> None:
        statuses = {status.name: status for status in self._runner.statuses()}
        metrics = [
            metric
            for query, steps in self._runner.steps()
            for metric in self._metrics(statuses[query.name], steps)
        ]
        beat = Beat(
            runner=self._id, host=socket.gethostname(), pid=os.getpid(),
            started_us=self._started_us, time_us=time.time_ns() // 1000,
            queries={name: status.state for name, status in statuses.items()},
        )  # fmt: skip
        key = beat_key(self._runner.app, self._id)
        progress: dict[str, bytes | None] = {key: msgspec.json.encode(beat) if alive else None}
        self._writer.write(metrics, progress)

    def _metrics(self, status: QueryStatus, steps: Sequence[BatchReport]) -> Iterator[Metric]:
        labels = {"app": self._runner.app, "query": status.name}
        for name, value in measure_steps(status, steps).items():
            yield Metric(name=f"query.{name}", value=float(value), labels=labels)


def measure_steps(status: QueryStatus, steps: Sequence[BatchReport]) -> dict[str, float]:
    """The metrics of a query's batches since the last report.

    `rows_late` counts from the runner's start. `hop_ms` is the time from the commit of an event to
    the commit of the events that result from it: the median over events; `hop_ms_max` is the
    longest.
    """
    found: dict[str, float] = {
        "lag": status.lag, "batches": len(steps), "rows_late": status.rows_late,
    }  # fmt: skip
    if not steps:
        return found
    hops = [hop for step in steps for hop in step.hops_ms]
    found |= {
        "rows_in": sum(step.rows_in for step in steps),
        "rows_out": sum(step.rows_out for step in steps),
        "rows_skipped": sum(step.rows_skipped for step in steps),
        "batch_ms": statistics.median(step.took_s * 1000 for step in steps),
    }
    if hops:
        found["hop_ms"] = weighted_median(hops)
        found["hop_ms_max"] = max(hop for hop, _ in hops)
    return found


def beat_key(app: str, runner: str) -> str:
    return f"runner/{app}/{runner}"


def beats(log: Log) -> dict[str, list[Beat]]:
    """The runners with a recent heartbeat, by app."""
    found: dict[str, list[Beat]] = {}
    since = time.time_ns() // 1000 - int(ALIVE_S * 1e6)
    for key, value in log.progress_items("runner/").items():
        beat = msgspec.json.decode(value, type=Beat)
        if beat.time_us >= since and _may_be_alive(beat):
            found.setdefault(key.split("/")[1], []).append(beat)
    return found


def _may_be_alive(beat: Beat) -> bool:
    """Whether its process exists, if it is on this machine; other machines cannot be checked."""
    if beat.host != socket.gethostname():
        return True
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def agent_rows(log: Log) -> list[AgentRow]:
    """The position of every definition of every app, by partition."""
    alive = beats(log)
    known = {str(stream.name) for stream in log.streams()}
    rows: list[AgentRow] = []
    for key, value in log.progress_items("app/").items():
        _, app, agent = key.split("/", 2)
        position = unpack_position(value)
        if not isinstance(position, BatchPosition | CheckpointPosition):
            continue  # it reads no stream, or has not started
        workers = position.workers if isinstance(position, BatchPosition) else {}
        state = _state(alive.get(app, []), agent)
        for stream, partitions in position.next.items():
            ends = log.offsets(stream) if stream in known else {}
            for partition in sorted({*ends, *partitions}):
                offset = partitions.get(partition, 0)
                end = ends[partition].next if partition in ends else offset
                waiting = log.count(stream, partition, offset, end)
                rows.append(
                    AgentRow(
                        app=app, agent=agent, stream=stream, partition=partition, offset=offset,
                        lag=waiting.events,
                        worker=workers.get(stream, {}).get(partition, ""), state=state,
                    )
                )  # fmt: skip
    return rows


class SinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was pushed to one worker of a sink, as `penstock connector list` shows it.

    `lag` is the number of events that the query has not pushed yet, over all of its workers.
    """

    worker: str
    stream: str
    state: str
    bytes: int
    messages: int
    transactions: int
    lag: int


def sink_rows(log: Log) -> list[SinkRow]:
    """All workers of all sinks, of apps and of `format("penstock.sink")`."""
    agents = agent_rows(log)
    rows = []
    for key, value in log.progress_items("app/").items():
        _, app, name = key.split("/", 2)
        position = unpack_position(value)
        mine = [row for row in agents if (row.app, row.agent) == (app, name)]
        if mine and isinstance(position, SinkPosition):
            lag = sum(row.lag for row in mine)
            rows += _sink_rows(position.books, mine[0].stream, mine[0].state, lag)
    for delivered, lag in deliveries(log):
        rows += _sink_rows(delivered.sink, delivered.stream, "", lag)
    return rows


def _sink_rows(decided: SinkBooks | None, stream: str, state: str, lag: int) -> list[SinkRow]:
    return [
        SinkRow(
            worker=worker, stream=stream, state=state, bytes=last.end, messages=last.messages,
            transactions=last.transactions, lag=lag,
        )
        for worker, last in totals(decided)
    ]  # fmt: skip


def _state(alive: Sequence[Beat], agent: str) -> str:
    for beat in alive:
        for query, state in beat.queries.items():
            if agent in query.split("+"):
                return state
    return "not running"
