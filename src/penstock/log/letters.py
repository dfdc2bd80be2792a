"""Dead letters: what could not be handled, kept with the reason in a stream of its own."""

from __future__ import annotations

from penstock.records.schema import Record

DEAD_CHARS_MAX = 100_000
"""How much of an event's data a dead letter tells."""


class DeadLetter(Record):
    """An event that an agent could not handle, or that could not be read, with why.

    Of one that could not be read, `agent` and `id` are empty, and `data` is what is there. Of a
    connector's message that the stream cannot hold, `id` is the one it would have had, and
    `offset` its number. Of a timer, `stream` is empty, and `data` says when it was due.
    """

    agent: str
    stream: str
    partition: int
    offset: int
    id: str
    key: str | None
    data: str
    error: str
    traceback: str
    tries: int


def dead_name(stream: str) -> str:
    """The stream in which the dead letters of another are."""
    return f"{stream}_dead"


def readable(data: bytes | None) -> str:
    """Bytes as text that anybody can read, not too much of it."""
    return (data or b"")[:DEAD_CHARS_MAX].decode(errors="backslashreplace")
