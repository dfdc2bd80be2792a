"""One source connection from Penstock's point of view: a state machine without I/O.

Frames go in; effects come out, in the order in which they are to be carried out. Who owns a
stream, and whether messages are durable, is decided outside and reported back.

    Connected --Hello--> Streaming --Eos, Error, Restart--> Closed
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import SENT_AWAY, Close, Send, error

SourceState = Literal["connected", "streaming", "closed"]
ASK_MAX = 256
"""How many streams are requested together."""
EOS_DRIFT = 1
"""Old clients spend no credit on the end of a stream: tolerate this many extra frames each."""


class Ask(msgspec.Struct, frozen=True):
    """Find out whether the connector may have these streams, each by its id and name.

    `granted` or `refused` is the answer, for each of them.
    """

    streams: tuple[tuple[int, str], ...]


class Flush(msgspec.Struct, frozen=True):
    """Make durable what was received so far, and report it with `committed`."""


class Release(msgspec.Struct, frozen=True):
    """The connector gave this stream back."""

    stream_id: int


SourceEffect = Send | Ask | Flush | Release | Close


class Intake:
    """A stream that is open on this connection, and its messages that are not durable yet."""

    def __init__(self, stream_id: int, name: str, point_of_ref: int) -> None:
        self.stream_id = stream_id
        self.name = name
        self.point_of_ref = point_of_ref
        """The last message that the log has."""
        self.received = point_of_ref
        self.messages: list[wire.Message] = []
        self.dropped = 0

    def take(self, message: wire.Message) -> str | None:
        """Keep a message; return what is wrong with it, if anything."""
        number = message.message_id
        if self.received != wire.NEVER and number <= self.received:
            if self.point_of_ref != wire.NEVER and number <= self.point_of_ref:
                self.dropped += 1
                return None
            return f"message {number} of stream {self.name} was sent after message {self.received}"
        if number == wire.NEVER:
            return f"{number} is not a valid message number"
        self.received = number
        self.messages.append(message)
        return None

    def take_all(self) -> list[wire.Message]:
        """Remove and return the waiting messages, which are to be committed now."""
        found, self.messages = self.messages, []
        return found

    def take_dropped(self) -> int:
        """How many repeated messages were dropped since the last call."""
        found, self.dropped = self.dropped, 0
        return found


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a listener requires of connectors, and grants them.

    `credits` is how many frames a connector may send ahead; `streams_max` is how many streams
    one connection may have.
    """

    cookie: str = ""
    credits: int = 32_768
    streams_max: int = 10_000


class SourceSession:
    """The connection's state. Not thread-safe."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.state: SourceState = "connected"
        self.program = ""
        self.instance = ""
        self.intakes: dict[int, Intake] = {}
        self.credits = 0
        """How many frames the connector may still send."""
        self._used = 0
        self._drift = 0
        self._asked: dict[int, str] = {}
        self._new: dict[int, str] = {}
        """Those of them for which no `Ask` was issued yet."""
        self._waiting: dict[int, Intake] = {}
        """The streams with messages that are not durable yet."""

    def receive(self, frames: Iterable[wire.Frame]) -> Iterator[SourceEffect]:
        """The effects of frames; none after a `Close`.

        Each effect must be carried out, and its answer given, before the next is requested.
        """
        for frame in frames:
            if self.state == "closed":
                return
            if self._new and not (isinstance(frame, wire.Notify) and len(self._new) < ASK_MAX):
                yield self._ask()
            if type(frame) is wire.Message and self.state == "streaming":
                if wrong := self._message(frame):
                    yield from self.fail(wrong)
            else:
                yield from self._other(frame)
        if self._new:
            yield self._ask()
        yield Flush()

    def _ask(self) -> Ask:
        """One `Ask` for all streams that the connector requests in a row."""
        asked, self._new = Ask(tuple(self._new.items())), {}
        return asked

    def waiting(self) -> list[Intake]:
        """The streams with messages that are to be made durable now."""
        found, self._waiting = self._waiting.values(), {}
        return [intake for intake in found if intake.messages]

    def _other(self, frame: wire.Frame) -> list[SourceEffect]:
        if isinstance(frame, wire.Hello):
            return self._hello(frame)
        if self.state != "streaming":
            return self.fail(f"{type(frame).__name__} was sent before Hello")
        match frame:
            case wire.Notify():
                return self._notify(frame)
            case wire.Eos():
                return self._eos(frame)
            case wire.Error(message=message):
                return [Flush(), self._close(f"the connector reports: {message}")]
        return self.fail(f"a connector cannot send {type(frame).__name__}")

    # Frames

    def _hello(self, frame: wire.Hello) -> list[SourceEffect]:
        if self.state != "connected":
            return self.fail("Hello was sent twice on one connection")
        if frame.version not in wire.VERSIONS:
            known = " and ".join(wire.VERSIONS)
            return self.fail(f"unknown protocol version {frame.version!r}; supported: {known}")
        if not hmac.compare_digest(frame.cookie.encode(), self._terms.cookie.encode()):
            return self.fail("wrong cookie")
        self.state = "streaming"
        self.program, self.instance = frame.program, frame.instance
        self.credits = self._terms.credits
        return [Send(wire.Ok(self.credits))]

    def _notify(self, frame: wire.Notify) -> list[SourceEffect]:
        if wrong := self._charge():
            return self.fail(wrong)
        if frame.stream_id in self.intakes or frame.stream_id in self._asked:
            return self.fail(f"stream {frame.name} was requested twice")
        if len(self.intakes) + len(self._asked) >= self._terms.streams_max:
            return self.fail(f"a connection can have at most {self._terms.streams_max} streams")
        self._asked[frame.stream_id] = self._new[frame.stream_id] = frame.name
        return []

    def _message(self, frame: wire.Message) -> str | None:
        """What is wrong with a message, if anything."""
        if wrong := self._charge():
            return wrong
        intake = self.intakes.get(frame.stream_id)
        if intake is None:
            return f"a message was sent for stream {frame.stream_id}, which is not open"
        self._waiting[frame.stream_id] = intake
        return intake.take(frame)

    def _eos(self, frame: wire.Eos) -> list[SourceEffect]:
        self._drift += EOS_DRIFT
        if wrong := self._charge():
            return self.fail(wrong)
        if frame.stream_id not in self.intakes:
            return self.fail(f"EOS was sent for stream {frame.stream_id}, which is not open")
        return [Flush(), Release(frame.stream_id)]

    def _charge(self) -> str | None:
        self.credits -= 1
        self._used += 1
        if self.credits < -self._drift:
            return "more frames were sent than the credits allow"
        return None

    # What is decided outside

    def grant(self, stream_id: int, point_of_ref: int) -> list[SourceEffect]:
        """Grant the stream, starting after this point of reference."""
        intake = Intake(stream_id, self._asked.pop(stream_id), point_of_ref)
        self.intakes[stream_id] = intake
        return [Send(wire.NotifyAck(True, stream_id, point_of_ref))]

    def refuse(self, stream_id: int, point_of_ref: int) -> list[SourceEffect]:
        """Refuse the stream, which another connector has."""
        self._asked.pop(stream_id)
        return [Send(wire.NotifyAck(False, stream_id, point_of_ref))]

    def finish_commit(self, points: Sequence[tuple[int, int]]) -> list[SourceEffect]:
        """Acknowledge that streams are durable up to these messages, and grant credits again."""
        for stream_id, point in points:
            self.intakes[stream_id].point_of_ref = point
        if not points and self.credits > self._terms.credits // 2:
            return []  # it can wait
        granted, self._used = self._used, 0
        if not points and not granted:
            return []
        self.credits += granted
        return [Send(wire.Ack(granted, tuple(points)))]

    def release(self, stream_id: int) -> None:
        del self.intakes[stream_id]

    def restart(self, address: str = "") -> list[SourceEffect]:
        """Tell the connector to reconnect and request its streams again."""
        self.state = "closed"
        return [Send(wire.Restart(address)), Close(SENT_AWAY)]

    def fail(self, reason: str) -> list[SourceEffect]:
        """End the connection, reporting the reason; what was received before is made durable."""
        is_open = self.state == "streaming"
        self.state = "closed"
        return [*([Flush()] if is_open else []), error(reason), Close(reason)]

    def _close(self, reason: str) -> Close:
        self.state = "closed"
        return Close(reason)
