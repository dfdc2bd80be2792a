"""Numbers for messages that have none of their own.

The log knows of a connector stream only the number of the last message that it has. If two
programs counted on from there, one could take the other's messages for its own: it would believe
safe what nobody has stored. So each program begins at a place of its own, far away by chance.
"""

from __future__ import annotations

import secrets

COUNTED_HERE = 1 << 62
"""Numbers from here on were given by connectors; authors of programs have smaller ones."""
LEAP = 1 << 38
"""So far apart that two programs do not meet, and so near that a stream has room for millions."""


class OwnNumbers:
    """The numbers that one program gives to the messages of a stream."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._first = self._next = 0
        """Those that were given are from the first up to before the next."""
        self._has_begun = False

    def resume(self, point_of_ref: int | None) -> bool:
        """The log has the stream up to this message.

        False if another program has written to it since, so that it is not known what of ours is
        there: numbers then begin anew.
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


def overtaken(name: str, sent: int) -> str:
    """What a source tells that sends nothing twice, when another program was in between."""
    return (
        f"another program has written to {name} since: {sent:,} messages that were on their way "
        "may be lost"
    )
