"""One batch of a query after it was handled: committing it and reporting on it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.app.declaring.definitions import Definition
from penstock.app.running.positions import Position, pack_position, progress_key
from penstock.app.tasks.task import BatchOrder, Failure, Hop, Outcome, Range, read_range
from penstock.errors import FencedError, PenstockError, QueryFailedError, SinkGoneError
from penstock.log.api import Commit, Committed, Log
from penstock.log.writing.commit import commit_surely
from penstock.records.event import microseconds


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch did."""

    sequence: int
    rows_in: int
    rows_out: int
    rows_skipped: int
    took_s: float
    hops_ms: tuple[tuple[float, int], ...]
    committed: Committed


def commit_batch(
    log: Log,
    app: str,
    definitions: Sequence[Definition],
    outcomes: Sequence[Outcome],
    position: Position,
    order: BatchOrder,
) -> Committed:
    """Commit a batch with the position after it; if the outcome is unknown, try again."""
    packed = pack_position(position)
    commit = Commit(
        pieces=[piece for outcome in outcomes for piece in outcome.pieces],
        progress={progress_key(app, definition.name): packed for definition in definitions},
    )
    return commit_surely(log, order.holder, order.sequence, commit)


def describe_batch(
    log: Log,
    order: BatchOrder,
    outcomes: Sequence[Outcome],
    committed: Committed,
    took_s: float,
) -> BatchReport:
    """A report on a batch, including how long its events took from commit to commit."""
    done_us = microseconds(committed.time)
    hops = [hop for outcome in outcomes for hop in outcome.hops]
    if not hops:
        ranges = [range_ for split in order.splits for range_ in split.ranges]
        hops = [hop for range_ in ranges for hop in _first_hop(log, order, range_)]
    return BatchReport(
        sequence=order.sequence,
        rows_in=sum(outcome.rows_in for outcome in outcomes),
        rows_out=sum(outcome.rows_out for outcome in outcomes),
        rows_skipped=sum(outcome.rows_skipped for outcome in outcomes),
        took_s=took_s,
        hops_ms=tuple(((done_us - hop.time_us) / 1000, hop.rows) for hop in hops),
        committed=committed,
    )


def count_rows(log: Log, order: BatchOrder) -> int:
    """How many events a batch has, if no task has counted them."""
    ranges = (range_ for split in order.splits for range_ in split.ranges)
    return sum(log.count(*range_).events for range_ in ranges)


def _first_hop(log: Log, order: BatchOrder, range_: Range) -> list[Hop]:
    """The hop of a range whose events were not read one by one: its oldest event stands for all."""
    first = next(read_range(log, order, range_._replace(end=range_.start + 1), []), None)
    if first is None:
        return []
    return [Hop(first.commit_of(first.first_offset).time_us, log.count(*range_).events)]


def error_of(failure: Failure) -> PenstockError:
    """The error to raise for a failure: what went wrong, and where."""
    if failure.code == FencedError.code:
        return FencedError(failure.error)
    if failure.code == SinkGoneError.code:
        return SinkGoneError(failure.error)
    text = f"{failure.definition} failed at {failure.place}: {failure.error}"
    return QueryFailedError(f"{text}\n\n{failure.traceback}" if failure.traceback else text)
