"""For authors of source connectors: the connector that runs sources.

    class Numbers(Source):
        def handle_reset(self, point_of_ref):
            self.next = 0 if point_of_ref is None else point_of_ref + 1

        def handle_next(self):
            self.next += 1
            return f"{self.next}".encode(), self.next - 1

    with SourceConnector("127.0.0.1:6067", [Numbers("numbers")]) as connector:
        ...  # the program continues; the connector runs in the background

The connector reconnects when the connection breaks or the listener asks it to, waiting longer
each time, respects its credits, and resets each source to the last message that is safe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import msgspec

from penstock.connect.addresses import check_address, resolve_address
from penstock.connect.clients.connection import Talk
from penstock.connect.clients.origin import END, Item, Source, call_source, silent
from penstock.connect.hosts.sockets import set_up
from penstock.connect.protocol import wire
from penstock.connect.protocol.source_client import Greeting
from penstock.errors import ConnectorError, ConnectorTimeoutError, ProtocolError, UsageError
from penstock.patience import Patience

__all__ = ["END", "ConnectorOptions", "Counts", "Item", "Source", "SourceConnector"]


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a connector.

    `take_timeout_s` is how long it keeps asking for streams that another connector has before it
    gives up, if it has no stream at all. `connect_timeout_s` limits a single attempt to connect;
    the number of attempts is not limited, and `backoff_s_max` is the longest wait between two. A
    listener that owes an answer and sends nothing for `answer_timeout_s` is considered gone.
    """

    program: str = "penstock"
    instance: str = ""
    cookie: str = ""
    take_timeout_s: float = 30.0
    answer_timeout_s: float = 120.0
    connect_timeout_s: float = 10.0
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0
    frame_bytes_max: int = wire.FRAME_BYTES_MAX
    tell: Callable[[str], None] = silent
    """Called with messages for people: that the other side is unavailable, or available again."""


class Counts(msgspec.Struct):
    """What a connector has done so far."""

    messages: int = 0
    bytes: int = 0
    connections: int = 0
    credits: int = 0


class SourceConnector:
    """Runs sources in the background, over one connection that is re-established when it breaks.

    `failure` is why it gave up: the listener refused it, or another connector has every stream.
    Leaving the block ends it; `finish` waits until everything is safe first.
    """

    def __init__(
        self,
        address: str,
        sources: Iterable[Source],
        options: ConnectorOptions = ConnectorOptions(),
    ) -> None:
        check_address(address)
        self.address = address
        self.patience = Patience(
            f"the listener at {address}", options.tell, options.backoff_s, options.backoff_s_max
        )
        self._sources: dict[str, Source] = {}
        self.options = options
        own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        who = options.instance or own
        self.greeting = Greeting(program=options.program, instance=who, cookie=options.cookie)
        self._lock = threading.Lock()
        self._giving_back: set[str] = set()
        self._waiting: dict[str, Source] = {}
        self._added: set[str] = set()
        self._awake: set[str] = set()
        self._is_any_awake = False
        self.stopping = threading.Event()
        self._over = threading.Event()
        self._bell: tuple[socket.socket, socket.socket] | None = None
        """Writing to one end wakes the thread, which waits at the other."""
        self._thread = threading.Thread(target=self._run, name="penstock-connector", daemon=True)
        self._opened: set[str] = set()
        self.done: set[str] = set()
        """Streams that have ended and are safe in full."""
        self.counts = Counts()
        self.failure: ConnectorError | None = None
        for source in sources:
            self.add(source)

    # The author's side

    def start(self) -> Self:
        """Start the connector. `stop` must be called later; leaving the block does that."""
        self._bell = socket.socketpair()
        self._bell[1].setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self.stop()
            raise
        return self

    def add(self, source: Source) -> None:
        """Add a stream, also while running. One that is being given back is added after that."""
        source.on_tell = self.options.tell
        with self._lock:
            if source.name in self._giving_back:
                self._waiting[source.name] = source
                return
            if source.name in self._sources:
                raise UsageError(f"the connector already has a source named {source.name}")
            self._sources[source.name] = source
            self._added.add(source.name)
        self.wake()

    def give_back(self, name: str) -> None:
        """Release this stream for other connectors, once everything that was sent is safe."""
        with self._lock:
            self._waiting.pop(name, None)
            if name in self._sources:
                self._giving_back.add(name)
        self.wake()

    def wake(self, name: str | None = None) -> None:
        """Report that a source has data now, rather than waiting until it is polled.

        Pass its name if it is known: the others are then not polled.
        """
        with self._lock:
            if name is None:
                self._is_any_awake = True
            else:
                self._awake.add(name)
        with contextlib.suppress(OSError):  # it has been woken already, or has ended
            if self._bell is not None:
                self._bell[1].send(b"\0")

    def finish(self, timeout_s: float) -> None:
        """Wait until every source has ended and all its messages are safe.

        Raises `ConnectorError` if the connector has given up, or `ConnectorTimeoutError`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._over.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
            with self._lock:
                if self._sources.keys() <= self.done:
                    return
            if time.monotonic() >= deadline:
                raise ConnectorTimeoutError(f"not all messages were safe within {timeout_s} s")
        self.check()
        with self._lock:
            left = sorted(self._sources.keys() - self.done)
        if left:
            raise ConnectorError(
                f"the connector was stopped before all of {', '.join(left)} was safe"
            )

    def check(self) -> None:
        """Raise `ConnectorError` if the connector has given up."""
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End the connection and wait for the thread; a second call does nothing."""
        self.stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._bell or ():
            end.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # The thread

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                began, why = time.monotonic(), "it closed the connection"
                try:
                    self._connect()
                except (OSError, ProtocolError) as error:
                    why = str(error)
                if self.stopping.is_set():
                    break
                if time.monotonic() - began > self.options.backoff_s_max:
                    self.patience.note_answer()
                self.stopping.wait(self.patience.note_failure(why))
        except ConnectorError as error:
            self.failure = error
        except Exception as error:
            self.failure = ConnectorError(f"the connector failed: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
        finally:
            for name in self._opened:
                with contextlib.suppress(Exception):
                    self._sources[name].handle_close()
            self._over.set()

    def _connect(self) -> None:
        timeout_s = self.options.connect_timeout_s
        with socket.create_connection(resolve_address(self.address), timeout_s) as peer:
            set_up(peer)
            peer.settimeout(30.0)
            self.counts.connections += 1
            Talk(self, peer).run()

    @property
    def bell(self) -> socket.socket:
        """The end of the socket pair that becomes readable when the thread is woken."""
        assert self._bell is not None  # noqa: S101  start comes first
        return self._bell[0]

    def heard(self) -> tuple[set[str], set[str], bool]:
        """Since the last call: sources added, sources that have data, and whether any may have."""
        with self._lock:
            found = self._added, self._awake, self._is_any_awake
            self._added, self._awake, self._is_any_awake = set(), set(), False
        return found

    def known(self) -> set[str]:
        """The sources that have not ended."""
        with self._lock:
            return self._sources.keys() - self.done

    def source(self, name: str) -> Source | None:
        with self._lock:
            return None if name in self.done else self._sources.get(name)

    def list_given_back(self) -> set[str]:
        with self._lock:
            return set(self._giving_back)

    def finish_giving_back(self, name: str) -> None:
        with self._lock:
            self._giving_back.discard(name)
            source = self._sources.pop(name, None)
            was_opened = name in self._opened
            self._opened.discard(name)
            self.done.discard(name)
            if name in self._waiting:
                self._sources[name] = self._waiting.pop(name)
                self._added.add(name)
        if source is not None and was_opened:
            call_source(name, source.handle_close)

    def note_opened(self, source: Source) -> None:
        if source.name not in self._opened:
            self._opened.add(source.name)
            call_source(source.name, source.handle_open)
