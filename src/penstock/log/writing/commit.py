"""Committing under numbers: which is next, and what to do if the outcome is unknown."""

from __future__ import annotations

from itertools import repeat

from penstock.errors import CommitOutcomeUnknownError
from penstock.log.api import Commit, Committed, Holder, Log
from penstock.log.writing.fate import Again, Ending, Tries

TRIES_MAX = 5


def commit_surely(log: Log, holder: Holder, sequence: int, commit: Commit) -> Committed:
    """Commit; if the outcome is unknown, commit again: the first commit of a name wins.

    Raises `CommitOutcomeUnknownError` if an attempt may have succeeded and no later one could
    settle it.
    """
    tries = Tries(repeat(0.0, TRIES_MAX - 1), only_unknown=True)
    while True:
        try:
            return log.commit(holder, sequence, commit)
        except Exception as error:
            match tries.after(error, now_s=0.0):
                case Again():
                    continue
                case Ending.UNKNOWN:
                    raise CommitOutcomeUnknownError(
                        f"commit {sequence} of {holder.producer} may or may not have happened "
                        f"({error}): commit again under the same name to find out"
                    ) from error
                case _:
                    raise


def next_sequence(log: Log, producer: str) -> int:
    """The number of the producer's next commit."""
    last = log.last_commit(producer)
    return 0 if last is None else last.sequence + 1
