"""Effects and reasons that the state machines of sources and sinks share."""

from __future__ import annotations

import msgspec

from penstock.connect.protocol import wire

PASSING = "try again later: "
"""Prefix of a reason for refusing that may be temporary."""

CLOSED = "it closed the connection"
SENT_AWAY = "it was told to reconnect"


class Send(msgspec.Struct, frozen=True):
    """Send this to the other side."""

    frame: wire.Frame


class Close(msgspec.Struct, frozen=True):
    """Close the connection, which releases everything it has."""

    reason: str


def error(reason: str) -> Send:
    """An ERROR with this reason, truncated if it is too long for a frame."""
    told = reason.encode()[: wire.TEXT_BYTES_MAX].decode(errors="ignore")
    return Send(wire.Error(told))


def plain(reason: str) -> str:
    """A reason for people: its first line, without the prefix for temporary reasons."""
    return reason.removeprefix(PASSING).partition("\n")[0]
