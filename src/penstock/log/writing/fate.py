"""The fate of a commit: every decision about it, in one place for both engines and all callers.

Pure functions: a state and a request or an error in, a verdict out. They answer four questions.

1.  A commit arrives (`judge`), and the log has its producer's standing:

    | the producer           | the sequence     | verdict                              |
    |------------------------|------------------|--------------------------------------|
    | unknown                | any              | `RefusedCommit`, a `FencedError`     |
    | held at another epoch  | any              | `RefusedCommit`, a `FencedError`     |
    | held at the same epoch | above the latest | `NewCommit`                          |
    |                        | the latest       | `RepeatedCommit`, with its outcome   |
    |                        | below the latest | `RefusedCommit`, a `SequenceError`   |

2.  An attempt raised an error (`fate_of`):

    | error                                   | fate      |
    |-----------------------------------------|-----------|
    | `UsageError`, except `ClosedError`      | refused   |
    | `CommitOutcomeUnknownError`             | unknown   |
    | any other `PenstockError`, retriable    | postponed |
    | any other `PenstockError`               | failed    |
    | an exception that is not Penstock's own | unknown   |

3.  An earlier attempt is in doubt, or the commit could not be prepared: what does the log say
    about its name after the error (`conclude`)?

4.  A series of attempts, as its caller sees it (`Tries`): continue after a pause, or end, and how.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import msgspec

from penstock.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    FencedError,
    PenstockError,
    PieceError,
    SequenceError,
    UsageError,
)
from penstock.log.api import Committed, Holder


class ProducerStanding(msgspec.Struct, frozen=True):
    """A producer's epoch, `None` if the log does not know the producer, and its latest commit.

    `committed_epoch` is that of the holder that made the commit; `None` if an older version of
    Penstock did not record it. `is_final` says that no attempt made before this was read can still
    succeed.
    """

    epoch: int | None = None
    committed: Committed | None = None
    committed_epoch: int | None = None
    is_final: bool = False


class NewCommit(msgspec.Struct, frozen=True):
    """The commit is to be made."""


class RepeatedCommit(msgspec.Struct, frozen=True):
    """A commit of this name has happened; this was its outcome."""

    outcome: Committed


class RefusedCommit(msgspec.Struct, frozen=True):
    """The commit has not happened and will not: the error says why."""

    error: Exception


class UncertainCommit(msgspec.Struct, frozen=True):
    """An earlier attempt may have succeeded, and the log cannot tell; the error is the latest."""

    error: Exception


# A commit arrives


def judge(
    standing: ProducerStanding, holder: Holder, sequence: int
) -> NewCommit | RepeatedCommit | RefusedCommit:
    """What to do with a commit of this name, given the producer's standing."""
    fenced = _fence(standing, holder)
    if fenced is not None:
        return RefusedCommit(fenced)
    last = standing.committed
    if last is None or sequence > last.sequence:
        return NewCommit()
    if sequence == last.sequence:
        return _repeat(last)
    return RefusedCommit(
        SequenceError(
            f"producer {holder.producer} has already committed sequence {last.sequence}; "
            f"{sequence} is older and was either committed before or skipped"
        )
    )


def check_stageable(standing: ProducerStanding, holder: Holder, sequence: int) -> None:
    """Raise `FencedError`, or `SequenceError` if the commit to stage for has happened."""
    fenced = _fence(standing, holder)
    if fenced is not None:
        raise fenced
    last = standing.committed
    if last is not None and sequence <= last.sequence:
        raise SequenceError(
            f"producer {holder.producer} has already committed sequence {last.sequence}: "
            f"nothing can be staged for {sequence}"
        )


def _fence(standing: ProducerStanding, holder: Holder) -> FencedError | None:
    """Why the holder may not write; `None` if it may."""
    if standing.epoch is None:
        return FencedError(
            f"producer {holder.producer} is unknown; it may have been forgotten after a long time "
            "without use: open it again"
        )
    if standing.epoch != holder.epoch:
        return FencedError(
            f"producer {holder.producer} was opened again (epoch {standing.epoch}); this holder "
            f"(epoch {holder.epoch}) can no longer write"
        )
    return None


def _repeat(outcome: Committed) -> RepeatedCommit:
    return RepeatedCommit(msgspec.structs.replace(outcome, repeated=True))


# An attempt raised an error


class Fate(Enum):
    """The outcome of a commit that raised an error."""

    REFUSED = "refused"
    """It did not happen: its contents are not valid, and will be refused again."""
    POSTPONED = "postponed"
    """It did not happen, and may succeed later."""
    FAILED = "failed"
    """It did not happen, and retrying does not help."""
    UNKNOWN = "unknown"
    """It may have happened; committing again under the same name settles that."""

    @property
    def may_be_retried(self) -> bool:
        return self in (Fate.POSTPONED, Fate.UNKNOWN)


def fate_of(error: BaseException) -> Fate:
    """The fate of a commit whose latest attempt raised this, if no earlier one is in doubt."""
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


def needs_standing(error: Exception, *, in_doubt: bool) -> bool:
    """Whether the producer's standing may say more about a commit than the error that it raised.

    It may if the error is final and an earlier attempt is in doubt, and if the commit's contents
    were checked first: the pieces or streams of one that has happened may no longer exist.
    """
    fate = fate_of(error)
    is_about_content = fate is Fate.REFUSED or isinstance(error, PieceError)
    return is_about_content or (in_doubt and fate is Fate.FAILED)


def conclude(
    standing: ProducerStanding, holder: Holder, sequence: int, error: Exception, *, in_doubt: bool
) -> RepeatedCommit | RefusedCommit | UncertainCommit:
    """The outcome of a commit that raised `error`, given its producer's standing after that.

    | the producer's latest commit  | in doubt, final | in doubt, not final | not in doubt    |
    |-------------------------------|-----------------|---------------------|-----------------|
    | none, or an older sequence    | refused         | uncertain           | as `judge` says |
    | this sequence, by this holder | repeated        | repeated            | as `judge` says |
    | this sequence, by another     | refused         | refused             | as `judge` says |
    | a later sequence              | uncertain       | uncertain           | as `judge` says |

    A standing that was read after the holder was fenced is final. If it is not recorded who made
    the latest commit, it was this holder, unless this holder was fenced: then it is uncertain.
    """
    if not in_doubt:
        verdict = judge(standing, holder, sequence)
        return RefusedCommit(error) if isinstance(verdict, NewCommit) else verdict
    last = standing.committed
    is_fenced = _fence(standing, holder) is not None
    if last is None or last.sequence < sequence:
        return RefusedCommit(error) if standing.is_final or is_fenced else UncertainCommit(error)
    if last.sequence > sequence:
        return UncertainCommit(error)
    if standing.committed_epoch is None:
        return UncertainCommit(error) if is_fenced else _repeat(last)
    # By another holder under the same name: so the name was free, and ours did not happen.
    return _repeat(last) if standing.committed_epoch == holder.epoch else RefusedCommit(error)


# A series of attempts


class Again(msgspec.Struct, frozen=True):
    """Try again under the same name, after this pause."""

    pause_s: float


class Ending(Enum):
    """How an unsuccessful series of attempts ends."""

    UNKNOWN = "unknown"
    """One of them may have succeeded: raise `CommitOutcomeUnknownError`."""
    OVERDUE = "overdue"
    """None succeeded. Another might, but the time or the number of attempts is used up."""
    FAILED = "failed"
    """None succeeded, and retrying does not help: raise the last error."""


class Tries:
    """The attempts at one commit: after each error, whether to continue, and if not, how it ends.

    `pauses_s` are the waits before each further attempt; there are no more attempts than that. No
    attempt begins at `deadline_s` or later, by the clock of the caller of `after`. With
    `only_unknown`, an attempt that certainly failed is not repeated. Once in doubt, a series stays
    so until the log itself says that nothing had happened (`find_out`).
    """

    def __init__(
        self,
        pauses_s: Iterable[float],
        *,
        deadline_s: float = math.inf,
        only_unknown: bool = False,
        in_doubt: bool = False,
    ) -> None:
        self._pauses = iter(pauses_s)
        self._deadline_s = deadline_s
        self._only_unknown = only_unknown
        self.in_doubt = in_doubt

    def find_out(self) -> None:
        """Note that no earlier attempt has succeeded, nor can any more."""
        self.in_doubt = False

    def after(self, error: Exception, now_s: float) -> Again | Ending:
        """What to do after an attempt that raised `error`."""
        fate = fate_of(error)
        self.in_doubt = self.in_doubt or fate is Fate.UNKNOWN
        if self._is_worth_retrying(fate):
            pause_s = next(self._pauses, None)
            if pause_s is not None and now_s + pause_s < self._deadline_s:
                return Again(pause_s)
        if self.in_doubt:
            return Ending.UNKNOWN
        return Ending.OVERDUE if fate.may_be_retried else Ending.FAILED

    def _is_worth_retrying(self, fate: Fate) -> bool:
        return fate is Fate.UNKNOWN if self._only_unknown else fate.may_be_retried
