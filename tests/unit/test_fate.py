"""What an error of a commit says of the commit."""

from __future__ import annotations

import pytest

from penstock import errors
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
