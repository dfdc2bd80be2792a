"""What a query gives its tasks to do, and what they report. Plain data, so that it can travel."""

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

from penstock.connect.push import SinkVote
from penstock.errors import DamagedError, PenstockError
from penstock.log.api import CommitOptions, Holder, Log, Part, Piece, Pin
from penstock.log.batch import Batch
from penstock.log.merge import Read, in_commit_order
from penstock.log.read import read_past
from penstock.records.event import from_microseconds

_OURS = str(Path(__file__).parents[1]) + os.sep
#: what a batch's tasks stage need not be on the disk before its commit is, which syncs it too
STAGED = CommitOptions(acks="write")


class Range(NamedTuple):
    """Events of one partition: offsets from `start` up to before `end`."""

    stream: str
    partition: int
    start: int
    end: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """What one task reads: ranges, and of them only the keys of one slot out of `slots`.

    `again` are offsets that were delivered before and not acknowledged; `timers` the keys
    whose timers are due, with when. Ranges are read in the order of commits, unless `as_stored`:
    then one after the other, and whoever handles them puts them in order.
    """

    number: int
    ranges: tuple[Range, ...]
    slot: int = 0
    slots: int = 1
    as_stored: bool = False
    again: tuple[Range, ...] = ()
    timers: tuple[tuple[bytes, int], ...] = ()


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of a query: whose it is, which one, when it began, and the pinned moment.

    `past` are the streams whose damaged events are left out. A task that would hold more than
    `bytes_max` of events (0: no limit) gives the batch up.
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
    """Of an error of the log rather than of the user's."""


class Hop(NamedTuple):
    """Input events that were appended at the same moment."""

    time_us: int
    rows: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a split.

    `times` are the latest time of an event by stream and partition, where somebody asks for it.
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
    """What a split holds: events, and what is wrong with those that could not be read."""

    batches: list[Batch]
    damaged: list[DamagedError]

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self.batches)


TOO_LARGE = "batch_too_large"
"""The code of a failure that only says that a batch is to be cut."""


class Work(Protocol):
    """What a definition does with a split, in whatever process. Must be picklable by Spark."""

    name: str

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        """Handle the events and stage what comes of them."""


class FailedError(Exception):
    """A user's function failed; carries what to report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def run_split(log: Log, works: Sequence[Work], batch: BatchOrder, split: Split) -> Outcome:
    """Run every definition of a query over one split: it is read once for all of them."""
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
    # Where each task reads everything, and keeps its share of the keys, only one tells of it.
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
        definition=batch.query, place="a task", error="the batch is too large", traceback="",
        code=TOO_LARGE,
    )  # fmt: skip
    return Outcome(failure=failure, rows_in=inputs.rows, bytes_in=inputs.nbytes)


def log_failure(query: str, error: PenstockError) -> Failure:
    """A failure of the log, as a task reports it."""
    return Failure(
        definition=query, place="the log", error=str(error), traceback="", code=error.code
    )


def read_split(log: Log, batch: BatchOrder, split: Split) -> Inputs:
    """The events of a split: in order of offset; of several partitions, in order of commit."""
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
            break  # enough to see that it is too much
    return Inputs(found, [damage for damage in damaged if _begins_in(split, damage)])


def _begins_in(split: Split, damage: DamagedError) -> bool:
    """Whether damage begins in the split: what it cuts off the next one was told of before."""
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
    """The events of a range. What is damaged is noted, where it may be left out, or raised."""
    if range_.stream not in batch.past:
        return log.read(*range_)
    return read_past(log, *range_, damaged.append)


def _by_commit(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches cut so that each holds the events of one commit."""
    for batch in batches:
        starts = [max(run.offset, batch.first_offset) for run in batch.runs]
        for start, end in zip(starts, [*starts[1:], batch.next_offset], strict=True):
            if start < end:
                yield batch.sliced(start, end)


def stage(log: Log, batch: BatchOrder, parts: Sequence[Part]) -> tuple[Piece, ...]:
    """Store what a task made, unseen, for the batch's commit."""
    return tuple(
        log.stage(batch.holder, batch.sequence, part, STAGED)
        for part in parts
        if part.batch.num_rows
    )


def derived_id(query: str, id_: str, n: int) -> str:
    """The id of the n-th event derived from another: the same after any replay."""
    return xxhash.xxh3_128_hexdigest(f"{query}\0{id_}\0{n}".encode())


def this_worker() -> str:
    """Names this process, as `penstock agent list` shows it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def user_traceback(error: BaseException) -> str:
    """A traceback that begins in the user's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _is_ours(code: CodeType) -> bool:
    file = code.co_filename
    return file.startswith((_OURS, "<frozen importlib", importlib.__file__))


def _hops(inputs: Sequence[Batch]) -> Iterator[Hop]:
    """When the input was appended, and how many events then."""
    for part in _by_commit(iter(inputs)):
        yield Hop(part.runs[0].time_us, len(part))
