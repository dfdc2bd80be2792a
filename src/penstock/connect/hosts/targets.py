"""What the author of a sink implements: how messages get into a target, and how far they are.

    class Lines(SinkTarget):
        def applied(self) -> Mark: ...                     # the target's position
        def apply(self, messages, after, mark) -> None: ... # add messages, move the mark

docs/connectors.md has a working example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.connect.protocol.marks import Mark
from penstock.errors import MarkMovedError, PenstockError

PAGE_BYTES = 4 << 20
ABOUT_DATA = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    RecursionError, NotImplementedError, msgspec.MsgspecError,
)  # fmt: skip


class SinkMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message as a target gets it. `time_ns` is since 1970; 0 if the sender gave no time."""

    key: bytes | None
    time_ns: int
    data: bytes


class SinkTarget:
    """One worker's access to a target. Its methods are called by one thread at a time, except that
    `check` may be called while another method is running.

    The host stages messages on its own disk, and votes for them there. Once a transaction is
    committed, `apply` adds its messages to the target and moves the mark, from `after` only.

    One of Python's own errors about data (`ValueError`, `TypeError`, …), or a `PenstockError` that
    is not `retriable`, means that the target will never accept the message: if `check` raises it,
    the host votes against the message; if `apply` does, it is tried a few times and then set
    aside. A `UsageError` means that nobody can use the target as it is: the host gives up. After
    any other error the call is retried for as long as it takes.
    """

    page_bytes: int | None = PAGE_BYTES
    """How much of a transaction is passed to `apply` at once. With `None` all of it is, as an
    iterator: if the target has transactions, its readers then see all of it or nothing."""

    def applied(self) -> Mark:
        """Up to where the target has this worker's messages; `Mark()` if it has none.

        Called first, and after an `apply` whose outcome is unknown.
        """
        raise NotImplementedError

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        """Add the messages and move the mark from `after` forward to `mark`, durably, as one step.

        Raises `MarkMovedError` if the target's mark is not `after`, and then changes nothing:
        another host, or this one before it was interrupted, has moved it. There may be no
        messages: then only the mark moves.
        """
        raise NotImplementedError

    def check(self, messages: Sequence[SinkMessage]) -> None:
        """Raise if one of these can never be applied. Changes nothing, and needs no server."""

    def close(self) -> None:
        """Release all resources; `applied` may be called again later."""


TargetMaker = Callable[[str], SinkTarget]
"""Makes the target of a worker, by the worker's name."""


def check_mark(found: Mark, after: Mark) -> None:
    """Raise `MarkMovedError` unless the target's mark is the one that the host expects."""
    if found != after:
        raise MarkMovedError(f"the target is at {found}, but the host expected {after}")


def is_passing(error: Exception) -> bool:
    """Whether the same call may succeed later; assumed of errors that are not known here.

    An error that a target's own code raises about a message will be raised again.
    """
    if isinstance(error, PenstockError):
        return error.retriable
    return not isinstance(error, ABOUT_DATA)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
