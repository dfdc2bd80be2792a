"""The fate of a commit: what an error of `Log.commit` tells of it, decided once for all callers.

| error                                   | fate      |
|-----------------------------------------|-----------|
| `UsageError`, except `ClosedError`      | refused   |
| `CommitOutcomeUnknownError`             | unknown   |
| any other `PenstockError`, retriable    | postponed |
| any other `PenstockError`               | failed    |
| an exception that is not Penstock's own | unknown   |
"""

from __future__ import annotations

from enum import Enum

from penstock.errors import ClosedError, CommitOutcomeUnknownError, PenstockError, UsageError


class Fate(Enum):
    """What became of a commit that raised."""

    REFUSED = "refused"
    """It did not happen: what it brings is wrong, and will be refused again."""
    POSTPONED = "postponed"
    """It did not happen, and may succeed later."""
    FAILED = "failed"
    """It did not happen, and trying again does not help."""
    UNKNOWN = "unknown"
    """It may have happened; committing again under the same name tells."""

    @property
    def may_be_retried(self) -> bool:
        return self in (Fate.POSTPONED, Fate.UNKNOWN)


def fate_of(error: Exception) -> Fate:
    """The fate of a commit whose latest try raised this, if no earlier try was unknown."""
    match error:
        case ClosedError():
            return Fate.FAILED
        case UsageError():
            return Fate.REFUSED
        case CommitOutcomeUnknownError():
            return Fate.UNKNOWN
        case PenstockError():
            return Fate.POSTPONED if error.retriable else Fate.FAILED
    return Fate.UNKNOWN
