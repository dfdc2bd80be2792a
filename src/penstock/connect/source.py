"""For authors of source connectors: what is particular to a source, and the connector around it.

    class Numbers(Source):
        def handle_reset(self, point_of_ref):
            self.next = 0 if point_of_ref is None else point_of_ref + 1

        def handle_next(self):
            self.next += 1
            return f"{self.next}".encode(), self.next - 1

    with SourceConnector("127.0.0.1:6067", [Numbers("numbers")]) as connector:
        ...  # the program goes on; the connector runs beside it

The connector comes again when the connection breaks or the listener sends it away, waits longer
each time, keeps to its credits, and resets each source to the last message that is safe.
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

from penstock.connect import wire
from penstock.connect.addresses import check_address, resolved
from penstock.connect.client import Greeting
from penstock.connect.origin import END, Item, Source, called, silent
from penstock.connect.sockets import set_up
from penstock.connect.talking import Talk
from penstock.errors import ConnectorError, ConnectorTimeoutError, ProtocolError, UsageError
from penstock.patience import Patience

__all__ = ["END", "ConnectorOptions", "Counts", "Item", "Source", "SourceConnector"]


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a connector connects.

    `take_timeout_s` is how long it asks for streams that another connector has, before it gives
    up if it has none at all. `connect_timeout_s` limits a single attempt; how often it tries is
    not limited, `backoff_s_max` is how long it waits at most in between. A listener that owes an
    answer and says nothing for `answer_timeout_s` is taken to be gone.
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
    """Hears what people may want to know: that the other side is away, that it is back."""


class Counts(msgspec.Struct):
    """What a connector has done so far."""

    messages: int = 0
    bytes: int = 0
    connections: int = 0
    credits: int = 0


class SourceConnector:
    """Runs sources in the background, over one connection that it makes again when it breaks.

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
        """Ringing at one end wakes the thread, which waits at the other."""
        self._thread = threading.Thread(target=self._run, name="penstock-connector", daemon=True)
        self._opened: set[str] = set()
        self.done: set[str] = set()
        """Streams that have ended, and of which everything is safe."""
        self.counts = Counts()
        self.failure: ConnectorError | None = None
        for source in sources:
            self.add(source)

    # The author's side

    def start(self) -> Self:
        """Begin; `stop` must follow, as leaving the block does."""
        self._bell = socket.socketpair()
        self._bell[1].setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self.stop()
            raise
        return self

    def add(self, source: Source) -> None:
        """Take another stream in, also while running; one that is being given back, after that."""
        source.on_tell = self.options.tell
        with self._lock:
            if source.name in self._giving_back:
                self._waiting[source.name] = source
                return
            if source.name in self._sources:
                raise UsageError(f"the connector has a source {source.name} already")
            self._sources[source.name] = source
            self._added.add(source.name)
        self.wake()

    def give_back(self, name: str) -> None:
        """Let another connector have this stream: what was sent is made safe, then it is free."""
        with self._lock:
            self._waiting.pop(name, None)
            if name in self._sources:
                self._giving_back.add(name)
        self.wake()

    def wake(self, name: str | None = None) -> None:
        """Say that a source has something now, rather than when it is asked next.

        Which one, if it is known: the others need not be asked then.
        """
        with self._lock:
            if name is None:
                self._is_any_awake = True
            else:
                self._awake.add(name)
        with contextlib.suppress(OSError):  # it rings already, or nobody is there any more
            if self._bell is not None:
                self._bell[1].send(b"\0")

    def finish(self, timeout_s: float) -> None:
        """Wait until every source has ended and is safe.

        Raises `ConnectorError` if the connector has given up, or `ConnectorTimeoutError`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._over.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
            with self._lock:
                if self._sources.keys() <= self.done:
                    return
            if time.monotonic() >= deadline:
                raise ConnectorTimeoutError(f"not everything was safe within {timeout_s} s")
        self.check()
        with self._lock:
            left = sorted(self._sources.keys() - self.done)
        if left:
            raise ConnectorError(f"the connector was stopped before {', '.join(left)} was safe")

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
                began, why = time.monotonic(), "it ended the connection"
                try:
                    self._connect()
                except (OSError, ProtocolError) as error:
                    why = str(error)
                if self.stopping.is_set():
                    break
                if time.monotonic() - began > self.options.backoff_s_max:
                    self.patience.answered()
                self.stopping.wait(self.patience.failed(why))
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
        with socket.create_connection(resolved(self.address), timeout_s) as peer:
            set_up(peer)
            peer.settimeout(30.0)
            self.counts.connections += 1
            Talk(self, peer).run()

    @property
    def bell(self) -> socket.socket:
        """Where it rings."""
        assert self._bell is not None  # noqa: S101  start comes first
        return self._bell[0]

    def heard(self) -> tuple[set[str], set[str], bool]:
        """Since the last time: sources that were added, those that are awake, or that any is."""
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

    def taken_back(self) -> set[str]:
        with self._lock:
            return set(self._giving_back)

    def gave_back(self, name: str) -> None:
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
            called(name, source.handle_close)

    def note_opened(self, source: Source) -> None:
        if source.name not in self._opened:
            self._opened.add(source.name)
            called(source.name, source.handle_open)
