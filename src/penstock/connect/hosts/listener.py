"""Accepts source connectors: a socket, a thread for each connection, commits to the log.

A connection's thread reads what has arrived, commits it, acknowledges it, and reads again. While
it commits, more arrives: so the size of commits follows the load, and a connection holds no more
than one read in memory. A peer that makes an error loses its own connection and nothing else.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeVar

import msgspec

from penstock.connect.hosts.intake import Received, Wrong, to_letters, to_parts
from penstock.connect.hosts.metrics import SourceMeter
from penstock.connect.hosts.registry import (
    Asked,
    Lease,
    Owner,
    Policy,
    Registry,
    SourceRecord,
    StreamClaim,
    this_owner,
)
from penstock.connect.hosts.server import TICK_S, Connection, Server
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import CLOSED, SENT_AWAY, Close
from penstock.connect.protocol.source_session import (
    Ask,
    Flush,
    Intake,
    Release,
    SourceEffect,
    SourceSession,
    Terms,
)
from penstock.errors import (
    FencedError,
    LogError,
    PenstockError,
    ProtocolError,
)
from penstock.log.api import Log, Part
from penstock.log.declaring.objects import Stream
from penstock.log.letters import dead_name, ensure_letters
from penstock.log.writing.compose import Composer

A = TypeVar("A")
B = TypeVar("B")
NAME_CHARS_MAX = 1000
TOLD_MAX = 10
"""How many streams a message names."""
GRACE_S = 0.25
"""A connector that reconnects at once may find that its old connection still exists."""
COMMITS_MAX = 8
START_S = 60.0
AS_USUAL = (CLOSED, SENT_AWAY)
"""Reasons for closing a connection that are no cause for concern."""
OnDamage = Literal["stop", "skip", "dead-letter"]
DAMAGE: dict[OnDamage, str] = {
    "stop": "closing the connection", "skip": "skipped", "dead-letter": "written as a dead letter",
}  # fmt: skip


class ListenerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a listener.

    `routes` say which stream of the log a connector stream goes to: the first pattern that matches
    its name decides. `policy` decides between two connectors that want one stream. A connection
    that does not send its `Hello` within `hello_timeout_s` is closed. `on_damage` says what happens
    to messages that the stream cannot hold: they end the connection (`stop`), are skipped (`skip`),
    or each is written to the stream NAME_dead (`dead-letter`). Metrics of connectors are appended
    to `_system.metrics` every `metrics_interval_ms` (0: never). A frame may be larger than the
    largest event of a log, so that a message that a stream cannot hold is reported as such.
    """

    routes: Sequence[tuple[str, str]]
    address: str = "127.0.0.1:0"
    cookie: str = ""
    policy: Policy = "oldest"
    credits: int = 32_768
    frame_bytes_max: int = 8 * wire.FRAME_BYTES_MAX
    connections_max: int = 1000
    hello_timeout_s: float = 10.0
    send_timeout_s: float = 30.0
    on_damage: OnDamage = "stop"
    decoder: Callable[[bytes], object] | None = None
    """Makes an event's data from a message; without a decoder, a message is JSON, or bytes."""
    metrics_interval_ms: int = 5_000


class Listener:
    """Listens for the duration of its block; on leaving, every connection commits what it has.

    `tell` is called when connectors come and go, `warn` when they make errors (by default `tell`).

    with Listener(log, ListenerOptions(routes=[("*", "orders")])) as listener:
        print(listener.address)
    """

    def __init__(
        self,
        log: Log,
        options: ListenerOptions,
        tell: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.log = log
        self.options = options
        self.tell = tell
        self.warn = warn or tell
        self.registry = Registry(log, options.policy)
        self.commits = ThreadPoolExecutor(COMMITS_MAX, "penstock-commit")
        self.meter = SourceMeter(log, options.metrics_interval_ms)
        self.numbers = itertools.count(1)
        self._routes: list[tuple[str, str]] = []
        """The routes of the options, with canonical stream names."""
        self._server = Server(
            options.address, options.connections_max,
            lambda peer, where: _SourceConnection(self, peer, where), self.warn,
        )  # fmt: skip

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens at, including the port that was assigned."""
        return self._server.address

    def __enter__(self) -> Self:
        self._routes = [
            (pattern, str(self.log.stream(stream).name)) for pattern, stream in self.options.routes
        ]
        if self.options.on_damage == "dead-letter":
            ensure_letters(self.log, {stream for _, stream in self._routes})
        self.registry.forget_leases()
        with contextlib.ExitStack() as exits:
            exits.callback(self.commits.shutdown)
            start_all(self.commits, COMMITS_MAX)
            exits.callback(self.meter.close)
            self.meter.start()
            exits.enter_context(self._server)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def target(self, name: str) -> str | None:
        """The stream of the log that a connector stream goes to."""
        for pattern, stream in self._routes:
            if fnmatch.fnmatchcase(name, pattern):
                return stream
        return None


class PreparedMessages(NamedTuple):
    """What to commit to a stream; `wrong` is why the connection ends after it."""

    claim: StreamClaim
    record: SourceRecord
    parts: list[Part]
    has_messages: bool
    wrong: str | None


class _SourceConnection(Connection):
    """One connector."""

    def __init__(self, listener: Listener, peer: socket.socket, where: str) -> None:
        options = listener.options
        super().__init__(peer, where, options.frame_bytes_max, options.send_timeout_s)
        self._listener = listener
        self._log = listener.log
        self._number = next(listener.numbers)
        self._session = SourceSession(Terms(cookie=options.cookie, credits=options.credits))
        self._claims: dict[int, StreamClaim] = {}
        self._lease = Lease(listener.log)
        self._is_lost = False
        self._since = time.monotonic()
        self._patient_until = 0.0
        self._composer: Composer | None = None

    def let_go(self, reason: str) -> None:
        with contextlib.suppress(PenstockError):
            self._lease.release()
        tell = self._listener.tell if reason in AS_USUAL else self._listener.warn
        tell(f"{self._name} disconnected: {reason}")

    @property
    def _name(self) -> str:
        session = self._session
        who = f"{session.program} {session.instance}".strip()
        return f"connector {who} ({self.where})" if who else f"a connection ({self.where})"

    # Talking

    def talk(self) -> str:
        while True:
            try:
                reason = self.carry_out(self._next())
                is_leaving = self._is_lost or self.server.stopping.is_set()
                if is_leaving and not reason:
                    reason = self.carry_out([Flush(), *self._session.restart()])
                self._renew()
            except FencedError:
                reason = self.carry_out(self._session.restart())
            except PenstockError as error:
                again = error.retriable or isinstance(error, LogError)
                told = self._session.restart() if again else self._session.fail(str(error))
                self.carry_out(told)
                return f"the log failed: {error}"
            if reason:
                return reason

    def _next(self) -> Iterable[SourceEffect]:
        """The effects of what was received, or of receiving nothing."""
        data = self.gather()
        self._patient_until = time.monotonic() + GRACE_S
        limit_s = self._listener.options.hello_timeout_s
        if self._session.state == "connected" and time.monotonic() > self._since + limit_s:
            return self._session.fail("no Hello was received in time")
        if data:
            return self._handle(data)
        if data is not None:
            return [] if self._is_lost else [Flush(), Close(CLOSED)]
        return []

    def _handle(self, data: bytes) -> Iterator[SourceEffect]:
        """Accept the frames before an invalid one, which would otherwise be sent again with it."""
        frames, wrong = [], None
        try:
            frames = self.parser.feed(data)
        except ProtocolError as error:
            frames, wrong = list(error.frames), str(error)
        yield from self._session.receive(frames)
        if wrong and self._session.state != "closed":
            yield from self._session.fail(wrong)

    def perform(self, effect: SourceEffect) -> list[SourceEffect]:
        """Carry out one effect; return those that follow from it."""
        match effect:
            case Ask():
                return self._ask(effect)
            case Flush():
                return self._flush()
            case Release(stream_id=stream_id):
                self._claims.pop(stream_id).release()
                self._session.release(stream_id)
        return []

    # Streams

    def _ask(self, ask: Ask) -> list[SourceEffect]:
        """Claim the streams that are available, many at once, and answer for each."""
        asked: list[Asked] = []
        for stream_id, name in ask.streams:
            stream = self._listener.target(name)
            if wrong := _why_no_stream(name, stream):
                return self._session.fail(wrong)
            asked.append(Asked(stream_id, name, stream or ""))
        self._lease.renew()
        found = list(zip(asked, self._together(self._take, asked), strict=True))
        self._tell("has", [asked.name for asked, claim in found if isinstance(claim, StreamClaim)])
        others = [asked.name for asked, claim in found if not isinstance(claim, StreamClaim)]
        self._tell("was refused streams that another connector has:", others)
        return [effect for asked, claim in found for effect in self._answer(asked, claim)]

    def _tell(self, what: str, names: Sequence[str]) -> None:
        if names:
            more = f" and {len(names) - TOLD_MAX:,} others" if len(names) > TOLD_MAX else ""
            self._listener.tell(f"{self._name} {what} {', '.join(names[:TOLD_MAX])}{more}")

    def _take(self, asked: Asked) -> StreamClaim | SourceRecord:
        take, token = self._listener.registry.take, self._lease.token
        while not isinstance(found := take(asked, self._owner, token, self._lose), StreamClaim):
            if time.monotonic() >= self._patient_until:  # one deadline for all that it asked for
                return found
            self.server.stopping.wait(GRACE_S / 5)
        return found

    def _answer(self, asked: Asked, found: StreamClaim | SourceRecord) -> list[SourceEffect]:
        if isinstance(found, StreamClaim):
            self._claims[asked.stream_id] = found
            return self._session.grant(asked.stream_id, found.record.point_of_ref)
        return self._session.refuse(asked.stream_id, found.point_of_ref)

    @functools.cached_property
    def _owner(self) -> Owner:
        return this_owner(self._number, self._session.program, self._session.instance)

    def _renew(self) -> None:
        if self._claims:
            self._lease.renew()

    def _together(self, do: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Call `do` for each item, several at once, while the lease is kept renewed.

        All calls have ended when this returns or raises: nobody else uses a claim while one runs.
        """
        if len(items) <= 1:
            return [do(item) for item in items]
        running = {self._listener.commits.submit(do, item): item for item in items}
        going: set[Future[B]] = set(running)
        while going:
            _, going = wait(going, TICK_S)
            self._renew()
        return [future.result() for future in running]

    def _lose(self) -> None:
        """Another connection took one of the streams: wake the thread, so that it reports this."""
        self._is_lost = True
        self.interrupt()

    # Messages

    def _flush(self) -> list[SourceEffect]:
        """Commit everything that was received, each stream separately, several at once.

        If there are many, they are prepared first: threads that compute would hold up those that
        commit.
        """
        waiting = self._session.waiting()
        names = {self._claims[intake.stream_id].record.stream for intake in waiting}
        streams = {name: self._log.stream(name) for name in names}
        if len(waiting) <= COMMITS_MAX:
            done = self._together(lambda i: self._save(self._prepare(i, streams)), waiting)
        else:
            ready = []
            for intake in waiting:
                ready.append(self._prepare(intake, streams))
                self._renew()
            done = self._together(self._save, ready)
        points = [(p.claim.stream_id, p.record.point_of_ref) for p in done if p.has_messages]
        effects = self._session.finish_commit(points)
        wrong = next((prepared.wrong for prepared in done if prepared.wrong), None)
        if wrong and self._session.state != "closed":
            effects += self._session.fail(wrong)
        return effects

    def _prepare(self, intake: Intake, streams: Mapping[str, Stream]) -> PreparedMessages:
        """What to store of a connector stream, and why the connection ends after it."""
        claim = self._claims[intake.stream_id]
        stream = streams[claim.record.stream]
        messages, dropped = intake.take_all(), intake.take_dropped()
        composer, limits = self._compose(), self._log.limits
        decoder = self._listener.options.decoder
        parts, wrong = to_parts(composer, limits, stream, intake.name, messages, decoder)
        on_damage = self._listener.options.on_damage
        told = self._tell_damage(intake, wrong[0]) if wrong else ""
        if wrong and on_damage == "stop":
            first = wrong[0].message.message_id
            messages = [message for message in messages if message.message_id < first]
            parts, _ = to_parts(composer, limits, stream, intake.name, messages, decoder)
            wrong = []
        elif wrong and on_damage == "dead-letter":
            letters = self._log.stream(dead_name(claim.record.stream))
            parts.append(to_letters(composer, letters, claim.record, wrong))
        counts = Received(messages, dropped, len(wrong), self._session.credits, told)
        ends = f"{told}, so stream {stream.name} cannot hold it"
        is_end = told and on_damage == "stop"
        record = counts.add_to(claim.record)
        return PreparedMessages(claim, record, parts, bool(messages), ends if is_end else None)

    def _tell_damage(self, intake: Intake, wrong: Wrong) -> str:
        told = f"message {wrong.message.message_id} of {intake.name}: {wrong.reason}"
        becomes = DAMAGE[self._listener.options.on_damage]
        self._listener.warn(f"{self._name}: {told} ({becomes})")
        return told

    def _save(self, prepared: PreparedMessages) -> PreparedMessages:
        prepared.claim.save(prepared.record, prepared.parts)
        self._listener.meter.note(prepared.record)
        return prepared

    def _compose(self) -> Composer:
        if self._composer is None:
            source = f"connector/{self._session.program}/{self._session.instance}"[:200]
            self._composer = Composer(source, self._log.limits)
        return self._composer


def _why_no_stream(name: str, stream: str | None) -> str | None:
    if not name or len(name) > NAME_CHARS_MAX or not name.isprintable():
        return f"a stream's name must have 1 to {NAME_CHARS_MAX} printable characters"
    return f"no route of this listener matches stream {name}" if stream is None else None


def start_all(threads: ThreadPoolExecutor, count: int) -> None:
    """Start all threads now: work for one that cannot be started later would be left undone."""
    barrier = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(barrier.wait, START_S)
        barrier.wait(START_S)
    finally:
        barrier.abort()
