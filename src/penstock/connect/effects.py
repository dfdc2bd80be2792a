"""What the state machines of both sides ask for alike."""

from __future__ import annotations

import msgspec

from penstock.connect import wire

PASSING = "try again later: "
"""How the reason of a refusal begins that may not hold for long."""

CLOSED = "it closed the connection"
SENT_AWAY = "it was told to come again"


class Send(msgspec.Struct, frozen=True):
    """Send this to the other side."""

    frame: wire.Frame


class Close(msgspec.Struct, frozen=True):
    """Close the connection; everything it has is free then."""

    reason: str


def error(reason: str) -> Send:
    """Tell why; cut where it is too long for a frame."""
    told = reason.encode()[: wire.TEXT_BYTES_MAX].decode(errors="ignore")
    return Send(wire.Error(told))


def plain(reason: str) -> str:
    """The reason of a refusal, without the mark that it may not hold for long."""
    return reason.removeprefix(PASSING)
