"""Committing under numbers: which is next, and what to do where nobody knows what happened."""

from __future__ import annotations

from penstock.errors import CommitOutcomeUnknownError
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.log.fate import Fate, fate_of

TRIES_MAX = 5


def commit_surely(log: Log, holder: Holder, sequence: int, commit: Commit) -> Committed:
    """Commit; where the outcome is unknown, commit again: the first of a name wins.

    Raises `CommitOutcomeUnknownError` if a try may have happened and no later one could tell.
    """
    unknown: Exception | None = None
    for _ in range(TRIES_MAX):
        try:
            return log.commit(holder, sequence, commit)
        except Exception as error:
            if fate_of(error) is not Fate.UNKNOWN:
                if unknown is None:
                    raise
                raise _unknown(holder, sequence, error) from error
            unknown = error
    assert unknown is not None  # noqa: S101  a try returned, raised, or set it
    raise _unknown(holder, sequence, unknown) from unknown


def _unknown(holder: Holder, sequence: int, error: Exception) -> CommitOutcomeUnknownError:
    return CommitOutcomeUnknownError(
        f"commit {sequence} of {holder.producer} may or may not have happened ({error}): commit "
        "again under the same name to find out"
    )


def next_sequence(log: Log, producer: str) -> int:
    """The number of the producer's next commit."""
    last = log.last_commit(producer)
    return 0 if last is None else last.sequence + 1
