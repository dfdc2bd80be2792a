"""Numbers for messages that have none of their own.

All the log knows about a connector stream is the number of the last message that it has. If two
programs counted on from there, one could mistake the other's messages for its own, and believe
messages safe that were never stored. So each program starts at a random number, far from others.
"""

from __future__ import annotations

import secrets

COUNTED_HERE = 1 << 62
"""Numbers from here on are assigned by connectors; those of programs are smaller."""
LEAP = 1 << 38
"""Large enough that two programs do not collide; small enough for millions in one stream."""


class OwnNumbers:
    """The numbers that one program assigns to the messages of a stream."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._first = self._next = 0
        """The assigned numbers are those from the first up to, but excluding, the next."""
        self._has_begun = False

    def resume(self, point_of_ref: int | None) -> bool:
        """Continue after this message, up to which the log has the stream.

        Returns false if another program has written to it since, so that it is not known which of
        our messages were stored: numbering then starts over.
        """
        is_ours = point_of_ref is not None and self._first <= point_of_ref < self._next
        if self._has_begun and (is_ours or point_of_ref == self._before):
            return True
        is_beginning, self._has_begun = not self._has_begun, True
        self._before = point_of_ref
        behind = 0 if point_of_ref is None else point_of_ref + 1
        self._first = self._next = max(behind, COUNTED_HERE) + secrets.randbelow(LEAP)
        return is_beginning

    def take(self) -> int:
        """The number of the next message."""
        self._next += 1
        return self._next - 1


def explain_overtaking(name: str, sent: int) -> str:
    """The report of a source that never repeats messages, if another program has intervened."""
    return (
        f"another program has written to {name} in the meantime: {sent:,} messages that were in "
        "transit may be lost"
    )
