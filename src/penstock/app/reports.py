"""What a runner tells the log about itself: metrics, and that it is alive."""

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

from penstock.app.positions import Position
from penstock.app.query import Step
from penstock.app.runner import QueryStatus, Runner, weighted_median
from penstock.errors import PenstockError
from penstock.log.api import Commit, Holder, Log
from penstock.log.compose import Composer, EventOptions, Outgoing
from penstock.log.names import METRICS
from penstock.log.objects import Metric

ALIVE_S = 15.0


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's sign of life, saved as progress."""

    runner: str
    host: str
    pid: int
    started_us: int
    time_us: int
    queries: dict[str, str]


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where one definition is in one partition, as `penstock agent list` shows it."""

    app: str
    agent: str
    stream: str
    partition: int
    offset: int
    lag: int
    worker: str
    state: str


class Reporter:
    """Appends progress to `_system.metrics` every so often, from a thread of its own."""

    def __init__(self, runner: Runner, interval_ms: int) -> None:
        self._runner = runner
        self._interval_s = interval_ms / 1000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._id = secrets.token_hex(8)
        self._started_us = time.time_ns() // 1000
        self._composer = Composer(f"app/{runner.app}", runner.log.limits)
        self._sequence = 0
        self._holder: Holder | None = None

    def start(self) -> None:
        if self._interval_s:
            self._thread.start()

    def stop(self) -> None:
        """Report once more, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._interval_s)
            # What cannot be reported now may be later; it must not stop what works.
            with contextlib.suppress(PenstockError):
                self._report(alive=not is_last)

    def _report(self, *, alive: bool) -> None:
        log = self._runner.log
        if self._holder is None:
            self._holder = log.hold(f"app/{self._runner.app}/runner-{self._id}", ephemeral=True)
        statuses = {status.name: status for status in self._runner.statuses()}
        events = [
            event
            for query, steps in self._runner.steps()
            for event in self._events(statuses[query.name], steps)
        ]
        beat = Beat(
            runner=self._id, host=socket.gethostname(), pid=os.getpid(),
            started_us=self._started_us, time_us=time.time_ns() // 1000,
            queries={name: status.state for name, status in statuses.items()},
        )  # fmt: skip
        key = beat_key(self._runner.app, self._id)
        progress: dict[str, bytes | None] = {key: msgspec.json.encode(beat) if alive else None}
        stream = log.stream(str(METRICS))
        parts = [self._composer.part(stream, events)] if events else []
        log.commit(self._holder, self._sequence, Commit(parts=parts, progress=progress))
        self._sequence += 1

    def _events(self, status: QueryStatus, steps: Sequence[Step]) -> Iterator[Outgoing]:
        stream = self._runner.log.stream(str(METRICS))
        labels = {"app": self._runner.app, "query": status.name}
        for name, value in measured(status, steps).items():
            metric = Metric(name=f"query.{name}", value=float(value), labels=labels)
            yield self._composer.admit(stream, metric, EventOptions(), system=True)


def measured(status: QueryStatus, steps: Sequence[Step]) -> dict[str, float]:
    """What is worth knowing of a query's batches since the last report.

    `rows_late` counts from the runner's start. `hop_ms` is from the commit of an event to the
    commit of what came of it: the median over events, and the longest.
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
    """The runners that were alive a moment ago, by app."""
    found: dict[str, list[Beat]] = {}
    since = time.time_ns() // 1000 - int(ALIVE_S * 1e6)
    for key, value in log.progress_items("runner/").items():
        beat = msgspec.json.decode(value, type=Beat)
        if beat.time_us >= since and _may_be_alive(beat):
            found.setdefault(key.split("/")[1], []).append(beat)
    return found


def _may_be_alive(beat: Beat) -> bool:
    """Of a runner on this machine one can know; of others, a recent sign of life is all."""
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
    """Where every definition of every app is, partition by partition."""
    alive = beats(log)
    known = {str(stream.name) for stream in log.streams()}
    rows: list[AgentRow] = []
    for key, value in log.progress_items("app/").items():
        _, app, agent = key.split("/", 2)
        position = msgspec.json.decode(value, type=Position)
        state = _state(alive.get(app, []), agent)
        for stream, partitions in position.next.items():
            ends = log.offsets(stream) if stream in known else {}
            for partition in sorted({*ends, *partitions}):
                offset = partitions.get(partition, 0)
                end = ends[partition].next if partition in ends else offset
                rows.append(
                    AgentRow(
                        app=app, agent=agent, stream=stream, partition=partition, offset=offset,
                        lag=max(0, end - offset),
                        worker=position.workers.get(stream, {}).get(partition, ""), state=state,
                    )
                )  # fmt: skip
    return rows


def _state(alive: Sequence[Beat], agent: str) -> str:
    for beat in alive:
        for query, state in beat.queries.items():
            if agent in query.split("+"):
                return state
    return "not running"
