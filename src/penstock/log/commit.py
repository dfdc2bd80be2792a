"""Committing under numbers: which is next, and what to do where nobody knows what happened."""

from __future__ import annotations

import contextlib

from penstock.errors import CommitOutcomeUnknownError
from penstock.log.api import Commit, Committed, Holder, Log

TRIES_MAX = 5


def commit_surely(log: Log, holder: Holder, sequence: int, commit: Commit) -> Committed:
    """Commit; where the outcome is unknown, commit again: the first of a name wins.

    Raises `CommitOutcomeUnknownError` only after several tries.
    """
    for _ in range(TRIES_MAX - 1):
        with contextlib.suppress(CommitOutcomeUnknownError):
            return log.commit(holder, sequence, commit)
    return log.commit(holder, sequence, commit)


def next_sequence(log: Log, producer: str) -> int:
    """The number of the producer's next commit."""
    last = log.last_commit(producer)
    return 0 if last is None else last.sequence + 1
