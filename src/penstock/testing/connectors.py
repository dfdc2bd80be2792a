"""Penstock's side of a connection, step by step, for the tests of a connector."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol import wire
from penstock.connect.push.books import SinkProgress
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.errors import SinkGoneError
from penstock.testing.processes import wait_until

TIMEOUT_S = 60.0
TICK_S = 0.1


class SinkPeer:
    """Acts as a worker of Penstock towards the sink at `address`.

    It remembers what it has decided. Each time it connects, it tells the sink the outcomes of
    transactions that are open there, and sends again what the sink lacks.
    """

    def __init__(self, address: str, worker: str = "worker", timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.worker = worker
        self.decided: list[SinkMessage] = []
        """Every message that it has decided to commit, in order."""
        self._names: set[str] = set()
        self._options = DialOptions(timeout_s=timeout_s)
        self._attempts = itertools.count(1)
        self._transactions = itertools.count(1)
        self._open: SinkWorker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disconnect()

    def connect(self) -> SinkWorker:
        """Connect unless connected: tell the sink outcomes, and send again what is missing."""
        if self._open is None:
            sink = SinkWorker(self.address, self.worker, (next(self._attempts),), self._options)
            sink.__enter__()
            self._open = sink
            for name in sink.uncommitted:
                sink.resolve(name, name in self._names)
            self._send_again(sink)
        return self._open

    def disconnect(self) -> None:
        """Close the connection without further messages, as if the process had been killed."""
        if self._open is not None:
            sink, self._open = self._open, None
            sink.__exit__(None, None, None)

    def _send_again(self, sink: SinkWorker) -> None:
        progress = sink.progress
        has = len(self.decided) if progress is None else progress.staged.messages
        if missing := self.decided[has:]:
            name = self.vote(missing)
            if name is None:
                raise SinkGoneError("the sink votes against a transaction that was decided")
            sink.resolve(name, True)

    def vote(self, messages: Sequence[SinkMessage]) -> str | None:
        """Send messages and ask for a vote; the transaction's name if the sink votes yes."""
        sink = self.connect()
        sink.sent = sink.committed
        sink.send(_to_rows(messages))
        name = f"{self.worker}/{next(self._transactions)}"
        return name if sink.vote(name, sink.committed) else None

    def decide(self, name: str, messages: Sequence[SinkMessage]) -> None:
        """Decide to commit the transaction, without telling the sink yet."""
        self._names.add(name)
        self.decided += messages

    def tell(self, name: str, commit: bool) -> None:
        """Tell the sink the outcome."""
        self.connect().resolve(name, commit)

    def deliver(self, messages: Sequence[SinkMessage]) -> None:
        """One transaction, from the first message to the outcome.

        Raises `SinkGoneError` if the sink votes against it; `refusal` says why.
        """
        name = self.vote(messages)
        if name is None:
            raise SinkGoneError(f"the sink votes against the transaction: {self.connect().refusal}")
        self.decide(name, messages)
        self.tell(name, True)

    def repeat(self, messages: Sequence[SinkMessage]) -> None:
        """Send messages that the sink already has: it must drop them."""
        sink = self.connect()
        sink.sent = sink.committed - sum(len(message.data) for message in messages)
        sink.send(_to_rows(messages))

    def wait_applied(self) -> SinkProgress | None:
        """Wait until the sink reports that its target has everything; original sinks never do."""
        found: list[SinkProgress | None] = []

        def is_applied() -> bool:
            found.append(self.connect().ask())
            return found[-1] is None or found[-1].applied == found[-1].staged

        wait_until(is_applied, TIMEOUT_S, "the target having everything")
        return found[-1]


class SourceMessage(NamedTuple):
    """A message that a source has sent, with the name of its stream."""

    stream: str
    number: int
    key: bytes | None
    data: bytes


class SourcePeer:
    """Acts as Penstock's listener towards sources, at `address`, for the length of its block.

    It keeps each message once, acknowledges it if `acknowledges`, and tells a source that
    reconnects where to continue. Accepts one connection at a time.
    """

    def __init__(self, credits_given: int = 1000, acknowledges: bool = True) -> None:
        self.acknowledges = acknowledges
        self.messages: list[SourceMessage] = []
        self.connections = 0
        self._credits = credits_given
        self._names: dict[int, str] = {}
        self._points: dict[int, int] = {}
        """The last acknowledged message of each stream."""
        self._received: dict[int, int] = {}
        self._peer: socket.socket | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-source-peer")

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listening.getsockname()[:2])

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(TICK_S)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self.drop()
        self._thread.join()
        self._listening.close()

    def drop(self) -> None:
        """Close the connection: unacknowledged messages are discarded and must be sent again."""
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: self._peer is not peer, TIMEOUT_S, "the end of the connection")

    def restart(self) -> None:
        """Tell the source to connect again."""
        if self._peer is not None:
            with contextlib.suppress(OSError):  # it is already gone
                self._peer.sendall(wire.encode(wire.Restart("")))

    def wait(self, count: int, timeout_s: float = TIMEOUT_S) -> list[SourceMessage]:
        """Wait until there are `count` messages, and return them."""
        wait_until(lambda: len(self.messages) >= count, timeout_s, f"{count} messages")
        return list(self.messages)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                peer, _ = self._listening.accept()
                self.connections += 1
                self._peer = peer
                with contextlib.suppress(OSError), peer:
                    peer.settimeout(TICK_S)
                    self._talk(peer)
                self._forget()
                self._peer = None

    def _forget(self) -> None:
        """Discard what was not acknowledged."""
        kept = self._points
        ids = {name: stream for stream, name in self._names.items()}
        self.messages = [m for m in self.messages if m.number <= kept.get(ids[m.stream], -1)]
        self._received = {}

    def _talk(self, peer: socket.socket) -> None:
        parser = wire.Parser()
        while not self._stopping.is_set():
            try:
                data = peer.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            taken: dict[int, int] = {}
            frames = list(parser.feed(data))
            for frame in frames:
                self._take(frame, peer.sendall, taken)
            if taken and self.acknowledges:
                self._points.update(taken)
                peer.sendall(wire.encode(wire.Ack(len(frames), tuple(taken.items()))))

    def _take(
        self, frame: wire.Frame, send: Callable[[bytes], None], taken: dict[int, int]
    ) -> None:
        match frame:
            case wire.Hello():
                send(wire.encode(wire.Ok(self._credits)))
            case wire.Notify(stream_id=stream, name=name):
                self._names[stream] = name
                point = self._points.get(stream, wire.NEVER)
                send(wire.encode(wire.NotifyAck(True, stream, point)))
            case wire.Message(stream_id=stream, message_id=number):
                last = max(self._points.get(stream, -1), self._received.get(stream, -1))
                taken[stream] = max(last, number)
                if number > last:
                    self._received[stream] = number
                    name = self._names[stream]
                    self.messages.append(SourceMessage(name, number, frame.key, frame.payload))


def _to_rows(messages: Sequence[SinkMessage]) -> list[tuple[bytes | None, int, bytes]]:
    return [(message.key, message.time_ns, message.data) for message in messages]
