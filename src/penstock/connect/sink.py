"""For authors of sinks: what is particular to a target, and the host around it.

    class Lines:
        def __init__(self, worker: str) -> None: ...
        def open(self, committed: int, kept: int | None) -> None: ...
        def append(self, messages: Sequence[Message]) -> None: ...
        def flush(self) -> None: ...                        # durable, not yet visible
        def commit(self, start: int, end: int) -> None: ... # visible; may be called again
        def abort(self, start: int) -> None: ...            # everything from `start` on is gone
        def close(self) -> None: ...

    with SinkHost(Lines, "lines", SinkOptions(address="127.0.0.1:6068")) as host:
        ...

docs/connectors.md has one that works.

Protocol, transactions, points of reference and what goes wrong are the host's.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from penstock.connect import wire
from penstock.connect.effects import CLOSED, PASSING
from penstock.connect.serving import Connection, Server
from penstock.connect.sinking import (
    Append,
    Approve,
    Effect,
    Left,
    Note,
    Open,
    Prepare,
    Resolve,
    SinkSession,
    SinkTerms,
    Standing,
    Vote,
)
from penstock.connect.transactions import TransactionLog
from penstock.errors import PenstockError, ProtocolError, UsageError
from penstock.failpoints import failpoint

TAKEOVER_S = 10.0
WORKER = re.compile(r"[\w.@:/=+-]{1,200}\Z")
FIRST_STREAM = 1
ABOUT_DATA = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    RecursionError, NotImplementedError, msgspec.MsgspecError,
)  # fmt: skip
ATTEMPT = re.compile(r"attempt=([\d.]{1,100})\Z")


class Sink(Protocol):
    """One worker's way into a target. Its methods are called by one thread at a time.

    An error that is not a `PenstockError` with `retriable`, and is one of those that Python's own
    code raises about data (`ValueError`, `TypeError`, …), means that the same would fail again:
    the app hears of it and gives up after some tries. After any other, it is tried again for ever.
    """

    def open(self, committed: int, kept: int | None) -> None:
        """Begin, or begin again.

        Bytes before `committed` are visible. Those from there up to `kept` were voted for and
        stay, unless their outcome was carried out and not yet saved; `None` if none were.
        Whatever came behind is discarded. Raises `UsageError` where no worker can use the target
        as it is, such as one that is not there: the host gives up then.
        """

    def append(self, messages: Sequence[wire.Message]) -> None:
        """Take messages, in order. What fails here is voted against."""

    def flush(self) -> None:
        """Make everything taken durable, without making it visible."""

    def commit(self, start: int, end: int) -> None:
        """Make the bytes from `start` to `end` visible. Called again if it was interrupted.

        Raises if they are not there.
        """

    def abort(self, start: int) -> None:
        """Discard everything from `start` on. Called again if it was interrupted."""

    def close(self) -> None:
        """Let go of everything; `open` may follow."""


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink listens. A connection that says nothing for `idle_timeout_s` is closed.

    A frame may be larger than the largest event of a log: its JSON is longer than its columns.
    """

    address: str = "127.0.0.1:0"
    cookie: str = ""
    credits: int = 32_768
    frame_bytes_max: int = 8 * wire.FRAME_BYTES_MAX
    connections_max: int = 1000
    idle_timeout_s: float = 60.0
    send_timeout_s: float = 30.0


class SinkHost:
    """Listens for workers while its block lasts, and keeps where each stands in `folder`.

    `make` gives the sink of a worker by its name; where a worker of another program has further
    streams, each has a sink of its own, called `WORKER#STREAM`.
    """

    def __init__(
        self,
        make: Callable[[str], Sink],
        folder: Path | str,
        options: SinkOptions = SinkOptions(),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.make = make
        self.options = options
        self.tell = tell
        self.transactions = TransactionLog(Path(folder))
        self._active: dict[str, _Worker] = {}
        self._latest: dict[str, tuple[int, ...]] = {}
        self._known: set[str] = set()
        self._failure: UsageError | None = None
        self._changed = threading.Condition()
        self._server = Server(
            options.address, options.connections_max,
            lambda peer, where: _Worker(self, peer, where), tell,
        )  # fmt: skip
        self._exits = contextlib.ExitStack()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, the port it was given included."""
        return self._server.address

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            exits.enter_context(self.transactions)
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

    def check(self) -> None:
        """Raise why no worker can use the target as it is, if that was found."""
        if self._failure is not None:
            raise self._failure

    def give_up(self, failure: UsageError) -> None:
        """The target cannot be used as it is: somebody has to do something about it."""
        self._failure = failure

    def approve(self, worker: str, connection: _Worker) -> str:
        """Why the worker may not connect: it is connected, or was, with a later attempt."""
        deadline = time.monotonic() + TAKEOVER_S
        with self._changed:
            while True:
                latest = max(
                    self._latest.get(worker, ()), self.transactions.standing(worker).attempt
                )
                if connection.attempt < latest:  # a zombie: somebody newer was here
                    return (
                        f"worker {worker} was here with a later attempt, {_dotted(latest)}, and "
                        f"this is {_dotted(connection.attempt)}: another query has taken over, or "
                        "its log was made anew, which needs a new folder for this sink"
                    )
                there = self._active.get(worker)
                if there is None:
                    break
                if connection.attempt <= there.attempt:
                    return f"{PASSING}worker {worker} is connected already"
                there.interrupt()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return f"{PASSING}worker {worker} is connected already, and busy"
            self._active[worker] = connection
            self._latest[worker] = connection.attempt
            return ""

    def greet(self, worker: str, standing: Standing) -> None:
        """Tell of a worker when it comes for the first time; it comes again for every batch."""
        with self._changed:
            is_known = worker in self._known
            self._known.add(worker)
        if not is_known:
            waiting = "" if standing.pending is None else ", and waits for an outcome"
            total = sum(standing.committed.values())
            self.tell(f"worker {worker} is here: {total:,} bytes are committed{waiting}")

    def forget(self, connection: _Worker) -> None:
        with self._changed:
            for worker, there in list(self._active.items()):
                if there is connection:
                    del self._active[worker]
            self._changed.notify_all()


class _Worker(Connection):
    """One worker, and its sink."""

    def __init__(self, host: SinkHost, peer: socket.socket, where: str) -> None:
        options = host.options
        super().__init__(peer, where, options.frame_bytes_max, options.send_timeout_s)
        self._host = host
        self._session = SinkSession(SinkTerms(cookie=options.cookie, credits=options.credits))
        self._sinks: dict[int, Sink] = {}
        self._heard = self._since = time.monotonic()
        self.attempt: tuple[int, ...] = ()

    def gone(self, reason: str) -> None:
        for sink in self._sinks.values():
            with contextlib.suppress(Exception):
                sink.close()
        self._host.forget(self)
        if reason != CLOSED:  # as every batch does
            self._host.tell(f"{self._name} is gone: {reason}")

    @property
    def _name(self) -> str:
        worker = self._session.worker
        return f"worker {worker} ({self.where})" if worker else f"a connection ({self.where})"

    def talk(self) -> str:
        while not self.server.stopping.is_set():
            data = self.gathered()
            is_late = time.monotonic() > self._since + self._host.options.idle_timeout_s
            if self._session.state == "initial" and is_late:
                return self.carry_out(self._session.fail("no Hello came in time"))
            if data is None:
                if time.monotonic() > self._heard + self._host.options.idle_timeout_s:
                    return "it said nothing for too long"
                continue
            if not data:
                return CLOSED
            self._heard = time.monotonic()
            try:
                reason = self.carry_out(self._session.receive(self.parser.feed(data)))
            except ProtocolError as error:
                reason = self.carry_out(self._session.fail(str(error)))
            if reason:
                return reason
        return "the sink is stopping"

    def done(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Approve():
                return self._approve(effect)
            case Open(stream=stream):
                return self._open(stream)
            case Append(stream=stream, messages=messages):
                self._append(stream, messages)
            case Prepare(vote=vote):
                return self._session.voted(vote, self._prepare(vote))
            case Resolve(vote=vote, commit=commit):
                return self._resolve(vote, commit)
            case Left(workers=workers):
                self._host.tell(f"workers {', '.join(workers)} will not come back")
            case Note(text=text):
                self._host.tell(text)
        return ()

    # Effects

    def _approve(self, asked: Approve) -> Iterable[Effect]:
        if not WORKER.match(asked.worker):
            return self._session.fail(
                "a worker's name is 1 to 200 letters, digits and . _ @ : / = + -"
            )
        self.attempt = self._session.attempt = attempt_of(asked.program)
        if wrong := self._host.approve(asked.worker, self):
            return self._session.fail(wrong)
        standing = self._host.transactions.standing(asked.worker)
        self._host.greet(asked.worker, standing)
        return self._session.approved(standing)

    def _open(self, stream: int) -> Iterable[Effect]:
        standing = self._session.standing
        try:
            self._sinks[stream] = self._host.make(sink_name(self._session.worker, stream))
            committed, pending = standing.committed_of(stream), standing.pending_of(stream)
            self._sinks[stream].open(committed, pending)
        except Exception as error:
            why = _failed("the target cannot be used", error)
            if isinstance(error, UsageError):
                self._host.give_up(error)
                why = f"{PASSING}{why}"  # until somebody has repaired it, and started it again
            return self._session.fail(why)
        return ()

    def _append(self, stream: int, messages: Sequence[wire.Message]) -> None:
        try:
            failpoint("sink.append")
            self._sinks[stream].append(messages)
        except Exception as error:
            self._session.broken(stream, _failed("could not append", error))

    def _prepare(self, vote: Vote) -> str:
        """Why it cannot be voted for, if it cannot."""
        try:
            failpoint("sink.flush")
            for stretch in vote.stretches:
                self._sinks[stretch.stream].flush()
            failpoint("sink.vote")
            self._save(self._session.with_vote(vote))
            failpoint("sink.voted")
        except Exception as error:
            return _failed("could not flush", error)
        return ""

    def _resolve(self, vote: Vote, commit: bool) -> list[Effect]:
        """The target first: if this is interrupted, the outcome is told again."""
        try:
            failpoint("sink.resolve")
            for stream, start, end in vote.stretches:
                if commit:
                    self._sinks[stream].commit(start, end)
                else:
                    self._sinks[stream].abort(start)
            failpoint("sink.resolved")
            self._save(self._session.with_outcome(vote, commit))
        except Exception as error:
            what = "commit" if commit else "abort"
            return self._session.fail(_failed(f"could not {what} {vote.transaction}", error))
        self._session.resolved(vote, commit)
        return []

    def _save(self, standing: Standing) -> None:
        self._host.transactions.save(self._session.worker, standing)


def attempt_of(program: str) -> tuple[int, ...]:
    """The attempt that a worker says it is: numbers that compare from left to right."""
    found = ATTEMPT.search(program)
    return tuple(int(part or 0) for part in found.group(1).split(".")) if found else ()


def sink_name(worker: str, stream: int) -> str:
    """What the sink of a worker's stream is called: as the worker, where it has only the first."""
    return worker if stream == FIRST_STREAM else f"{worker}#{stream}"


def _failed(what: str, error: Exception) -> str:
    """What the worker is told; marked if the same may succeed a little later."""
    return f"{PASSING if is_passing(error) else ''}{what}: {_told(error)}"


def is_passing(error: Exception) -> bool:
    """Whether the same may succeed a little later: of an error that is not known here, it may.

    What a target's own code raises about a message will be raised about it again.
    """
    if isinstance(error, PenstockError):
        return error.retriable
    return not isinstance(error, ABOUT_DATA)


def _dotted(attempt: Sequence[int]) -> str:
    return ".".join(map(str, attempt))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
