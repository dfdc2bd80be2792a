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
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from penstock.connect import wire
from penstock.connect.addresses import check_address, resolved
from penstock.connect.client import (
    ClientSession,
    Failed,
    Greeting,
    Opened,
    Progressed,
    Refused,
    Restarted,
)
from penstock.connect.effects import PASSING
from penstock.connect.sockets import set_up
from penstock.errors import (
    ConnectorError,
    ConnectorTimeoutError,
    PenstockError,
    ProtocolError,
    UsageError,
)
from penstock.patience import Patience

T = TypeVar("T")
SEND_BYTES = 1 << 18
SEND_ROWS = 4096
POLL_S = 0.02


class Item(NamedTuple):
    """A message of a source: its data, its number, and if they are known its key and time (ns)."""

    data: bytes
    point_of_ref: int
    key: bytes | None = None
    time_ns: int = 0


def _silent(line: str) -> None:
    """Nobody wants to hear it."""


class _End:
    """What `handle_next` returns when there will never be more."""


END: Final = _End()


class Source:
    """One stream of a connector. Its methods are called by one thread, the connector's.

    `handle_next` must not wait for long: while it does, nothing is sent or acknowledged.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("a source's stream has a name")
        self.name = name
        self.on_tell: Callable[[str], None] = _silent
        """Where `tell` goes: the connector sets it."""

    def tell(self, line: str) -> None:
        """Say something to whoever looks after the connector."""
        self.on_tell(line)

    def handle_open(self) -> None:
        """Called before anything else, once."""

    def handle_reset(self, point_of_ref: int | None) -> None:
        """Go on behind this message: whenever the stream is given to this connector.

        `None`: nothing of the stream is safe yet, begin at the beginning.
        """
        raise NotImplementedError

    def handle_next(self) -> Item | tuple[bytes, int] | _End | None:
        """The next message with its number, larger than all before; `None` if there is none now."""
        raise NotImplementedError

    def handle_progress(self, stream: str, point_of_ref: int) -> None:
        """Everything up to this message is safe: it will never be asked for again."""

    def handle_close(self) -> None:
        """Called after everything else, once."""


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
    tell: Callable[[str], None] = _silent
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
        self._address = address
        self.patience = Patience(
            f"the listener at {address}", options.tell, options.backoff_s, options.backoff_s_max
        )
        self._sources: dict[str, Source] = {}
        self._options = options
        own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        who = options.instance or own
        self._greeting = Greeting(program=options.program, instance=who, cookie=options.cookie)
        self._lock = threading.Lock()
        self._giving_back: set[str] = set()
        self._waiting: dict[str, Source] = {}
        self._stopping = threading.Event()
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
        source.on_tell = self._options.tell
        with self._lock:
            if source.name in self._giving_back:
                self._waiting[source.name] = source
                return
            if source.name in self._sources:
                raise UsageError(f"the connector has a source {source.name} already")
            self._sources[source.name] = source
        self.wake()

    def give_back(self, name: str) -> None:
        """Let another connector have this stream: what was sent is made safe, then it is free."""
        with self._lock:
            self._waiting.pop(name, None)
            if name in self._sources:
                self._giving_back.add(name)
        self.wake()

    def wake(self) -> None:
        """Say that a source has something now, rather than when it is asked next."""
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
        self._stopping.set()
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
            while not self._stopping.is_set():
                began, why = time.monotonic(), "it ended the connection"
                try:
                    self._connect()
                except (OSError, ProtocolError) as error:
                    why = str(error)
                if self._stopping.is_set():
                    break
                if time.monotonic() - began > self._options.backoff_s_max:
                    self.patience.answered()
                self._stopping.wait(self.patience.failed(why))
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
        timeout_s = self._options.connect_timeout_s
        with socket.create_connection(resolved(self._address), timeout_s) as peer:
            set_up(peer)
            peer.settimeout(30.0)
            self.counts.connections += 1
            _Talk(self, peer).run()

    def known(self) -> dict[str, Source]:
        with self._lock:
            return {n: s for n, s in self._sources.items() if n not in self.done}

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
        if source is not None and was_opened:
            called(name, source.handle_close)

    def opened(self, source: Source) -> None:
        if source.name not in self._opened:
            self._opened.add(source.name)
            called(source.name, source.handle_open)


class _Talk:
    """One connection of a connector."""

    def __init__(self, connector: SourceConnector, peer: socket.socket) -> None:
        self._connector = connector
        self._options = connector._options
        self._peer = peer
        self._session = ClientSession(connector._greeting)
        self._parser = wire.Parser(self._options.frame_bytes_max)
        self._sent: dict[str, int | None] = {}
        self._safe: dict[str, int | None] = {}
        self._ask_at: dict[str, float] = {}
        self._alone_since = self._heard_at = time.monotonic()
        self._is_over = False
        assert connector._bell is not None  # noqa: S101  start comes first
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)
        self._poll.register(connector._bell[0], select.POLLIN)

    def run(self) -> None:
        """Until the connection ends. Raises `ConnectorError` where coming again is no use."""
        self._peer.sendall(wire.encode(self._session.hello()))
        while not self._is_over and not self._connector._stopping.is_set():
            self._ask()
            sent = self._send()
            self._end()
            self._listen(0.0 if sent else POLL_S)
            self._check_answers()
            self._connector.counts.credits = self._session.credits

    def _check_answers(self) -> None:
        """Raises if the listener lives, for its machine answers, and does nothing any more."""
        now = time.monotonic()
        states = self._session.states.values()
        is_asked = not self._session.is_streaming or any(state == "asked" for state in states)
        if not is_asked and all(map(self._is_safe, self._sent)):
            self._heard_at = now
        elif now > self._heard_at + self._options.answer_timeout_s:
            raise ProtocolError(f"it has not answered for {self._options.answer_timeout_s:g} s")

    def _listen(self, timeout_s: float) -> None:
        assert self._connector._bell is not None  # noqa: S101  start comes first
        bell = self._connector._bell[0]
        found = self._poll.poll(timeout_s * 1000)  # select cannot, where many files are open
        ready = {descriptor for descriptor, _ in found}
        if bell.fileno() in ready:
            bell.recv(4096)
        if self._peer.fileno() not in ready:
            return
        data = self._peer.recv(SEND_BYTES)
        self._heard_at = time.monotonic()
        if not data:
            self._is_over = True
        for news in self._session.receive(self._parser.feed(data)):
            self._take(news)

    def _take(self, news: object) -> None:
        connector = self._connector
        sources = connector.known()
        match news:
            case Opened(name=name, point_of_ref=point):
                connector.patience.is_back()
                self._sent[name] = self._safe[name] = point
                self._ask_at.pop(name, None)
                connector.opened(sources[name])
                called(name, sources[name].handle_reset, point)
            case Refused(name=name):
                if name not in self._ask_at:
                    self._options.tell(f"another connector has {name}: asking again")
                self._ask_at[name] = time.monotonic() + 1.0
            case Progressed(name=name, point_of_ref=point):
                self._safe[name] = point
                if name in sources:
                    called(name, sources[name].handle_progress, name, point)
                self._note_done(name)
            case Restarted(address=address):
                if address:
                    check_address(address)
                    connector._address = address
                self._is_over = True
            case Failed(reason=reason) if reason.startswith(PASSING):
                raise ProtocolError(reason)  # come again
            case Failed(reason=reason):
                raise ConnectorError(f"the listener ended the connection: {reason}")

    # Streams

    def _ask(self) -> None:
        if not self._session.is_streaming:
            return
        states = self._session.states
        now = time.monotonic()
        leaving = self._connector.taken_back()
        for name in self._connector.known().keys() - leaving:
            is_due = name not in states or (states[name] == "refused" and now >= self._ask_at[name])
            if is_due and (frame := self._session.ask(name)):
                self._peer.sendall(wire.encode(frame))
        if any(state in ("open", "ended") for state in states.values()):
            self._alone_since = now
        elif states and now > self._alone_since + self._options.take_timeout_s:
            names = ", ".join(sorted(states))
            raise ConnectorError(
                f"another connector has {names}, and this one is left without any stream: stop "
                "the other one, or start the listener with --policy takeover"
            )

    def _end(self) -> None:
        states = self._session.states
        for name in self._connector.taken_back():
            if states.get(name) == "open" and (frame := self._session.end(name)):
                self._peer.sendall(wire.encode(frame))
            is_given = states.get(name) == "ended" and self._is_safe(name)
            if is_given or states.get(name) in (None, "refused"):
                self._connector.gave_back(name)
                states.pop(name, None)

    def _is_safe(self, name: str) -> bool:
        sent, safe = self._sent.get(name), self._safe.get(name)
        return sent is None or (safe is not None and sent <= safe)

    def _note_done(self, name: str) -> None:
        is_over = self._session.states.get(name) == "ended" and self._is_safe(name)
        if is_over and name not in self._connector.taken_back():
            self._connector.done.add(name)

    # Messages

    def _send(self) -> bool:
        """Send what sources have, as far as credits reach; whether there may be more."""
        going_on = False
        leaving = self._connector.taken_back()
        for name, source in self._connector.known().items():
            if self._session.states.get(name) == "open" and name not in leaving:
                going_on = self._send_some(name, source) or going_on
        return going_on and self._session.credits > 0

    def _send_some(self, name: str, source: Source) -> bool:
        number, size, is_over = wire.stream_id(name), 0, False
        chunks: list[bytes] = []
        while len(chunks) < SEND_ROWS and size < SEND_BYTES and self._session.spend():
            found = called(source.name, source.handle_next)
            if found is None or isinstance(found, _End):
                self._session.credits += 1  # it was not needed
                is_over = found is not None
                break
            item, frame_bytes = called(source.name, _packed, number, found)
            chunks.append(frame_bytes)
            size += len(item.data)
            self._sent[name] = item.point_of_ref
        if chunks:
            self._peer.sendall(b"".join(chunks))
            self._connector.counts.messages += len(chunks)
            self._connector.counts.bytes += size
        if is_over and (frame := self._session.end(name)):
            self._peer.sendall(wire.encode(frame))
            self._note_done(name)
        return bool(chunks)


def _packed(number: int, found: Item | tuple[bytes, int]) -> tuple[Item, bytes]:
    item = Item(*found)
    message = wire.Message(number, item.point_of_ref, item.time_ns, item.key, item.data)
    return item, wire.encode_message(message)


def called(name: str, function: Callable[..., T], *arguments: object) -> T:
    """What a source's own code gives; its errors are told apart from those of the connection."""
    try:
        return function(*arguments)
    except PenstockError as error:
        raise ConnectorError(f"source {name} failed: {error}") from error
    except Exception as error:
        raise ConnectorError(f"source {name} failed: {type(error).__name__}: {error}") from error
