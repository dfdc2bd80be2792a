"""Commits in doubt: an attempt may have succeeded, and no later one has settled it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import CommitOutcomeUnknownError, PenstockError
from penstock.log.api import Committed, Holder
from penstock.log.writing.fate import (
    Fate,
    ProducerStanding,
    RefusedCommit,
    RepeatedCommit,
    UncertainCommit,
    conclude,
    fate_of,
    needs_standing,
)

DOUBTS_MAX = 10_000
"""How many are remembered; beyond that, the oldest are forgotten."""


class Doubts:
    """What one process remembers about the commits it tried. Thread-safe."""

    def __init__(self) -> None:
        self._names: dict[tuple[Holder, int], None] = {}

    def has(self, holder: Holder, sequence: int) -> bool:
        return (holder, sequence) in self._names

    def add(self, holder: Holder, sequence: int) -> None:
        self._names[holder, sequence] = None
        for name in list(self._names)[:-DOUBTS_MAX]:
            self._names.pop(name, None)

    def remove(self, holder: Holder, sequence: int) -> None:
        """Note that the outcome of the commit is known, whichever it is."""
        self._names.pop((holder, sequence), None)

    def conclude(
        self,
        holder: Holder,
        sequence: int,
        error: Exception,
        look: Callable[[bool], ProducerStanding],
    ) -> Committed:
        """Settle a commit whose latest attempt raised `error`: return its outcome, or raise.

        `look` asks the log for the producer's position. It is called only if that matters, with
        whether an earlier attempt is in doubt.
        """
        in_doubt = self.has(holder, sequence)
        if fate_of(error) is Fate.UNKNOWN:
            self.add(holder, sequence)
            raise error
        if not needs_standing(error, in_doubt=in_doubt):
            if in_doubt:
                raise unknown(error) from error
            raise error
        try:
            standing = look(in_doubt)
        except PenstockError as failed:
            if in_doubt:
                raise unknown(failed) from error
            raise error from failed
        match conclude(standing, holder, sequence, error, in_doubt=in_doubt):
            case RepeatedCommit(outcome):
                self.remove(holder, sequence)
                return outcome
            case RefusedCommit(reason):
                self.remove(holder, sequence)
                raise reason
            case UncertainCommit(reason):
                raise unknown(reason) from error


def unknown(error: Exception) -> CommitOutcomeUnknownError:
    """The error for a commit that is in doubt, and whose latest attempt raised `error`."""
    return CommitOutcomeUnknownError(
        f"the commit may or may not have happened ({error}): commit again under the same name to "
        "find out"
    )
