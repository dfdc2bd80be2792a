"""A worker's connection to a sink, as Penstock makes it: sends, asks for the vote, tells the
outcome. Blocking; every wait has a limit.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from penstock.connect import wire
from penstock.connect.addresses import check_address, resolved
from penstock.connect.effects import PASSING
from penstock.connect.sockets import set_up
from penstock.errors import ConnectorError, ProtocolError, SinkGoneError

STREAM = 1
SEND_BYTES = 1 << 18
LAST_WORDS_S = 1.0
F = TypeVar("F")


class DialOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink is dialled. `timeout_s` is how long an answer may take."""

    cookie: str = ""
    timeout_s: float = 60.0
    frame_bytes_max: int = wire.FRAME_BYTES_MAX


class SinkWorker:
    """One worker, connected while its block lasts.

    `attempt` are numbers that compare from left to right: a larger one takes over from a
    connection of the same worker that is still open. Raises `SinkGoneError` where trying again
    may help, and `ConnectorError` where the sink refuses.
    """

    def __init__(
        self,
        address: str,
        worker: str,
        attempt: Sequence[int],
        options: DialOptions = DialOptions(),
    ) -> None:
        check_address(address)
        self._where = address
        self.worker = worker
        self._attempt = ".".join(map(str, attempt))
        self._options = options
        self._parser = wire.Parser(options.frame_bytes_max)
        self._frames: list[wire.Frame] = []
        self._credits = 0
        self._rtag = 0
        self.committed = 0
        """Up to where the sink has this worker's bytes, as it last said."""
        self.uncommitted: tuple[str, ...] = ()
        """Transactions that the sink has voted for and not heard the outcome of."""
        self.sent = 0
        self.refusal: ConnectorError | None = None
        """Why the sink has voted against the last transaction, if it said."""

    def __enter__(self) -> Self:
        self._told(self._open)
        return self

    def _open(self) -> None:
        options = self._options
        self._socket = socket.create_connection(resolved(self._where), options.timeout_s)
        try:
            set_up(self._socket)
            self._socket.settimeout(options.timeout_s)
            who = wire.Hello(
                wire.SINK_VERSION, options.cookie, f"penstock attempt={self._attempt}", self.worker
            )
            self._send(wire.encode(who))
            self._send(wire.encode(wire.Notify(STREAM, self.worker, 0)))
            self._ask_uncommitted()
            self._credits += self._wait_for(wire.Ok).credits - 2
            answer = self._wait_for(wire.NotifyAck)
            if not answer.success:
                raise ConnectorError(f"the sink at {self._where} refuses worker {self.worker}")
            self.sent = self.committed = answer.point_of_ref
            self.uncommitted = self._uncommitted()
        except BaseException:
            self._socket.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    # Talking

    def send(self, messages: Sequence[tuple[bytes | None, int, bytes]]) -> None:
        """Send messages: key, event time and data of each."""
        self._told(lambda: self._send_all(messages))

    def _send_all(self, messages: Sequence[tuple[bytes | None, int, bytes]]) -> None:
        chunks: list[bytes] = []
        size = 0
        for key, time_ns, data in messages:
            if self._credits <= 0:
                self._send(b"".join(chunks))
                chunks, size = [], 0
                while self._credits <= 0:
                    self._wait_for(wire.Ack)
            self._credits -= 1
            chunks.append(wire.encode_message(wire.Message(STREAM, self.sent, time_ns, key, data)))
            self.sent += len(data)
            size += len(data)
            if size > SEND_BYTES:
                self._send(b"".join(chunks))
                chunks, size = [], 0
        self._send(b"".join(chunks))

    def vote(self, transaction: str, start: int) -> bool:
        """Ask the sink to make everything sent since `start` durable; whether it has.

        If it has not, `refusal` is why: sinks of Penstock say so behind their vote.
        """

        def ask() -> bool:
            stretch = (STREAM, start, self.sent)
            self._send(wire.encode_two_phase(wire.Phase1(transaction, (stretch,))))
            while True:
                reply = self._wait_for(wire.Reply)
                if reply.transaction == transaction:
                    return reply.commit

        has_voted = self._told(ask)
        if not has_voted:
            self.refusal = self._last_words()
        return has_voted

    def resolve(self, transaction: str, commit: bool) -> None:
        """Tell the outcome; returns when the sink has it."""

        def tell() -> None:
            self._send(wire.encode_two_phase(wire.Phase2(transaction, commit)))
            self._ask_uncommitted()
            self._send(wire.encode(wire.Notify(STREAM, self.worker, 0)))
            self.uncommitted = self._uncommitted()
            self.committed = self._wait_for(wire.NotifyAck).point_of_ref
            if transaction in self.uncommitted:
                raise SinkGoneError(f"the sink at {self._where} has not resolved {transaction}")

        self._told(tell)

    # Inside

    def _ask_uncommitted(self) -> None:
        self._rtag += 1
        self._send(wire.encode_two_phase(wire.ListUncommitted(self._rtag)))

    def _uncommitted(self) -> tuple[str, ...]:
        while True:
            reply = self._wait_for(wire.ReplyUncommitted)
            if reply.rtag == self._rtag:
                return reply.transactions

    def _send(self, data: bytes) -> None:
        if data:
            self._socket.sendall(data)

    def _wait_for(self, kind: type[F]) -> F:
        """The next frame or message of that kind; credits are taken on the way."""
        deadline = time.monotonic() + self._options.timeout_s
        while True:
            while self._frames:
                frame: object = self._frames.pop(0)
                if isinstance(frame, wire.Message):
                    frame = wire.two_phase(frame)
                if isinstance(frame, wire.Ack):
                    self._credits += frame.credits
                if isinstance(frame, wire.Error):
                    raise self._refused(frame)
                if isinstance(frame, kind):
                    return frame
            if time.monotonic() > deadline:
                raise self._gone(f"no {kind.__name__} came in time")
            data = self._socket.recv(SEND_BYTES)
            if not data:
                raise self._gone("it closed the connection")
            self._frames += self._parser.feed(data)

    def _told(self, work: Callable[[], F]) -> F:
        try:
            return work()
        except (OSError, ProtocolError) as error:
            raise self._last_words() or self._gone(str(error)) from error

    def _last_words(self) -> ConnectorError | None:
        """What a sink says that refuses: it may have closed while we were still sending."""
        is_said = any(isinstance(frame, wire.Error) for frame in self._frames)
        with contextlib.suppress(OSError, ProtocolError, AttributeError):
            self._socket.settimeout(LAST_WORDS_S)
            try:
                self._frames += [] if is_said else self._parser.feed(self._socket.recv(SEND_BYTES))
            finally:
                self._socket.settimeout(self._options.timeout_s)
        said = [frame for frame in self._frames if isinstance(frame, wire.Error)]
        self._frames = [frame for frame in self._frames if not isinstance(frame, wire.Error)]
        return self._refused(said[0]) if said else None

    def _refused(self, told: wire.Error) -> ConnectorError:
        kind = SinkGoneError if told.message.startswith(PASSING) else ConnectorError
        return kind(f"the sink at {self._where} says: {told.message}")

    def _gone(self, why: str) -> SinkGoneError:
        return SinkGoneError(f"worker {self.worker} lost the sink at {self._where}: {why}")
