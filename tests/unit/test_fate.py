"""The fate of a commit: every case of every decision, in tables."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from penstock import errors
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.log.engine.doubts import DOUBTS_MAX, Doubts
from penstock.log.writing.commit import TRIES_MAX, commit_surely
from penstock.log.writing.fate import (
    Again,
    Ending,
    Fate,
    NewCommit,
    ProducerStanding,
    RefusedCommit,
    RepeatedCommit,
    Tries,
    UncertainCommit,
    check_stageable,
    conclude,
    fate_of,
    judge,
    needs_standing,
)

KNOWN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
]
MINE = Holder("p", 7)
UNKNOWN = errors.CommitOutcomeUnknownError("may have happened")
BUSY = errors.LogBusyError("busy")
FENCED = errors.FencedError("fenced")
PIECE = errors.PieceError("no piece")
RECORD = errors.RecordError("wrong")


def done(sequence: int) -> Committed:
    time = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return Committed(producer="p", sequence=sequence, commit=1, time=time, placements=())


def repeated(sequence: int) -> RepeatedCommit:
    return RepeatedCommit(msgspec.structs.replace(done(sequence), repeated=True))


# A commit arrives


@pytest.mark.parametrize(
    ("standing", "sequence", "verdict"),
    [
        (ProducerStanding(), 0, errors.FencedError),
        (ProducerStanding(8), 0, errors.FencedError),
        (ProducerStanding(6), 0, errors.FencedError),
        (ProducerStanding(8, done(4)), 4, errors.FencedError),
        (ProducerStanding(8, done(4), 7), 4, errors.FencedError),
        (ProducerStanding(8, done(4)), 3, errors.FencedError),
        (ProducerStanding(7), 0, NewCommit()),
        (ProducerStanding(7), 9, NewCommit()),
        (ProducerStanding(7, done(4)), 5, NewCommit()),
        (ProducerStanding(7, done(4), 6), 5, NewCommit()),
        (ProducerStanding(7, done(4), is_final=True), 9, NewCommit()),
        (ProducerStanding(7, done(4)), 4, repeated(4)),
        (ProducerStanding(7, done(4), 6), 4, repeated(4)),
        (ProducerStanding(7, done(4)), 3, errors.SequenceError),
        (ProducerStanding(7, done(4), 6), 0, errors.SequenceError),
    ],
)
def test_a_commit_arrives(standing: ProducerStanding, sequence: int, verdict: object) -> None:
    found = judge(standing, MINE, sequence)
    assert (type(found.error) if isinstance(found, RefusedCommit) else found) == verdict
    if isinstance(found, NewCommit):
        check_stageable(standing, MINE, sequence)
    else:
        kind = type(found.error) if isinstance(found, RefusedCommit) else errors.SequenceError
        with pytest.raises(kind):
            check_stageable(standing, MINE, sequence)


# A try raised an error


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (errors.RecordError(), Fate.REFUSED),
        (errors.LimitError(), Fate.REFUSED),
        (errors.UnknownObjectError(), Fate.REFUSED),
        (errors.ClosedError(), Fate.FAILED),
        (errors.FencedError(), Fate.FAILED),
        (errors.SequenceError(), Fate.FAILED),
        (errors.PieceError(), Fate.FAILED),
        (errors.LogError(), Fate.FAILED),
        (errors.LogReadOnlyError(), Fate.FAILED),
        (errors.LogBusyError(), Fate.POSTPONED),
        (errors.LogFullError(), Fate.POSTPONED),
        (errors.LogUnreachableError(), Fate.POSTPONED),
        (errors.CommitOutcomeUnknownError(), Fate.UNKNOWN),
        (RuntimeError("can't start new thread"), Fate.UNKNOWN),
        (MemoryError(), Fate.UNKNOWN),
        (OSError(), Fate.UNKNOWN),
        (KeyboardInterrupt(), Fate.UNKNOWN),
    ],
)
def test_the_fate_of_a_commit_that_raised(error: BaseException, fate: Fate) -> None:
    assert fate_of(error) is fate


@pytest.mark.parametrize("kind", KNOWN)
def test_what_may_be_retried_is_what_says_so(kind: type[errors.PenstockError]) -> None:
    assert fate_of(kind.__new__(kind)).may_be_retried == kind.retriable


@pytest.mark.parametrize(
    ("error", "not_in_doubt", "in_doubt"),
    [
        (RECORD, True, True),
        (PIECE, True, True),
        (FENCED, False, True),
        (errors.SequenceError(), False, True),
        (errors.LogError(), False, True),
        (errors.ClosedError(), False, True),
        (BUSY, False, False),
        (errors.LogUnreachableError(), False, False),
        (UNKNOWN, False, False),
    ],
)
def test_whether_the_log_can_tell_more(
    error: Exception, not_in_doubt: bool, in_doubt: bool
) -> None:
    assert needs_standing(error, in_doubt=False) == not_in_doubt
    assert needs_standing(error, in_doubt=True) == in_doubt


# The log is asked what became of it


@pytest.mark.parametrize(
    ("standing", "error", "in_doubt", "verdict"),
    [
        # not in doubt: the error, unless the producer's standing says more
        (ProducerStanding(7), PIECE, False, RefusedCommit(PIECE)),
        (ProducerStanding(7, done(3), 7), RECORD, False, RefusedCommit(RECORD)),
        (ProducerStanding(7, done(4), 7), PIECE, False, repeated(4)),
        (ProducerStanding(7, done(4), 6), RECORD, False, repeated(4)),
        (ProducerStanding(7, done(4)), RECORD, False, repeated(4)),
        (ProducerStanding(8, done(4), 7), PIECE, False, errors.FencedError),
        (ProducerStanding(), PIECE, False, errors.FencedError),
        (ProducerStanding(7, done(5), 7), PIECE, False, errors.SequenceError),
        # in doubt, and it is not there
        (ProducerStanding(7), PIECE, True, UncertainCommit(PIECE)),
        (ProducerStanding(7, done(3), 7), RECORD, True, UncertainCommit(RECORD)),
        (ProducerStanding(7, done(3), 7, is_final=True), RECORD, True, RefusedCommit(RECORD)),
        (ProducerStanding(7, is_final=True), PIECE, True, RefusedCommit(PIECE)),
        (ProducerStanding(8), FENCED, True, RefusedCommit(FENCED)),
        (ProducerStanding(8, done(3), 7), FENCED, True, RefusedCommit(FENCED)),
        (ProducerStanding(), FENCED, True, RefusedCommit(FENCED)),
        # in doubt, and one of this name is there
        (ProducerStanding(7, done(4), 7), PIECE, True, repeated(4)),
        (ProducerStanding(8, done(4), 7), FENCED, True, repeated(4)),
        (ProducerStanding(8, done(4), 8), FENCED, True, RefusedCommit(FENCED)),
        (ProducerStanding(7, done(4)), PIECE, True, repeated(4)),
        (ProducerStanding(8, done(4)), FENCED, True, UncertainCommit(FENCED)),
        # in doubt, and a later one is there
        (ProducerStanding(7, done(5), 7), errors.SequenceError(), True, UncertainCommit),
        (ProducerStanding(8, done(5), 8), FENCED, True, UncertainCommit(FENCED)),
        (ProducerStanding(8, done(5), 8, is_final=True), FENCED, True, UncertainCommit(FENCED)),
    ],
)
def test_what_became_of_it(
    standing: ProducerStanding, error: Exception, in_doubt: bool, verdict: object
) -> None:
    found = conclude(standing, MINE, 4, error, in_doubt=in_doubt)
    if isinstance(verdict, type) and issubclass(verdict, errors.PenstockError):
        assert isinstance(found, RefusedCommit)
        assert type(found.error) is verdict
    elif isinstance(verdict, type):
        assert isinstance(found, verdict)
    else:
        assert found == verdict


# A series of tries


@pytest.mark.parametrize(
    ("tries", "raised", "steps"),
    [
        # what does not help is not tried again
        ({}, [FENCED], [Ending.FAILED]),
        ({}, [RECORD], [Ending.FAILED]),
        ({}, [errors.ClosedError()], [Ending.FAILED]),
        # until it succeeds, fails for good, or there are no more pauses
        ({}, [BUSY, BUSY, BUSY], [Again(1), Again(2), Ending.OVERDUE]),
        ({}, [BUSY, FENCED], [Again(1), Ending.FAILED]),
        ({}, [UNKNOWN, UNKNOWN, UNKNOWN], [Again(1), Again(2), Ending.UNKNOWN]),
        ({}, [MemoryError()], [Again(1)]),
        # once in doubt, always in doubt
        ({}, [UNKNOWN, FENCED], [Again(1), Ending.UNKNOWN]),
        ({}, [UNKNOWN, BUSY, BUSY], [Again(1), Again(2), Ending.UNKNOWN]),
        ({}, [MemoryError(), RECORD], [Again(1), Ending.UNKNOWN]),
        ({"in_doubt": True}, [FENCED], [Ending.UNKNOWN]),
        ({"in_doubt": True}, [BUSY, RECORD], [Again(1), Ending.UNKNOWN]),
        # no try begins at the deadline or later; the clock stands at 100
        ({"deadline_s": 101}, [BUSY], [Ending.OVERDUE]),
        ({"deadline_s": 101}, [UNKNOWN], [Ending.UNKNOWN]),
        ({"deadline_s": 102}, [BUSY, BUSY], [Again(1), Ending.OVERDUE]),
        ({"deadline_s": 101}, [FENCED], [Ending.FAILED]),
        # only what is unknown
        ({"only_unknown": True}, [BUSY], [Ending.OVERDUE]),
        ({"only_unknown": True}, [UNKNOWN, BUSY], [Again(1), Ending.UNKNOWN]),
        ({"only_unknown": True}, [UNKNOWN, UNKNOWN], [Again(1), Again(2)]),
    ],
)
def test_a_series_of_tries(
    tries: dict[str, Any], raised: list[Exception], steps: list[Again | Ending]
) -> None:
    series = Tries([1, 2], **tries)
    assert [series.after(error, now_s=100) for error in raised] == steps


def test_a_series_that_found_out_is_not_in_doubt() -> None:
    series = Tries([1, 2])
    series.after(UNKNOWN, now_s=0)
    series.find_out()
    assert series.after(FENCED, now_s=0) is Ending.FAILED


# Those who use it


class Answers:
    """A log whose commits raise these errors, one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def commit(self, holder: Holder, sequence: int, commit: Commit) -> Committed:
        raise self.errors.pop(0)


@pytest.mark.parametrize("later", [FENCED, errors.LogFullError("mine")])
def test_what_may_have_happened_is_not_called_a_failure_by_a_later_try(later: Exception) -> None:
    log = Answers(errors.CommitOutcomeUnknownError(), later)
    with pytest.raises(errors.CommitOutcomeUnknownError, match=str(later)):
        commit_surely(cast(Log, log), MINE, 0, Commit())
    assert log.errors == []
    with pytest.raises(type(later)):
        commit_surely(cast(Log, Answers(later)), MINE, 0, Commit())


def test_committing_surely_has_an_end() -> None:
    log = Answers(*[UNKNOWN] * (TRIES_MAX + 1))
    with pytest.raises(errors.CommitOutcomeUnknownError):
        commit_surely(cast(Log, log), MINE, 0, Commit())
    assert len(log.errors) == 1


def never() -> ProducerStanding:
    raise AssertionError("the log need not be asked")


def away() -> ProducerStanding:
    raise errors.LogUnreachableError


@pytest.mark.parametrize(
    ("in_doubt", "error", "look", "raised", "stays"),
    [
        (False, BUSY, never, errors.LogBusyError, False),
        (False, FENCED, never, errors.FencedError, False),
        (False, UNKNOWN, never, type(UNKNOWN), True),
        (False, MemoryError(), never, MemoryError, True),
        (False, PIECE, away, errors.PieceError, False),
        (True, BUSY, never, type(UNKNOWN), True),
        (True, FENCED, away, type(UNKNOWN), True),
        (True, FENCED, lambda: ProducerStanding(8), errors.FencedError, False),
        (True, FENCED, lambda: ProducerStanding(8, done(4), 7), None, False),
        (
            True,
            FENCED,
            lambda: ProducerStanding(8, done(5), 8),
            errors.CommitOutcomeUnknownError,
            True,
        ),
        (True, PIECE, lambda: ProducerStanding(7), type(UNKNOWN), True),
    ],
)
def test_a_commit_in_doubt_is_remembered_until_it_is_known(
    in_doubt: bool,
    error: Exception,
    look: Callable[[], ProducerStanding],
    raised: type[Exception] | None,
    stays: bool,
) -> None:
    doubts = Doubts()
    if in_doubt:
        doubts.add(MINE, 4)
    if raised is None:
        assert doubts.conclude(MINE, 4, error, lambda _: look()).repeated
    else:
        with pytest.raises(raised):
            doubts.conclude(MINE, 4, error, lambda _: look())
    assert doubts.has(MINE, 4) == stays
    assert not doubts.has(Holder("p", 8), 4)  # what another holder tried is not its doubt


def test_doubts_are_bounded() -> None:
    doubts = Doubts()
    for sequence in range(DOUBTS_MAX + 5):
        doubts._names[MINE, sequence] = None
    doubts.add(MINE, DOUBTS_MAX + 5)
    assert len(doubts._names) == DOUBTS_MAX
    assert doubts.has(MINE, DOUBTS_MAX + 5)
    assert not doubts.has(MINE, 5)
