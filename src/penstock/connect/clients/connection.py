"""One connection of a source connector: its socket, and the streams it is working on.

A connector may have thousands of streams. Streams that have data are asked for more immediately;
all others are polled in turn, so that the effort does not grow with their number.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.connect.addresses import check_address
from penstock.connect.clients.origin import End, Item, Source, call_source
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import PASSING
from penstock.connect.protocol.source_client import (
    ClientSession,
    Failed,
    Opened,
    Progressed,
    Refused,
    Restarted,
)
from penstock.errors import ConnectorError, ProtocolError

if TYPE_CHECKING:
    from penstock.connect.clients.source import SourceConnector

SEND_BYTES = 1 << 18
SEND_ROWS = 4096
POLL_S = 0.02
POLL_EACH_S = 20e-6
"""Idle sources are polled again after this long, plus this much for each of them."""
ASK_AGAIN_S = 1.0


class Talk:
    """The conversation on one connection, from its `Hello` on."""

    def __init__(self, connector: SourceConnector, peer: socket.socket) -> None:
        self._connector = connector
        self._options = connector.options
        self._peer = peer
        self._session = ClientSession(connector.greeting)
        self._parser = wire.Parser(self._options.frame_bytes_max)
        self._sent: dict[str, int | None] = {}
        self._unsafe: set[str] = set()
        """Streams with messages that were sent but are not known to be safe."""
        self._to_ask = set(connector.known())
        self._ask_at: dict[str, float] = {}
        """When to ask again for streams that another connector has."""
        self._open: dict[str, Source] = {}
        self._busy: dict[str, None] = {}
        """Open streams that may have more messages right now."""
        self._poll_at = 0.0
        self._alone_since = self._heard_at = time.monotonic()
        self._is_over = False
        self._poll = select.poll()  # select fails if many files are open
        self._poll.register(peer, select.POLLIN)
        self._poll.register(connector.bell, select.POLLIN)

    def run(self) -> None:
        """Run until the connection ends. Raises `ConnectorError` if reconnecting is pointless."""
        self._peer.sendall(wire.encode(self._session.hello()))
        while not self._is_over and not self._connector.stopping.is_set():
            self._hear_sources()
            self._ask()
            has_more = self._send()
            self._end()
            self._listen(0.0 if has_more else max(0.0, self._poll_at - time.monotonic()))
            self._check_answers()
            self._connector.counts.credits = self._session.credits

    def _hear_sources(self) -> None:
        """Note which sources were added, and which report that they have data."""
        added, awake, is_any_awake = self._connector.heard()
        self._to_ask |= added
        self._busy.update(dict.fromkeys(awake & self._open.keys()))
        if is_any_awake:
            self._poll_at = 0.0

    def _check_answers(self) -> None:
        """Raise if the listener's machine still answers, but the listener no longer does."""
        now = time.monotonic()
        if self._session.is_streaming and not self._session.asked and not self._unsafe:
            self._heard_at = now
        elif now > self._heard_at + self._options.answer_timeout_s:
            raise ProtocolError(f"it has not answered for {self._options.answer_timeout_s:g} s")

    def _listen(self, timeout_s: float) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1000)}
        if self._connector.bell.fileno() in ready:
            self._connector.bell.recv(4096)
        if self._peer.fileno() not in ready:
            return
        data = self._peer.recv(SEND_BYTES)
        self._heard_at = time.monotonic()
        if not data:
            self._is_over = True
        for news in self._session.receive(self._parser.feed(data)):
            self._take(news)

    def _take(self, news: object) -> None:
        match news:
            case Opened(name=name, point_of_ref=point):
                self._open_source(name, point)
            case Refused(name=name):
                if name not in self._ask_at:
                    self._options.tell(f"another connector has stream {name}: retrying")
                self._ask_at[name] = time.monotonic() + ASK_AGAIN_S
            case Progressed(name=name, point_of_ref=point):
                self._note_progress(name, point)
            case Restarted(address=address):
                if address:
                    check_address(address)
                    self._connector.address = address
                self._is_over = True
            case Failed(reason=reason) if reason.startswith(PASSING):
                raise ProtocolError(reason)  # reconnect
            case Failed(reason=reason):
                raise ConnectorError(f"the listener ended the connection: {reason}")

    # Streams

    def _ask(self) -> None:
        if not self._session.is_streaming:
            return
        now = time.monotonic()
        leaving = self._connector.list_given_back()
        self._to_ask |= {name for name, at in self._ask_at.items() if now >= at}
        frames: list[wire.Frame] = []
        for name in self._to_ask - leaving:
            frame = self._session.ask(name)
            if frame is None:
                break  # no more credits now
            frames.append(frame)
            self._to_ask.discard(name)
            self._ask_at.pop(name, None)
        self._say(frames)
        self._check_alone(now)

    def _check_alone(self, now: float) -> None:
        states = self._session.states
        if any(state in ("open", "ended") for state in states.values()):
            self._alone_since = now
        elif states and now > self._alone_since + self._options.take_timeout_s:
            names = ", ".join(sorted(states)[:10])
            raise ConnectorError(
                f"another connector has {names}, so this one has no stream at all: stop the "
                "other connector, or start the listener with --policy takeover"
            )

    def _open_source(self, name: str, point_of_ref: int | None) -> None:
        connector = self._connector
        connector.patience.note_return()
        self._sent[name] = point_of_ref
        source = connector.source(name)
        if source is not None:
            connector.note_opened(source)
            call_source(name, source.handle_reset, point_of_ref)
            self._open[name] = source
            self._busy[name] = None

    def _end(self) -> None:
        states = self._session.states
        for name in self._connector.list_given_back():
            self._open.pop(name, None)
            self._busy.pop(name, None)
            if states.get(name) == "open" and (frame := self._session.end(name)):
                self._say([frame])
            is_given = states.get(name) == "ended" and name not in self._unsafe
            if is_given or states.get(name) in (None, "refused"):
                self._connector.finish_giving_back(name)
                states.pop(name, None)
                self._ask_at.pop(name, None)

    def _note_progress(self, name: str, point_of_ref: int) -> None:
        sent = self._sent.get(name)
        if sent is None or sent <= point_of_ref:
            self._unsafe.discard(name)
        source = self._connector.source(name)
        if source is not None:
            call_source(name, source.handle_progress, name, point_of_ref)
        self._note_done(name)

    def _note_done(self, name: str) -> None:
        is_over = self._session.states.get(name) == "ended" and name not in self._unsafe
        if is_over and name not in self._connector.list_given_back():
            self._connector.done.add(name)

    # Messages

    def _send(self) -> bool:
        """Send what sources have, as far as credits allow; return whether there may be more."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._busy.update(dict.fromkeys(self._open))
            self._poll_at = now + max(POLL_S, len(self._open) * POLL_EACH_S)
        leaving = self._connector.list_given_back()
        for name in list(self._busy):
            if self._session.credits <= 0:
                break
            if name in leaving or not self._send_some(name, self._open[name]):
                self._busy.pop(name, None)
        return bool(self._busy) and self._session.credits > 0

    def _send_some(self, name: str, source: Source) -> bool:
        number, size, is_over = self._session.number(name), 0, False
        chunks: list[bytes] = []
        while len(chunks) < SEND_ROWS and size < SEND_BYTES and self._session.spend():
            found = call_source(source.name, source.handle_next)
            if found is None or isinstance(found, End):
                self._session.credits += 1  # the credit was not needed
                is_over = found is not None
                break
            item, frame_bytes = call_source(source.name, _pack, number, found)
            chunks.append(frame_bytes)
            size += len(item.data)
            self._sent[name] = item.point_of_ref
        if chunks:
            self._unsafe.add(name)
            self._peer.sendall(b"".join(chunks))
            self._connector.counts.messages += len(chunks)
            self._connector.counts.bytes += size
        if is_over and (frame := self._session.end(name)):
            self._say([frame])
            self._open.pop(name, None)
            self._note_done(name)
            return False
        return bool(chunks) or is_over

    def _say(self, frames: Iterable[wire.Frame]) -> None:
        data = b"".join(map(wire.encode, frames))
        if data:
            self._peer.sendall(data)


def _pack(number: int, found: Item | tuple[bytes, int]) -> tuple[Item, bytes]:
    item = Item(*found)
    message = wire.Message(number, item.point_of_ref, item.time_ns, item.key, item.data)
    return item, wire.encode_message(message)
