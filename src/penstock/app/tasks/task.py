"""The orders that a query gives its tasks, and the outcomes they report: plain data that can be
sent to other processes."""

from __future__ import annotations

import datetime as dt
import importlib
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from penstock.connect.push.books import SinkVote
from penstock.errors import DamagedError, PenstockError
from penstock.log.api import CommitOptions, Holder, Log, Part, Piece, Pin
from penstock.log.batch import Batch
from penstock.log.reading.merge import Read, in_commit_order
from penstock.log.reading.read import read_past
from penstock.records.event import from_microseconds

_OURS = str(Path(__file__).parents[2]) + os.sep
#: staged pieces need not be synced on their own: the commit of the batch syncs them too
STAGED = CommitOptions(acks="write")


class Range(NamedTuple):
    """Events of one partition: offsets from `start` up to but not including `end`."""

    stream: str
    partition: int
    start: int
    end: int


class DueTimer(NamedTuple):
    """A timer, by the key of its entry, and when it was due."""

    timer: bytes
    due_us: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """What one task reads: ranges, and of these only the keys of one slot out of `slots`.

    `again` holds offsets that were delivered before but not acknowledged. Ranges are read in the
    order of commits, or with `as_stored` one after the other; then the work that handles them
    sorts them. `sink_start` is where the worker's book of a sink goes on.
    """

    number: int
    ranges: tuple[Range, ...]
    slot: int = 0
    slots: int = 1
    as_stored: bool = False
    again: tuple[Range, ...] = ()
    timers: tuple[DueTimer, ...] = ()
    sink_start: int | None = None


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of a query: its holder and sequence, when it began, and the moment it pins.

    `past` names the streams whose damaged events are skipped. A task that would hold more than
    `bytes_max` bytes of events (0: no limit) gives the batch up.
    """

    query: str
    holder: Holder
    sequence: int
    now_us: int
    splits: tuple[Split, ...]
    pin: Pin | None = None
    past: tuple[str, ...] = ()
    bytes_max: int = 0

    @property
    def now(self) -> dt.datetime:
        return from_microseconds(self.now_us)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a definition could not handle an event."""

    definition: str
    place: str
    error: str
    traceback: str
    code: str = ""
    """The code of an error of Penstock; empty for an error of the user's function."""


class Hop(NamedTuple):
    """Input events that were appended at the same moment."""

    time_us: int
    rows: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a split.

    `times` holds the latest time of an event by stream and partition, if the definition needs it.
    """

    pieces: tuple[Piece, ...] = ()
    rows_in: int = 0
    bytes_in: int = 0
    rows_out: int = 0
    rows_skipped: int = 0
    worker: str = ""
    partitions: tuple[tuple[str, int], ...] = ()
    hops: tuple[Hop, ...] = ()
    unacknowledged: tuple[tuple[str, int, int], ...] = ()
    timers: tuple[tuple[bytes, int | None], ...] = ()
    times: tuple[tuple[str, int, int], ...] = ()
    votes: tuple[SinkVote, ...] = ()
    failure: Failure | None = None


class Inputs(NamedTuple):
    """The input of a split: its events, and errors for those that could not be read."""

    batches: list[Batch]
    damaged: list[DamagedError]

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self.batches)


TOO_LARGE = "batch_too_large"
"""The code of a failure that only means that the batch must be smaller."""


class Work(Protocol):
    """What a definition does with a split, in any process. Must be picklable by Spark."""

    name: str

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        """Handle the events and stage the results."""


class FailedError(Exception):
    """A definition could not handle an event; carries the failure to report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def run_split(log: Log, works: Sequence[Work], batch: BatchOrder, split: Split) -> Outcome:
    """Run every definition of a query over one split, which is read only once."""
    outcomes = []
    try:
        inputs = read_split(log, batch, split)
        if batch.bytes_max and inputs.nbytes > batch.bytes_max and inputs.rows > 1:
            return _too_large(batch, inputs)
        for work in works:
            outcomes.append(work.run(log, batch, split, inputs))
    except FailedError as error:
        return Outcome(failure=error.failure, worker=this_worker())
    except PenstockError as error:
        return Outcome(failure=log_failure(batch.query, error), worker=this_worker())
    # If each task reads everything and keeps its share of the keys, only one reports the input.
    is_first = split.slot == 0
    places = {(r.stream, r.partition): None for r in (*split.ranges, *split.again)}
    return Outcome(
        pieces=tuple(piece for outcome in outcomes for piece in outcome.pieces),
        rows_in=inputs.rows if is_first else 0,
        bytes_in=inputs.nbytes if is_first else 0,
        rows_out=sum(outcome.rows_out for outcome in outcomes),
        rows_skipped=sum(outcome.rows_skipped for outcome in outcomes)
        + (len(inputs.damaged) if is_first else 0),
        worker=this_worker(),
        partitions=tuple(places),
        hops=tuple(_hops(inputs.batches)) if is_first else (),
        unacknowledged=tuple(u for outcome in outcomes for u in outcome.unacknowledged),
        timers=tuple(t for outcome in outcomes for t in outcome.timers),
        times=tuple(t for outcome in outcomes for t in outcome.times),
        votes=tuple(v for outcome in outcomes for v in outcome.votes),
    )


def _too_large(batch: BatchOrder, inputs: Inputs) -> Outcome:
    failure = Failure(
        definition=batch.query,
        place="a task",
        error="the batch is too large",
        traceback="",
        code=TOO_LARGE,
    )
    return Outcome(failure=failure, rows_in=inputs.rows, bytes_in=inputs.nbytes)


def log_failure(query: str, error: PenstockError) -> Failure:
    """A failure of the log, as a task reports it."""
    return Failure(
        definition=query, place="the log", error=str(error), traceback="", code=error.code
    )


def read_split(log: Log, batch: BatchOrder, split: Split) -> Inputs:
    """The events of a split, in order of offset, or for several partitions in order of commit."""
    damaged: list[DamagedError] = []
    found: list[Batch] = []
    for range_ in split.again:
        found += read_range(log, batch, range_, damaged)
    readers = {
        n: (range_.start, _reader(log, batch, range_, damaged))
        for n, range_ in enumerate(split.ranges)
    }
    one_by_one = (item for start, read in readers.values() for item in read(start))
    size = 0
    for item in one_by_one if split.as_stored else in_commit_order(readers):
        found.append(item)
        size += item.nbytes
        if batch.bytes_max and size > batch.bytes_max and sum(map(len, found)) > 1:
            break  # enough to know that it is too large
    return Inputs(found, [damage for damage in damaged if _begins_in(split, damage)])


def _begins_in(split: Split, damage: DamagedError) -> bool:
    """Whether damage begins in the split; damage that only extends into it was reported before."""
    return any(
        (range_.stream, range_.partition) == (damage.stream, damage.partition)
        and range_.start <= damage.first_offset
        for range_ in (*split.ranges, *split.again)
    )


def _reader(log: Log, batch: BatchOrder, range_: Range, damaged: list[DamagedError]) -> Read:
    return lambda start: read_range(log, batch, range_._replace(start=start), damaged)


def read_range(
    log: Log, batch: BatchOrder, range_: Range, damaged: list[DamagedError]
) -> Iterator[Batch]:
    """The events of a range. Damaged ones are noted if they may be skipped, otherwise raised."""
    if range_.stream not in batch.past:
        return log.read(*range_)
    return read_past(log, *range_, damaged.append)


def _by_commit(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches divided so that each holds the events of one commit."""
    for batch in batches:
        starts = [max(run.offset, batch.first_offset) for run in batch.runs]
        for start, end in zip(starts, [*starts[1:], batch.next_offset], strict=True):
            if start < end:
                yield batch.slice_offsets(start, end)


def stage(log: Log, batch: BatchOrder, parts: Sequence[Part]) -> tuple[Piece, ...]:
    """Store the output of a task for the batch's commit, which makes it visible."""
    return tuple(
        log.stage(batch.holder, batch.sequence, part, STAGED)
        for part in parts
        if part.batch.num_rows
    )


def derived_id(query: str, id_: str, n: int) -> str:
    """The id of the n-th event derived from another; the same after a replay."""
    return xxhash.xxh3_128_hexdigest(f"{query}\0{id_}\0{n}".encode())


def this_worker() -> str:
    """The name of this process, as `penstock agent list` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def user_traceback(error: BaseException) -> str:
    """A traceback that starts in the user's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _is_ours(code: CodeType) -> bool:
    file = code.co_filename
    return file.startswith((_OURS, "<frozen importlib", importlib.__file__))


def _hops(inputs: Sequence[Batch]) -> Iterator[Hop]:
    """When events of the input were appended, and how many at each time."""
    for part in _by_commit(iter(inputs)):
        yield Hop(part.runs[0].time_us, len(part))
