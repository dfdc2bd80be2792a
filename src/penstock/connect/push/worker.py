"""A worker's connection to a sink, from Penstock's side: sends messages, requests the vote, sends
the outcome. Blocking; every wait has a limit.

It does not wait for credits: original sinks grant some once and never again. TCP's own
back-pressure limits what is in transit.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import xxhash

from penstock.connect.addresses import check_address, resolve_address
from penstock.connect.hosts.refusals import parse_refusal
from penstock.connect.hosts.sockets import set_up
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import PASSING
from penstock.connect.protocol.marks import APPLIED, STAGED, Mark
from penstock.connect.push.books import SinkProgress
from penstock.errors import ConnectorError, ProtocolError, RowsRefusedError, SinkGoneError

STREAM = 1
SEND_BYTES = 1 << 18
LAST_WORDS_S = 1.0
F = TypeVar("F")
EncodedRow = tuple[bytes | None, int, bytes]
"""Key, event time and data of a message."""


class DialOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to connect to a sink. `timeout_s` is how long an answer may take."""

    cookie: str = ""
    timeout_s: float = 60.0
    frame_bytes_max: int = wire.FRAME_BYTES_MAX


class SinkWorker:
    """One worker, connected for the duration of its block.

    `attempt` consists of numbers compared from left to right: a larger one takes over from a
    connection of the same worker that is still open. Raises `SinkGoneError` if retrying may help,
    and `ConnectorError` if the sink refuses.
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
        self._rtag = 0
        self.committed = 0
        """Up to where the sink has this worker's bytes, as last reported."""
        self.uncommitted: tuple[str, ...] = ()
        """Transactions that the sink has voted for without knowing the outcome."""
        self.applied: Mark | None = None
        """How far the target has them, as last reported; original sinks never report this."""
        self.staged_messages = 0
        self.sent = 0
        self._digest = xxhash.xxh3_64()
        self.refusal: ConnectorError | None = None
        """Why the sink voted against the last transaction, if it gave a reason."""

    def __enter__(self) -> Self:
        self._translate(self._open)
        return self

    def _open(self) -> None:
        options = self._options
        self._socket = socket.create_connection(resolve_address(self._where), options.timeout_s)
        try:
            set_up(self._socket)
            self._socket.settimeout(options.timeout_s)
            who = wire.Hello(
                wire.SINK_VERSION, options.cookie, f"penstock attempt={self._attempt}", self.worker
            )
            self._send(wire.encode(who))
            self._send(wire.encode(wire.Notify(STREAM, self.worker, 0)))
            self._ask_uncommitted()
            self._wait_for(wire.Ok)
            answer = self._wait_for(wire.NotifyAck)
            if not answer.success:
                raise ConnectorError(f"the sink at {self._where} refuses worker {self.worker}")
            self.sent = self.committed = answer.point_of_ref
            self.uncommitted = self._wait_uncommitted()
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

    @property
    def progress(self) -> SinkProgress | None:
        """How far the sink is, as last reported; `None` if it does not count messages."""
        if self.applied is None:
            return None
        return SinkProgress(self.applied, Mark(self.committed, self.staged_messages))

    @property
    def digest(self) -> str:
        """A digest of everything that was sent."""
        return self._digest.hexdigest()

    def send(self, messages: Sequence[EncodedRow]) -> None:
        """Send messages: key, event time and data of each."""
        self._translate(lambda: self._send_all(messages, 0))

    def send_from(self, messages: Sequence[EncodedRow], skip: int) -> None:
        """Send messages again, except the first `skip`, which count as sent."""
        self._translate(lambda: self._send_all(messages, skip))

    def _send_all(self, messages: Sequence[EncodedRow], skip: int) -> None:
        chunks: list[bytes] = []
        size = 0
        for number, (key, time_ns, data) in enumerate(messages):
            frame = wire.encode_message(wire.Message(STREAM, self.sent, time_ns, key, data))
            self.sent += len(data)
            if number < skip:
                self._digest.update(frame)
                continue
            chunks.append(frame)
            size += len(data)
            if size > SEND_BYTES:
                self._send_chunks(chunks)
                chunks, size = [], 0
        self._send_chunks(chunks)

    def _send_chunks(self, chunks: Sequence[bytes]) -> None:
        data = b"".join(chunks)
        self._digest.update(data)
        self._take_in()
        self._send(data)

    def _take_in(self) -> None:
        """Read what the sink has sent meanwhile: it would block if nobody did."""
        while select.select([self._socket], [], [], 0)[0]:
            data = self._socket.recv(SEND_BYTES)
            if not data:
                raise self._lose("it closed the connection")
            self._frames += self._parser.feed(data)
            self._frames = [frame for frame in self._frames if not self._note(frame)]

    def vote(self, transaction: str, start: int) -> bool:
        """Ask the sink to make everything sent since `start` durable; return whether it did.

        If not, `refusal` is the reason: sinks of Penstock send it after their vote.
        """

        def ask() -> bool:
            stretch = (STREAM, start, self.sent)
            self._send(wire.encode_two_phase(wire.Phase1(transaction, (stretch,))))
            while True:
                reply = self._wait_for(wire.Reply)
                if reply.transaction == transaction:
                    return reply.commit

        has_voted = self._translate(ask)
        if not has_voted:
            self.refusal = self._last_words()
        return has_voted

    def resolve(self, transaction: str, commit: bool) -> None:
        """Send the outcome; returns when the sink has it."""

        def tell() -> None:
            self._send(wire.encode_two_phase(wire.Phase2(transaction, commit)))
            self._ask_where_it_is()
            if transaction in self.uncommitted:
                raise SinkGoneError(f"the sink at {self._where} has not resolved {transaction}")

        self._translate(tell)
        self._digest = xxhash.xxh3_64()

    def ask(self) -> SinkProgress | None:
        """How far the sink is now."""
        self._translate(self._ask_where_it_is)
        return self.progress

    def _ask_where_it_is(self) -> None:
        self._send(wire.encode(wire.Notify(STREAM, self.worker, 0)))
        self._ask_uncommitted()
        self.committed = self._wait_for(wire.NotifyAck).point_of_ref
        self.uncommitted = (
            self._wait_uncommitted()
        )  # the ACK with the applied position comes before it

    # Inside

    def _ask_uncommitted(self) -> None:
        self._rtag += 1
        self._send(wire.encode_two_phase(wire.ListUncommitted(self._rtag)))

    def _wait_uncommitted(self) -> tuple[str, ...]:
        while True:
            reply = self._wait_for(wire.ReplyUncommitted)
            if reply.rtag == self._rtag:
                return reply.transactions

    def _send(self, data: bytes) -> None:
        if data:
            self._socket.sendall(data)

    def _wait_for(self, kind: type[F]) -> F:
        """The next frame or message of that kind; ACKs on the way are noted."""
        deadline = time.monotonic() + self._options.timeout_s
        while True:
            while self._frames:
                frame: object = self._frames.pop(0)
                if isinstance(frame, wire.Message):
                    frame = wire.two_phase(frame)
                self._note(frame)
                if isinstance(frame, wire.Error):
                    raise self._refuse(frame)
                if isinstance(frame, kind):
                    return frame
            if time.monotonic() > deadline:
                raise self._lose(f"no {kind.__name__} was received in time")
            data = self._socket.recv(SEND_BYTES)
            if not data:
                raise self._lose("it closed the connection")
            self._frames += self._parser.feed(data)

    def _note(self, frame: object) -> bool:
        """Note what an ACK says about the target; return whether the frame was an ACK."""
        if not isinstance(frame, wire.Ack):
            return False
        said = dict(frame.points)
        if APPLIED in said and STREAM in said:
            self.applied = Mark(said[STREAM], said[APPLIED])
            self.staged_messages = said.get(STAGED, said[APPLIED])
        return True

    def _translate(self, work: Callable[[], F]) -> F:
        """Turn whatever ends the connection into an error that names the sink and its reason."""
        try:
            return work()
        except (OSError, ProtocolError) as error:
            raise self._last_words() or self._lose(str(error)) from error

    def _last_words(self) -> ConnectorError | None:
        """The reason of a sink that refused: it may have closed while we were still sending."""
        is_said = any(isinstance(frame, wire.Error) for frame in self._frames)
        with contextlib.suppress(OSError, ProtocolError, AttributeError):
            self._socket.settimeout(LAST_WORDS_S)
            try:
                self._frames += [] if is_said else self._parser.feed(self._socket.recv(SEND_BYTES))
            finally:
                self._socket.settimeout(self._options.timeout_s)
        said = [frame for frame in self._frames if isinstance(frame, wire.Error)]
        self._frames = [frame for frame in self._frames if not isinstance(frame, wire.Error)]
        return self._refuse(said[0]) if said else None

    def _refuse(self, told: wire.Error) -> ConnectorError:
        text, refusals = parse_refusal(told.message)
        reason = f"the sink at {self._where} reports: {text}"
        if text.startswith(PASSING):
            return SinkGoneError(reason)
        return RowsRefusedError(reason, refusals) if refusals else ConnectorError(reason)

    def _lose(self, why: str) -> SinkGoneError:
        return SinkGoneError(
            f"worker {self.worker} lost its connection to the sink at {self._where}: {why}"
        )
