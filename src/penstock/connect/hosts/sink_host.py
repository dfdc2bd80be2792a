"""The host of a sink's target: listens for workers, stages what they send, votes, applies.

    with SinkHost(Lines, "lines", SinkOptions(address="127.0.0.1:6068")) as host:
        ...

The host handles the protocol, transactions, marks and failures; everything specific to a target
is in its `SinkTarget` (hosts/targets). docs/connectors.md has a working example.
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
from typing import Self

import msgspec

from penstock.connect.hosts.applier import ApplierHooks, SinkApplier
from penstock.connect.hosts.refusals import compose_refusal, find_refusals
from penstock.connect.hosts.server import Connection, Server
from penstock.connect.hosts.spool import (
    SPOOL_BYTES_MAX,
    Spool,
    Stage,
    StageMarks,
    sink_name,
)
from penstock.connect.hosts.targets import (
    SinkMessage,
    SinkTarget,
    TargetMaker,
    describe,
    is_passing,
)
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import CLOSED, PASSING, Send
from penstock.connect.protocol.marks import encode_progress
from penstock.connect.protocol.sink_session import (
    Acknowledge,
    Append,
    Approve,
    Left,
    Note,
    Open,
    Prepare,
    Resolve,
    SinkEffect,
    SinkSession,
    SinkTerms,
    Vote,
    WorkerStanding,
)
from penstock.errors import ProtocolError, UsageError
from penstock.failpoints import failpoint

TAKEOVER_S = 10.0
WORKER = re.compile(r"[\w.@:/=+-]{1,200}\Z")
ATTEMPT = re.compile(r"attempt=([\d.]{1,100})\Z")


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a sink. A connection that sends nothing for `idle_timeout_s` is closed.

    While `spool_bytes_max` committed bytes are waiting for the target, the sink votes against
    further transactions. A frame may be larger than the largest event of a log: the event's JSON is
    longer than its columns.
    """

    address: str = "127.0.0.1:0"
    cookie: str = ""
    credits: int = 32_768
    frame_bytes_max: int = 8 * wire.FRAME_BYTES_MAX
    connections_max: int = 1000
    idle_timeout_s: float = 60.0
    send_timeout_s: float = 30.0
    spool_bytes_max: int = SPOOL_BYTES_MAX


class SinkHost:
    """Listens for workers for the duration of its block, and stages what they send in `folder`.

    `make` returns the target of a worker by its name; if a worker of another program has further
    streams, each has a target of its own, named `WORKER#STREAM`. Without `make` nothing is
    applied: committed messages stay in the spool until they are read from there.
    """

    def __init__(
        self,
        make: TargetMaker | None,
        folder: Path | str,
        options: SinkOptions = SinkOptions(),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.make = make
        self.options = options
        self.tell = tell
        self.spool = Spool(Path(folder), options.spool_bytes_max)
        self._appliers: dict[str, SinkApplier] = {}
        self._active: dict[str, _SinkConnection] = {}
        self._latest: dict[str, tuple[int, ...]] = {}
        self._standings: dict[str, WorkerStanding] = {}
        self._known: set[str] = set()
        self._failure: UsageError | None = None
        self._changed = threading.Condition()
        self._server = Server(
            options.address, options.connections_max,
            lambda peer, where: _SinkConnection(self, peer, where), tell,
        )  # fmt: skip
        self._exits = contextlib.ExitStack()

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens at, including the port that was assigned."""
        return self._server.address

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            self.spool.open()
            exits.callback(self.spool.close)
            self.spool.forget_left()
            self._standings = self.spool.standings()
            exits.callback(self._stop_appliers)
            for name in self.spool.names_with_commits():
                self.wake(name)
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

    def _stop_appliers(self) -> None:
        for applier in self._appliers.values():
            applier.stop()

    def check(self) -> None:
        """Raise the error that makes the target unusable, if one was found."""
        if self._failure is not None:
            raise self._failure

    def give_up(self, failure: UsageError) -> None:
        """Note that the target cannot be used as it is, and that someone has to repair it."""
        self._failure = failure

    # Workers

    def approve(self, worker: str, connection: _SinkConnection) -> str | None:
        """Why the worker may not connect: it is connected already, or was with a later attempt."""
        deadline = time.monotonic() + TAKEOVER_S
        with self._changed:
            while True:
                latest = max(self._latest.get(worker, ()), self._find_saved(worker).attempt)
                if connection.attempt < latest:  # a zombie: a newer one has connected
                    return (
                        f"attempt {_format(connection.attempt)} of worker {worker} is older than "
                        f"{_format(latest)}, which has connected before: another query has taken "
                        "over, or the log was recreated and this sink needs a new folder"
                    )
                there = self._active.get(worker)
                if there is None:
                    break
                if connection.attempt <= there.attempt:
                    return f"{PASSING}worker {worker} is already connected"
                there.interrupt()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return f"{PASSING}worker {worker} is already connected, and busy"
            self._active[worker] = connection
            self._latest[worker] = connection.attempt
            return None

    def _find_saved(self, worker: str) -> WorkerStanding:
        return self._standings.get(worker, WorkerStanding())

    def standing(self, worker: str) -> WorkerStanding:
        """What is known about a worker; about each stream, as far as the spool has it."""
        saved = self._find_saved(worker)
        marks = {s: self.spool.marks(sink_name(worker, s)) for s in saved.streams()}
        committed = {s: found.committed.offset for s, found in marks.items() if found}
        pending = saved.pending
        for stretch in pending.stretches if pending else ():
            found = marks.get(stretch.stream)
            if found is None or found.voted is None:  # the target was found elsewhere since
                pending = None
        return msgspec.structs.replace(saved, committed=committed, pending=pending)

    def keep(self, worker: str, standing: WorkerStanding) -> None:
        """Remember a worker's standing, which has been saved."""
        with self._changed:
            self._standings[worker] = standing

    def greet(self, worker: str, standing: WorkerStanding) -> None:
        """Report a worker when it connects first; it connects again for every batch."""
        with self._changed:
            is_known = worker in self._known
            self._known.add(worker)
        if not is_known:
            waiting = "" if standing.pending is None else ", one transaction awaits its outcome"
            total = sum(standing.committed.values())
            self.tell(f"worker {worker} connected: {total:,} bytes committed{waiting}")

    def forget(self, connection: _SinkConnection) -> None:
        with self._changed:
            for worker, there in list(self._active.items()):
                if there is connection:
                    del self._active[worker]
            self._changed.notify_all()

    def release(self, workers: Sequence[str]) -> None:
        """Release workers that will not return: undecided messages are discarded, committed ones
        are applied, and the workers' positions are remembered for a while.
        """
        for worker in workers:
            with self._changed:
                saved = self._standings.get(worker)
                if saved is None or worker in self._active:
                    continue
                standing = msgspec.structs.replace(saved, pending=None)
                self._standings[worker] = standing
            names = [sink_name(worker, stream) for stream in saved.streams()]
            self.spool.leave(worker, standing, names)
        self.tell(f"workers {', '.join(workers)} will not return")

    # Streams

    def open_stage(self, worker: str, stream: int) -> Stage:
        """The stage for messages of the stream; asks the target if the spool does not know it."""
        name = sink_name(worker, stream)
        if self.spool.marks(name) is None:
            start = StageMarks().applied
            if self.make is not None:
                start = self._applier(name).find_start()
            self.spool.adopt(name, start)
        elif self.make is not None:
            self.wake(name)  # the target may not be the one it was before
        return self.spool.begin(name)

    def marks(self, name: str) -> StageMarks:
        """How far a stream is. If nothing is ever applied, committed messages count as applied."""
        found = self.spool.marks(name) or StageMarks()
        return found if self.make is not None else found._replace(applied=found.committed)

    def find_refusals(self, stage: Stage, messages: Sequence[SinkMessage]) -> None:
        """Note the messages that the target can never accept. Raises if that cannot be checked."""
        if self.make is None:
            return
        target = self._applier(stage.name).target
        if type(target).check is not SinkTarget.check:
            first = stage.at.messages - self.marks(stage.name).committed.messages
            find_refusals(target.check, messages, first, stage.refusals)

    def wake(self, name: str) -> None:
        """Called when something was committed, or may have to be reconciled."""
        if self.make is not None:
            self._applier(name).wake()

    def _applier(self, name: str) -> SinkApplier:
        assert self.make is not None  # noqa: S101  there is a target
        with self._changed:
            if name not in self._appliers:
                hooks = ApplierHooks(self.tell, self.give_up, self._reset)
                self._appliers[name] = SinkApplier(name, self.make(name), self.spool, hooks)
            return self._appliers[name]

    def _reset(self, name: str) -> None:
        """Disconnect the worker: its stream's position is not the one that the worker was told."""
        with self._changed:
            for worker, connection in self._active.items():
                if name == worker or name.startswith(f"{worker}#"):
                    connection.interrupt()


class _SinkConnection(Connection):
    """One worker's connection, and where its messages are staged."""

    def __init__(self, host: SinkHost, peer: socket.socket, where: str) -> None:
        options = host.options
        super().__init__(peer, where, options.frame_bytes_max, options.send_timeout_s)
        self._host = host
        self._session = SinkSession(SinkTerms(cookie=options.cookie, credits=options.credits))
        self._stages: dict[int, Stage] = {}
        self._heard = self._since = time.monotonic()
        self.attempt: tuple[int, ...] = ()

    def let_go(self, reason: str) -> None:
        self._host.forget(self)
        if reason != CLOSED:  # as at the end of every batch
            self._host.tell(f"{self._name} disconnected: {reason}")

    @property
    def _name(self) -> str:
        worker = self._session.worker
        return f"worker {worker} ({self.where})" if worker else f"a connection ({self.where})"

    def talk(self) -> str:
        while not self.server.stopping.is_set():
            data = self.gather()
            is_late = time.monotonic() > self._since + self._host.options.idle_timeout_s
            if self._session.state == "initial" and is_late:
                late = "no Hello was received in time"
                return self.carry_out(self._session.fail(late)) or late
            if data is None:
                if time.monotonic() > self._heard + self._host.options.idle_timeout_s:
                    return "it sent nothing for too long"
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

    def perform(self, effect: SinkEffect) -> Iterable[SinkEffect]:
        match effect:
            case Approve():
                return self._approve(effect)
            case Open(stream=stream):
                return self._open(stream)
            case Append(stream=stream, messages=messages):
                self._append(stream, messages)
            case Prepare(vote=vote):
                return self._session.finish_vote(vote, self._prepare(vote))
            case Resolve(vote=vote, commit=commit):
                return self._resolve(vote, commit)
            case Acknowledge(credits=credits, streams=streams):
                return [Send(wire.Ack(credits, self._progress(streams)))]
            case Left(workers=workers):
                self._host.release(workers)
            case Note(text=text):
                self._host.tell(text)
        return ()

    # Effects

    def _approve(self, asked: Approve) -> Iterable[SinkEffect]:
        if not WORKER.match(asked.worker):
            return self._session.fail(
                "a worker's name must be 1 to 200 letters, digits and . _ @ : / = + -"
            )
        self.attempt = self._session.attempt = parse_attempt(asked.program)
        if wrong := self._host.approve(asked.worker, self):
            return self._session.fail(wrong)
        standing = self._host.standing(asked.worker)
        self._host.greet(asked.worker, standing)
        return self._session.admit(standing)

    def _open(self, stream: int) -> Iterable[SinkEffect]:
        try:
            self._stages[stream] = stage = self._host.open_stage(self._session.worker, stream)
        except Exception as error:
            why = _explain("the target cannot be used", error)
            if isinstance(error, UsageError):
                self._host.give_up(error)
                why = f"{PASSING}{why}"  # until someone has repaired and restarted it
            return self._session.fail(why)
        self._session.start_stream(stream, self._host.marks(stage.name).committed.offset)
        return ()

    def _progress(self, streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The contents of an ACK: how far streams are applied. Penstock's own workers also get the
        number of messages, so that they know what the sink is missing.
        """
        named = ((s, self._host.marks(self._stages[s].name)) for s in streams)
        if self.attempt and len(streams) == 1:
            return next(encode_progress(s, marks.applied, marks.committed) for s, marks in named)
        return tuple((s, marks.applied.offset) for s, marks in named)

    def _append(self, stream: int, messages: Sequence[wire.Message]) -> None:
        stage = self._stages[stream]
        taken = [SinkMessage(m.key, m.event_time, m.payload) for m in messages]
        try:
            failpoint("sink.append")
            self._host.spool.check_room()
            self._host.find_refusals(stage, taken)
            self._host.spool.add(stage, taken)
        except Exception as error:
            self._session.break_off(stream, _explain("could not stage messages", error))

    def _prepare(self, vote: Vote) -> str | None:
        """Save the vote; return why it must be against, if it must."""
        stages = [self._stages[stretch.stream] for stretch in vote.stretches]
        try:
            if refusals := [refusal for stage in stages for refusal in stage.refusals]:
                return compose_refusal(refusals)
            failpoint("sink.vote")
            standing = self._session.with_vote(vote)
            self._host.spool.save_vote(self._session.worker, standing, stages)
            self._host.keep(self._session.worker, standing)
            failpoint("sink.voted")
        except Exception as error:
            return _explain("could not save the vote", error)
        return None

    def _resolve(self, vote: Vote, commit: bool) -> list[SinkEffect]:
        stages = [self._stages[stretch.stream] for stretch in vote.stretches]
        try:
            failpoint("sink.resolve")
            standing = self._session.with_outcome(vote, commit)
            self._host.spool.save_outcome(self._session.worker, standing, stages, commit)
            self._host.keep(self._session.worker, standing)
            failpoint("sink.resolved")
        except Exception as error:
            what = "commit" if commit else "abort"
            return self._session.fail(_explain(f"could not {what} {vote.transaction}", error))
        self._session.finish_outcome(vote, commit)
        for stage in stages:
            self._host.wake(stage.name)
        return []


def parse_attempt(program: str) -> tuple[int, ...]:
    """The attempt that a worker states: numbers that are compared from left to right."""
    found = ATTEMPT.search(program)
    return tuple(int(part or 0) for part in found.group(1).split(".")) if found else ()


def _explain(what: str, error: Exception) -> str:
    """The message for the worker, marked if the same request may succeed later."""
    return f"{PASSING if is_passing(error) else ''}{what}: {describe(error)}"


def _format(attempt: Sequence[int]) -> str:
    return ".".join(map(str, attempt))
