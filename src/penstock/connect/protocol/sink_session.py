"""One worker's connection from a sink's point of view: a state machine without I/O.

    Initial --Hello--> AwaitApproval --> AwaitMessageOrPhase1 <--> AwaitMessageOrPhase2

Frames go in; effects come out, in the order in which they are to be carried out. A worker's
`WorkerStanding` is durable: the code that carries out the effects saves it, and reports back.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import PASSING, Close, Send, error, plain
from penstock.connect.protocol.marks import STAGED

SinkState = Literal["initial", "approval", "phase1", "phase2", "closed"]
QUEUED_MAX = 10_000
STREAMS_MAX = 1000
"""How many streams a worker may have; Penstock's own workers have one."""


class Stretch(NamedTuple):
    """Bytes of a worker's stream: from `start` up to, but excluding, `end`."""

    stream: int
    start: int
    end: int


class Vote(msgspec.Struct, frozen=True):
    """A transaction that was voted for: a stretch of each stream that takes part in it."""

    transaction: str
    stretches: tuple[Stretch, ...]


class WorkerStanding(msgspec.Struct, frozen=True):
    """What a sink durably knows about a worker.

    For each stream, everything before `committed` is to become visible. `pending` is kept until
    its outcome is known. `resolved` is the last transaction whose outcome is known, with that
    outcome. `attempt` is the last attempt that was voted for, so that an older one is refused
    after a restart.
    """

    committed: dict[int, int] = {}
    pending: Vote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()

    def streams(self) -> list[int]:
        """The streams that the sink knows for this worker."""
        waiting = () if self.pending is None else self.pending.stretches
        return sorted({*self.committed, *(stretch.stream for stretch in waiting)})

    def committed_of(self, stream: int) -> int:
        return self.committed.get(stream, 0)

    def pending_of(self, stream: int) -> int | None:
        """The end of the bytes that await their outcome; `None` if none do."""
        waiting = () if self.pending is None else self.pending.stretches
        return next((stretch.end for stretch in waiting if stretch.stream == stream), None)

    def kept_of(self, stream: int) -> int:
        """Everything after this was never voted for, and is lost on a restart."""
        end = self.pending_of(stream)
        return self.committed_of(stream) if end is None else end


class Approve(msgspec.Struct, frozen=True):
    """Find out whether this worker may connect; `admit` or `fail` is the answer."""

    worker: str
    program: str


class Open(msgspec.Struct, frozen=True):
    """Find out the position of this stream; `start_stream` or `fail` is the answer."""

    stream: int


class Append(msgspec.Struct, frozen=True):
    """Stage these messages of a stream; `break_off` is the answer if that fails."""

    stream: int
    messages: tuple[wire.Message, ...]


class Prepare(msgspec.Struct, frozen=True):
    """Make these bytes durable and save the vote; `finish_vote` is the answer."""

    vote: Vote


class Resolve(msgspec.Struct, frozen=True):
    """Save the outcome; `finish_outcome` is the answer. An abort discards everything from the
    start of these bytes.
    """

    vote: Vote
    commit: bool


class Acknowledge(msgspec.Struct, frozen=True):
    """Send an ACK with credits, and with the target's position in these streams."""

    credits: int
    streams: tuple[int, ...]


class Left(msgspec.Struct, frozen=True):
    """These workers will not return."""

    workers: tuple[str, ...]


class Note(msgspec.Struct, frozen=True):
    """Information for the sink's operator; it requires no action."""

    text: str


SinkEffect = Send | Approve | Open | Append | Prepare | Resolve | Acknowledge | Left | Note | Close


class Taking:
    """What was received of a stream since the worker's last `Hello`."""

    def __init__(self, received: int) -> None:
        self.received = received
        self.has_gap = False
        self.wrong: str | None = None
        """Why messages could not be staged, if staging failed."""

    def take(self, message: wire.Message) -> bool:
        """Whether the message is the next one; a repeat is dropped, a gap is remembered."""
        if message.message_id == self.received and not self.has_gap:
            self.received += len(message.payload)
            return True
        if message.message_id + len(message.payload) > self.received:
            self.has_gap = True
        return False


class SinkTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink requires of workers, and grants them."""

    cookie: str = ""
    credits: int = 32_768


class SinkSession:
    """The connection's state. Not thread-safe."""

    def __init__(self, terms: SinkTerms) -> None:
        self._terms = terms
        self.state: SinkState = "initial"
        self.worker = ""
        self.attempt: tuple[int, ...] = ()
        self.standing = WorkerStanding()
        self._takings: dict[int, Taking] = {}
        self._queued: list[wire.Frame] = []
        self._used = 0
        self._refused: Vote | None = None
        """The transaction that was voted against, until its abort is received."""

    # Frames

    def receive(self, frames: Iterable[wire.Frame]) -> Iterator[SinkEffect]:
        """The effects of frames; none after a `Close`.

        Each effect must be carried out, and its answer given, before the next is requested.
        """
        taken: list[wire.Message] = []
        for frame in frames:
            message = self._as_data(frame)
            if taken and (message is None or message.stream_id != taken[0].stream_id):
                yield Append(taken[0].stream_id, tuple(taken))
                taken = []
            if message is None:
                yield from self._handle(frame)
            else:
                self._used += 1
                yield from self._open(message.stream_id)
            if self.state == "closed":
                return
            if message is not None and self._takings[message.stream_id].take(message):
                taken.append(message)
        if taken:
            yield Append(taken[0].stream_id, tuple(taken))
        if self._used >= self._terms.credits // 4 and self.state != "closed":
            granted, self._used = self._used, 0
            yield Acknowledge(granted, tuple(self._takings))

    def _as_data(self, frame: wire.Frame) -> wire.Message | None:
        """The frame, if it is a message of one of the worker's streams."""
        is_open = self.state in ("phase1", "phase2")
        return frame if isinstance(frame, wire.Message) and frame.stream_id and is_open else None

    def _open(self, stream: int) -> list[SinkEffect]:
        """Open a stream, if it is new."""
        if stream in self._takings:
            return []
        if stream == STAGED:
            return self.fail(f"{stream} is not a valid stream id")
        if len(self._takings) >= STREAMS_MAX:
            return self.fail(f"a worker can have at most {STREAMS_MAX} streams")
        return [Open(stream)]

    def start_stream(self, stream: int, committed: int) -> None:
        """Accept the stream, which is committed up to here."""
        ends = {**self.standing.committed, stream: committed}
        self.standing = msgspec.structs.replace(self.standing, committed=ends)
        self._takings[stream] = Taking(self.standing.kept_of(stream))

    def _handle(self, frame: wire.Frame) -> Iterable[SinkEffect]:
        match self.state:
            case "initial":
                return self._hello(frame)
            case "approval":
                self._queued.append(frame)
                if len(self._queued) > QUEUED_MAX:
                    return self.fail(
                        f"more than {QUEUED_MAX} frames were sent before the answer to Hello"
                    )
                return []
            case "closed":
                return []
        match frame:
            case wire.Message():
                self._used += 1
                return self._two_phase(frame)
            case wire.Notify():
                return self._notify(frame)
            case wire.Eos():
                self._used += 1
                return []
            case wire.WorkersLeft():
                return [Left(frame.workers)]
            case wire.Error():
                return [self._close(f"the worker reports: {frame.message}")]
        return self.fail(f"a worker cannot send {type(frame).__name__} now")

    def _hello(self, frame: wire.Frame) -> list[SinkEffect]:
        if not isinstance(frame, wire.Hello):
            return self.fail(f"{type(frame).__name__} was sent before Hello")
        if frame.version not in wire.VERSIONS:
            known = " and ".join(wire.VERSIONS)
            return self.fail(f"unknown protocol version {frame.version!r}; supported: {known}")
        if not hmac.compare_digest(frame.cookie.encode(), self._terms.cookie.encode()):
            return self.fail("wrong cookie")
        self.state = "approval"
        self.worker = frame.instance
        return [Approve(frame.instance, frame.program)]

    def _notify(self, frame: wire.Notify) -> Iterator[SinkEffect]:
        """Answer with the stream's committed position, followed for Penstock's own workers by how
        much of it is applied.
        """
        self._used += 1
        if not frame.stream_id:
            yield from self.fail("stream 0 is reserved for the two-phase commit")
            return
        yield from self._open(frame.stream_id)
        if self.state != "closed":
            at = self.standing.committed_of(frame.stream_id)
            yield Send(wire.NotifyAck(True, frame.stream_id, at))
            if self.attempt:
                yield Acknowledge(0, (frame.stream_id,))

    def _two_phase(self, message: wire.Message) -> list[SinkEffect]:
        request = wire.two_phase(message)
        match request:
            case wire.ListUncommitted(rtag=rtag):
                pending = self.standing.pending
                listed = () if pending is None else (pending.transaction,)
                return [_reply(wire.ReplyUncommitted(rtag, listed))]
            case wire.Phase1():
                return self._phase1(request)
            case wire.Phase2():
                return self._phase2(request)
            case wire.WorkersLeft():
                return [Left(request.workers)]
        return self.fail(f"a worker cannot send {type(request).__name__}")

    # Two phases

    def _phase1(self, asked: wire.Phase1) -> list[SinkEffect]:
        if self.state == "phase2":
            return self.fail(
                f"Phase1 of {asked.transaction} was sent while another transaction is pending"
            )
        vote = Vote(asked.transaction, tuple(Stretch(*stretch) for stretch in asked.stretches))
        wrong = self._find_break(vote) or self._find_mismatch(vote)
        return self._refuse(vote, wrong) if wrong else [Prepare(vote)]

    def _find_break(self, vote: Vote) -> str | None:
        named = (self._takings.get(stretch.stream) for stretch in vote.stretches)
        return next((taking.wrong for taking in named if taking and taking.wrong), None)

    def _find_mismatch(self, vote: Vote) -> str | None:
        why = self._mismatch(vote)
        return f"{PASSING}{why}" if why else None  # after reconnecting, the worker knows better

    def _mismatch(self, vote: Vote) -> str | None:
        if not vote.stretches:
            return "it names no stretch"
        if len({stretch.stream for stretch in vote.stretches}) < len(vote.stretches):
            return "it names a stream twice"
        return next(filter(None, map(self._mismatch_of, vote.stretches)), None)

    def _mismatch_of(self, stretch: Stretch) -> str | None:
        stream, start, end = stretch
        taking, committed = self._takings.get(stream), self.standing.committed_of(stream)
        if taking is None:
            return f"it names stream {stream}, which this connection has not opened"
        if start != committed:
            return f"it starts at {start} in stream {stream}, but {committed} is committed"
        if start > end:
            return f"it starts at {start} in stream {stream}, but ends at {end}"
        if taking.has_gap or end != taking.received:
            return (
                f"it ends at {end} in stream {stream}, but what was received without a gap ends at "
                f"{taking.received}"
            )
        return None

    def _refuse(self, vote: Vote, why: str) -> list[SinkEffect]:
        """Vote against it. The protocol has no field for the reason: Penstock's own workers, which
        state their attempt, know that an ERROR after the vote is its reason, and not the end.
        """
        self._refused = vote
        answer: list[SinkEffect] = [
            Note(f"worker {self.worker}: voting against {vote.transaction}: {plain(why)}"),
            _reply(wire.Reply(vote.transaction, False)),
        ]
        return [*answer, error(why)] if self.attempt else answer

    def finish_vote(self, vote: Vote, wrong: str | None) -> list[SinkEffect]:
        """Answer with the vote: the bytes are durable and it is saved, or `wrong` says why not."""
        if wrong:
            for stretch in vote.stretches:
                self.break_off(stretch.stream, wrong)
            return self._refuse(vote, wrong)
        self.standing = self.with_vote(vote)
        self.state = "phase2"
        return [_reply(wire.Reply(vote.transaction, True))]

    def _phase2(self, outcome: wire.Phase2) -> list[SinkEffect]:
        pending = self.standing.pending
        if pending is not None and pending.transaction == outcome.transaction:
            return [Resolve(pending, outcome.commit)]
        if self.standing.resolved == (outcome.transaction, outcome.commit):
            return []
        if self.standing.resolved == (outcome.transaction, not outcome.commit):
            return self.fail(
                f"{outcome.transaction} was resolved before, with the opposite outcome"
            )
        refused = self._refused
        if (
            not outcome.commit
            and refused is not None
            and outcome.transaction == refused.transaction
        ):
            return [Resolve(self._widen(refused), False)]
        what = "commit" if outcome.commit else "abort"
        return [
            Note(
                f"worker {self.worker}: ignored {what} of unknown transaction {outcome.transaction}"
            )
        ]

    def _widen(self, refused: Vote) -> Vote:
        """The refused transaction, widened to everything received of the streams it named."""
        streams = {s.stream for s in refused.stretches if s.stream in self._takings}
        stretches = (
            Stretch(stream, self.standing.committed_of(stream), self._takings[stream].received)
            for stream in sorted(streams)
        )
        return Vote(refused.transaction, tuple(stretches))

    def finish_outcome(self, vote: Vote, commit: bool) -> None:
        """Note that the outcome is saved."""
        self.standing = self.with_outcome(vote, commit)
        self.state = "phase1"
        self._refused = None
        if not commit:
            for stretch in vote.stretches:
                self._takings[stretch.stream] = Taking(stretch.start)

    def with_vote(self, vote: Vote) -> WorkerStanding:
        """The worker's standing once this vote is given."""
        return msgspec.structs.replace(self.standing, pending=vote, attempt=self.attempt)

    def with_outcome(self, vote: Vote, commit: bool) -> WorkerStanding:
        """The worker's standing once this outcome is saved."""
        ends = {s.stream: s.end for s in vote.stretches} if commit else {}
        return msgspec.structs.replace(
            self.standing, committed={**self.standing.committed, **ends}, pending=None,
            resolved=(vote.transaction, commit),
        )  # fmt: skip

    # What is decided outside

    def admit(self, standing: WorkerStanding) -> Iterator[SinkEffect]:
        """Let the worker connect, with this standing."""
        self.standing = standing
        for stream in standing.streams():
            yield from self._open(stream)
        if self.state == "closed":
            return
        self.state = "phase1" if standing.pending is None else "phase2"
        queued, self._queued = self._queued, []
        yield Send(wire.Ok(self._terms.credits))
        yield from self.receive(queued)

    def break_off(self, stream: int, reason: str) -> None:
        """Note that messages could not be staged, so that the next vote is against. A reason that
        may be temporary starts with `PASSING`.
        """
        taking = self._takings[stream]
        taking.has_gap, taking.wrong = True, reason

    def fail(self, reason: str) -> list[SinkEffect]:
        """End the connection, reporting the reason."""
        return [error(reason), self._close(reason)]

    def _close(self, reason: str) -> Close:
        self.state = "closed"
        return Close(reason)


def _reply(message: wire.TwoPhase) -> Send:
    return Send(wire.Message(0, 0, 0, None, wire.two_phase_payload(message)))
