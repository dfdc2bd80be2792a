"""One connection from a source connector's point of view: a state machine without I/O.

Notify--> asked --NotifyAck--> open | refused
open --Eos--> ended
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from penstock.connect.protocol import wire

StreamState = Literal["asked", "open", "refused", "ended"]


class Opened(msgspec.Struct, frozen=True):
    """The stream was granted; `point_of_ref` is the last safe message, `None` if none is."""

    name: str
    point_of_ref: int | None


class Refused(msgspec.Struct, frozen=True):
    """Another connector has the stream."""

    name: str


class Progressed(msgspec.Struct, frozen=True):
    """The stream is safe up to and including this message."""

    name: str
    point_of_ref: int


class Restarted(msgspec.Struct, frozen=True):
    """Reconnect: to another address, or to the same one if it is empty."""

    address: str


class Failed(msgspec.Struct, frozen=True):
    """The listener refuses to continue."""

    reason: str


News = Opened | Refused | Progressed | Restarted | Failed


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """Who a connector says it is."""

    program: str
    instance: str
    cookie: str = ""


class ClientSession:
    """The state of one connection. Not thread-safe."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting
        self.is_streaming = False
        self.credits = 0
        self.states: dict[str, StreamState] = {}
        self.asked: set[str] = set()
        """The streams that were requested but not answered yet."""
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def hello(self) -> wire.Hello:
        """What to send first."""
        who = self._greeting
        return wire.Hello(wire.SOURCE_VERSION, who.cookie, who.program, who.instance)

    def ask(self, name: str) -> wire.Notify | None:
        """The frame that requests a stream; `None` if there are no credits for it now."""
        if not self.spend():
            return None
        number = self._numbers[name] = wire.stream_id(name)
        self._names[number] = name
        self.states[name] = "asked"
        self.asked.add(name)
        return wire.Notify(number, name, 0)

    def number(self, name: str) -> int:
        """The id of a stream that was requested."""
        return self._numbers[name]

    def end(self, name: str) -> wire.Eos | None:
        """The frame that gives a stream back; `None` if there are no credits for it now."""
        if not self.spend():
            return None
        self.states[name] = "ended"
        return wire.Eos(self.number(name))

    def spend(self) -> bool:
        """Take a credit for a frame, if there is one."""
        if not self.is_streaming or self.credits <= 0:
            return False
        self.credits -= 1
        return True

    def receive(self, frames: Iterable[wire.Frame]) -> list[News]:
        """The news in frames; everything after a `Failed` or `Restarted` is ignored."""
        news: list[News] = []
        for frame in frames:
            found = self._handle(frame)
            news += found
            if found and isinstance(found[0], Failed | Restarted):
                break
        return news

    def _handle(self, frame: wire.Frame) -> list[News]:
        match frame:
            case wire.Ok(credits=granted) if not self.is_streaming:
                self.is_streaming = True
                self.credits = granted
                return []
            case wire.Error(message=message):
                return [Failed(message)]
            case wire.Restart(address=address):
                return [Restarted(address)]
            case wire.NotifyAck() if self.is_streaming:
                return self._handle_answer(frame)
            case wire.Ack(credits=granted, points=points) if self.is_streaming:
                self.credits += granted
                known = [(self._names.get(number), point) for number, point in points]
                return [Progressed(name, point) for name, point in known if name is not None]
        return [Failed(f"the listener sent {type(frame).__name__}, which only connectors may send")]

    def _handle_answer(self, frame: wire.NotifyAck) -> list[News]:
        name = self._names.get(frame.stream_id)
        if name is None or self.states.get(name) != "asked":
            return [
                Failed(
                    f"the listener answered for stream {frame.stream_id}, which was not requested"
                )
            ]
        self.asked.discard(name)
        if not frame.success:
            self.states[name] = "refused"
            return [Refused(name)]
        self.states[name] = "open"
        return [Opened(name, None if frame.point_of_ref == wire.NEVER else frame.point_of_ref)]
