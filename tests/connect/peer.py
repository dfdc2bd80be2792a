"""A peer of the connector protocol that sends whatever a test likes."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from penstock.connect.protocol import wire


class Peer:
    """A raw connection: frames out, frames in, nothing checked."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._parser = wire.Parser()
        self._frames: list[wire.Frame] = []

    def __enter__(self) -> Self:
        self.socket = socket.create_connection(self._address, 10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, *frames: wire.Frame) -> None:
        self.socket.sendall(b"".join(wire.encode(frame) for frame in frames))

    def tell(self, *messages: wire.TwoPhase) -> None:
        self.socket.sendall(b"".join(wire.encode_two_phase(message) for message in messages))

    def next(self) -> wire.Frame | None:
        """The next frame; `None` once the other side has closed."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._frames += self._parser.feed(data)
        return self._frames.pop(0)

    def hello(
        self, cookie: str = "", version: str = wire.SOURCE_VERSION, instance: str = "i"
    ) -> wire.Frame | None:
        self.send(wire.Hello(version, cookie, "test", instance))
        return self.next()

    def notify(self, name: str) -> wire.Frame | None:
        self.send(wire.Notify(wire.stream_id(name), name, 0))
        return self.next()


def message(name: str, number: int, data: bytes = b"{}", key: bytes | None = None) -> wire.Message:
    return wire.Message(wire.stream_id(name), number, 0, key, data)
