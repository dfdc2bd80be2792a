"""Positions in a worker's messages, as a sink counts them."""

from __future__ import annotations

from typing import NamedTuple, Self

from penstock.connect.protocol import wire

APPLIED = 0
STAGED = wire.NEVER
"""The ids under which an ACK gives the number of messages that are applied, and staged.

No stream of messages has these ids, so a sink that does not count messages never sends them.
"""


class Mark(NamedTuple):
    """A position between two messages of a worker's stream: the bytes and messages before it.

    The protocol counts bytes. Messages are counted too, because one without data adds no bytes.
    Marks compare in the order of the stream; the first one is `Mark()`.
    """

    offset: int = 0
    messages: int = 0

    def __str__(self) -> str:
        return f"{self.offset}.{self.messages}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a mark written with `str`. One without a count is from an earlier version."""
        offset, _, messages = text.partition(".")
        return cls(int(offset), int(messages or 0))

    def advance(self, data: bytes) -> Mark:
        """The mark after a message with this data."""
        return Mark(self.offset + len(data), self.messages + 1)


def encode_progress(stream: int, applied: Mark, staged: Mark) -> tuple[tuple[int, int], ...]:
    """The contents of an ACK for a stream: the bytes applied, and both counts of messages."""
    return (stream, applied.offset), (APPLIED, applied.messages), (STAGED, staged.messages)
