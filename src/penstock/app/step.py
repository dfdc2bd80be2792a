"""One batch of a query, once it was handled: committing it, and telling of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.app.definitions import Definition
from penstock.app.positions import Position, progress_key
from penstock.app.task import BatchOrder, Failure, Hop, Outcome, Range, read_range
from penstock.errors import FencedError, PenstockError, QueryFailedError, SinkGoneError
from penstock.log.api import Commit, Committed, Log
from penstock.log.commit import commit_surely
from penstock.records.event import microseconds


class Step(msgspec.Struct, frozen=True, kw_only=True):
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
    """Make a batch visible with the position after it; where the outcome is unknown, ask again."""
    packed = msgspec.json.encode(position)
    commit = Commit(
        pieces=[piece for outcome in outcomes for piece in outcome.pieces],
        progress={progress_key(app, definition.name): packed for definition in definitions},
    )
    return commit_surely(log, order.holder, order.sequence, commit)


def told(
    log: Log,
    order: BatchOrder,
    outcomes: Sequence[Outcome],
    committed: Committed,
    took_s: float,
) -> Step:
    """A batch in numbers: among them how long its events took from commit to commit."""
    done_us = microseconds(committed.time)
    hops = [hop for outcome in outcomes for hop in outcome.hops]
    if not hops:
        ranges = [range_ for split in order.splits for range_ in split.ranges]
        hops = [hop for range_ in ranges for hop in _first_hop(log, order, range_)]
    return Step(
        sequence=order.sequence,
        rows_in=sum(outcome.rows_in for outcome in outcomes),
        rows_out=sum(outcome.rows_out for outcome in outcomes),
        rows_skipped=sum(outcome.rows_skipped for outcome in outcomes),
        took_s=took_s,
        hops_ms=tuple(((done_us - hop.time_us) / 1000, hop.rows) for hop in hops),
        committed=committed,
    )


def rows_of(log: Log, order: BatchOrder) -> int:
    """How many events a batch has, where no task has counted them."""
    ranges = (range_ for split in order.splits for range_ in split.ranges)
    return sum(log.count(*range_).events for range_ in ranges)


def _first_hop(log: Log, order: BatchOrder, range_: Range) -> list[Hop]:
    """The oldest event of a range stands for all, where nobody has looked at each."""
    first = next(read_range(log, order, range_._replace(end=range_.start + 1), []), None)
    if first is None:
        return []
    return [Hop(first.commit_of(first.first_offset).time_us, log.count(*range_).events)]


def failed(failure: Failure) -> PenstockError:
    """The error that tells a user what their function did wrong, and where."""
    if failure.code == FencedError.code:
        return FencedError(failure.error)
    if failure.code == SinkGoneError.code:
        return SinkGoneError(failure.error)
    text = f"{failure.definition} failed at {failure.place}: {failure.error}"
    return QueryFailedError(f"{text}\n\n{failure.traceback}" if failure.traceback else text)
