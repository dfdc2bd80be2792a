"""Where a definition is in its inputs: the progress that its query saves in every commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from penstock.app.definitions import Definition
from penstock.connect.push import Decision
from penstock.errors import ClaimLostError
from penstock.log.api import Log
from penstock.log.names import PRODUCER_CHARS_MAX


class Position(msgspec.Struct, kw_only=True):
    """Where a definition is: saved as progress in every commit of its query.

    `next` is the next offset by stream and partition, `ids` say of which streams; `again` are
    offsets behind it that were not acknowledged; `workers` who handled a partition last;
    `producer` the name under which the query commits, so that whoever takes it over can fence
    it, and `run` the run of the app that has it. Where windows expire by the time of events,
    `times` has the latest that was seen, by stream and partition.

    A query that keeps state in Spark also has the id of its `checkpoint`, and the `plan` of its
    state. One that feeds a sink has the `transactions` that its last batch decided to commit, by
    worker, with where each ends, and how many workers there are.
    """

    producer: str
    sequence: int
    next: dict[str, dict[int, int]]
    ids: dict[str, int] = {}
    again: dict[str, dict[int, list[tuple[int, int]]]] = {}
    workers: dict[str, dict[int, str]] = {}
    time_us: int = 0
    times: dict[str, dict[int, int]] = {}
    checkpoint: str = ""
    plan: str = ""
    transactions: dict[str, Decision] = {}
    sink_workers: int = 0
    run: str = ""


class Run(NamedTuple):
    """One run of an app. Of several, the last that took a definition over may move its position.

    `check` raises `ClaimLostError` once another one has the app.
    """

    app: str
    token: str
    check: Callable[[], None] = lambda: None


def progress_key(app: str, definition: str) -> str:
    """Under which key a definition's position is saved."""
    return f"app/{app}/{definition}"


def producer_name(app: str, query: str) -> str:
    """Under which name a query commits."""
    name = f"app/{app}/{query}"
    return (
        name
        if len(name) <= PRODUCER_CHARS_MAX
        else f"app/{xxhash.xxh3_128_hexdigest(name.encode())}"
    )


def saved_position(log: Log, app: str, definition: str) -> Position | None:
    """Where a definition is, as its last commit says."""
    packed = log.progress(progress_key(app, definition))
    return None if packed is None else msgspec.json.decode(packed, type=Position)


def kept_position(log: Log, run: Run, definition: str, producer: str) -> Position:
    """Where a definition is; raises `ClaimLostError` unless this run still has it."""
    saved = saved_position(log, run.app, definition)
    if saved is None or saved.producer != producer:
        raise ClaimLostError(f"{definition} was reset, or taken over by another runner")
    if saved.run != run.token:
        raise ClaimLostError(f"{definition} was taken over by another runner of app {run.app}")
    return saved


def query_name(definitions: Sequence[Definition]) -> str:
    """What a query of these definitions is called."""
    return "+".join(definition.name for definition in definitions)
