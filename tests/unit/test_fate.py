"""What an error of a commit says of the commit."""

from __future__ import annotations

from typing import cast

import pytest

from penstock import errors
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.log.commit import commit_surely
from penstock.log.fate import Fate, fate_of

KNOWN = [value for value in vars(errors).values() if isinstance(value, type)]


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
    ],
)
def test_the_fate_of_a_commit(error: Exception, fate: Fate) -> None:
    assert fate_of(error) is fate


@pytest.mark.parametrize("kind", [k for k in KNOWN if issubclass(k, errors.PenstockError)])
def test_what_is_refused_is_never_said_to_be_retriable(kind: type[errors.PenstockError]) -> None:
    error = kind.__new__(kind)
    assert fate_of(error).may_be_retried == kind.retriable


class Answers:
    """A log whose commits raise these errors, one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def commit(self, holder: Holder, sequence: int, commit: Commit) -> Committed:
        raise self.errors.pop(0)


@pytest.mark.parametrize("later", [errors.FencedError("mine"), errors.LogFullError("mine")])
def test_what_may_have_happened_is_not_called_a_failure_by_a_later_try(later: Exception) -> None:
    log = Answers(errors.CommitOutcomeUnknownError(), later)
    with pytest.raises(errors.CommitOutcomeUnknownError, match="mine"):
        commit_surely(cast(Log, log), Holder("p", 1), 0, Commit())
    assert log.errors == []
    with pytest.raises(type(later)):
        commit_surely(cast(Log, Answers(later)), Holder("p", 1), 0, Commit())
