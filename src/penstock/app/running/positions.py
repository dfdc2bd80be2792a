"""The position of a definition in its inputs: the progress that its query saves in every commit.

Each kind of query has its own kind of position. Every position says who may move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import xxhash

from penstock.app.declaring.definitions import Definition
from penstock.connect.push.books import EarlierDecision, SinkBooks, from_earlier
from penstock.errors import ClaimLostError
from penstock.log.api import Log
from penstock.log.declaring.names import PRODUCER_CHARS_MAX

StreamOffsets = dict[str, dict[int, int]]
"""The next offset by stream and partition."""


class Mover(msgspec.Struct, frozen=True):
    """Who may move a position: the run of the app, and the producer that its query commits as, so
    that a run that takes the definition over can fence it."""

    producer: str
    run: str


class _Position(msgspec.Struct, kw_only=True, tag_field="of"):
    """`mover` is `None` if no run has taken the definition over yet."""

    mover: Mover | None = None


class StartPosition(_Position, tag="start"):
    """Where a definition starts after a reset; `ids` identify the streams of the offsets."""

    next: StreamOffsets = {}
    ids: dict[str, int] = {}


class BatchPosition(_Position, tag="batches"):
    """The position of a query whose batches are jobs.

    `again` holds offsets before `next` that were not acknowledged, `workers` the worker that last
    handled each partition. If windows expire by the time of events, `times` holds the latest time
    seen, by stream and partition. Inputs that this version of the app does not have are kept, for
    a version that has them again.
    """

    next: StreamOffsets = {}
    ids: dict[str, int] = {}
    again: dict[str, dict[int, list[tuple[int, int]]]] = {}
    workers: dict[str, dict[int, str]] = {}
    times: dict[str, dict[int, int]] = {}


class SinkPosition(BatchPosition, tag="sink"):
    """The position of a query that feeds a sink; includes the sink's books, once a transaction was
    decided."""

    books: SinkBooks | None = None


class CheckpointPosition(_Position, tag="checkpoint"):
    """The position of a query that keeps state in Spark: the last micro-batch that was committed,
    if any, where it ended, and which checkpoint holds the state, for which plan."""

    checkpoint: str
    plan: str
    batch: int | None = None
    next: StreamOffsets = {}
    ids: dict[str, int] = {}


class FeedPosition(_Position, tag="feed"):
    """The position of a feed: how many items of its iterable are in the log."""

    taken: int = 0


Position = StartPosition | BatchPosition | SinkPosition | CheckpointPosition | FeedPosition
P = TypeVar("P", StartPosition, BatchPosition, SinkPosition, CheckpointPosition, FeedPosition)


class AppRun(NamedTuple):
    """One run of an app. Of several, the last to take a definition over may move its position.

    `check` raises `ClaimLostError` once another run has the app.
    """

    app: str
    token: str
    check: Callable[[], None] = lambda: None


def progress_key(app: str, definition: str) -> str:
    """The key under which a definition's position is saved."""
    return f"app/{app}/{definition}"


def producer_name(app: str, query: str) -> str:
    """The name of the producer that a query commits as."""
    name = f"{writer_name(app)}/{query}"
    if len(name) <= PRODUCER_CHARS_MAX:
        return name
    return f"{writer_name(app)}/{xxhash.xxh3_128_hexdigest(name.encode())}"


def writer_name(app: str) -> str:
    """The writer of an app's tables: what the names of all its producers begin with."""
    return f"app/{app}"


def query_name(definitions: Sequence[Definition]) -> str:
    """The name of a query of these definitions."""
    return "+".join(definition.name for definition in definitions)


def pack_position(position: Position) -> bytes:
    return msgspec.json.encode(position)


def unpack_position(packed: bytes) -> Position:
    fields = msgspec.json.decode(packed, type=dict[str, Any])
    if "of" not in fields:
        return _of_earlier_version(fields)
    return cast(Position, msgspec.convert(fields, Position, str_keys=True))


def read_position(log: Log, app: str, definition: str) -> Position | None:
    """The position of a definition after its last commit."""
    packed = log.progress(progress_key(app, definition))
    return None if packed is None else unpack_position(packed)


def read_own_position(log: Log, run: AppRun, definition: str, producer: str, kind: type[P]) -> P:
    """The position of a definition; raises `ClaimLostError` unless this run still has it."""
    found = read_position(log, run.app, definition)
    if found is None or found.mover is None or found.mover.producer != producer:
        raise ClaimLostError(
            f"{definition} was reset, or was taken over by another run of app {run.app}"
        )
    if found.mover.run != run.token or not isinstance(found, kind):
        raise ClaimLostError(f"{definition} was taken over by another run of app {run.app}")
    return found


class _EarlierPosition(msgspec.Struct, kw_only=True):
    """The single struct that earlier versions saved for all kinds."""

    producer: str
    sequence: int
    next: StreamOffsets
    ids: dict[str, int] = {}
    again: dict[str, dict[int, list[tuple[int, int]]]] = {}
    workers: dict[str, dict[int, str]] = {}
    times: dict[str, dict[int, int]] = {}
    checkpoint: str = ""
    plan: str = ""
    transactions: dict[str, EarlierDecision] = {}
    sink_workers: int = 0
    run: str = ""


def _of_earlier_version(fields: Mapping[str, Any]) -> Position:
    old = msgspec.convert(fields, _EarlierPosition, str_keys=True)
    mover = Mover(old.producer, old.run) if old.producer else None
    if old.checkpoint:
        return CheckpointPosition(
            mover=mover,
            checkpoint=old.checkpoint,
            plan=old.plan,
            next=old.next,
            ids=old.ids,
            batch=old.sequence if old.sequence >= 0 else None,
        )
    if old.sequence < 0:
        return StartPosition(next=old.next, ids=old.ids)
    if old.sink_workers:
        return SinkPosition(
            mover=mover,
            next=old.next,
            ids=old.ids,
            workers=old.workers,
            books=from_earlier(old.transactions, old.sink_workers),
        )
    return BatchPosition(
        mover=mover,
        next=old.next,
        ids=old.ids,
        again=old.again,
        workers=old.workers,
        times=old.times,
    )
