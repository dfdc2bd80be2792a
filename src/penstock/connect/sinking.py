"""One worker's connection as a sink sees it: a state machine without input or output.

    Initial --Hello--> AwaitApproval --> AwaitMessageOrPhase1 <--> AwaitMessageOrPhase2

Frames go in; effects come out, in the order in which they are to be carried out. What is durable
is a worker's `Standing`; whoever carries the effects out saves it, and tells back.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from penstock.connect import wire
from penstock.connect.effects import PASSING, Close, Send, error, plain

State = Literal["initial", "approval", "phase1", "phase2", "closed"]
QUEUED_MAX = 10_000
STREAMS_MAX = 1000
"""A worker may have so many streams; those of Penstock have one."""


class Stretch(NamedTuple):
    """Bytes of a worker's stream: from `start` up to before `end`."""

    stream: int
    start: int
    end: int


class Vote(msgspec.Struct, frozen=True):
    """A transaction that was voted for: a stretch of each stream that has a part in it."""

    transaction: str
    stretches: tuple[Stretch, ...]


class Standing(msgspec.Struct, frozen=True):
    """What a sink knows of a worker, whatever happens.

    Of each stream, everything before what is `committed` is visible; `pending` is kept until its
    outcome is told; `resolved` is the last transaction whose outcome was, and which it was;
    `attempt` the last one that was voted for, so that an older one is refused after a restart too.
    """

    committed: dict[int, int] = {}
    pending: Vote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()

    def streams(self) -> list[int]:
        """The streams that it knows of."""
        waiting = () if self.pending is None else self.pending.stretches
        return sorted({*self.committed, *(stretch.stream for stretch in waiting)})

    def committed_of(self, stream: int) -> int:
        return self.committed.get(stream, 0)

    def pending_of(self, stream: int) -> int | None:
        """Where the bytes end that wait for their outcome; `None` if none do."""
        waiting = () if self.pending is None else self.pending.stretches
        return next((stretch.end for stretch in waiting if stretch.stream == stream), None)

    def kept_of(self, stream: int) -> int:
        """What lies behind this was never voted for, and is gone after a restart."""
        end = self.pending_of(stream)
        return self.committed_of(stream) if end is None else end


class Approve(msgspec.Struct, frozen=True):
    """Find out whether this worker may connect; `approved` or `fail` is the answer."""

    worker: str
    program: str


class Open(msgspec.Struct, frozen=True):
    """Get ready to take messages of this stream; `fail` says that it cannot be done."""

    stream: int


class Append(msgspec.Struct, frozen=True):
    """Take these messages of a stream; `broken` says that they could not be."""

    stream: int
    messages: tuple[wire.Message, ...]


class Prepare(msgspec.Struct, frozen=True):
    """Make these bytes durable and save the vote; `voted` is the answer."""

    vote: Vote


class Resolve(msgspec.Struct, frozen=True):
    """Make these bytes visible, or discard everything from their start; save it, and tell."""

    vote: Vote
    commit: bool


class Left(msgspec.Struct, frozen=True):
    """These workers will not come back."""

    workers: tuple[str, ...]


class Note(msgspec.Struct, frozen=True):
    """Something to tell whoever looks after the sink; nothing is done about it."""

    text: str


Effect = Send | Approve | Open | Append | Prepare | Resolve | Left | Note | Close


class Taking:
    """What has come of a stream, since the worker's last `Hello`."""

    def __init__(self, received: int) -> None:
        self.received = received
        self.has_gap = False
        self.wrong = ""
        """Why messages could not be taken, if they could not."""

    def takes(self, message: wire.Message) -> bool:
        """Whether the message is the next one; a repeated one is dropped, a gap is remembered."""
        if message.message_id == self.received and not self.has_gap:
            self.received += len(message.payload)
            return True
        if message.message_id + len(message.payload) > self.received:
            self.has_gap = True
        return False


class SinkTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink asks of workers, and gives them."""

    cookie: str = ""
    credits: int = 32_768


class SinkSession:
    """The connection's state. Not for several threads at once."""

    def __init__(self, terms: SinkTerms) -> None:
        self._terms = terms
        self.state: State = "initial"
        self.worker = ""
        self.attempt: tuple[int, ...] = ()
        self.standing = Standing()
        self._takings: dict[int, Taking] = {}
        self._queued: list[wire.Frame] = []
        self._used = 0
        self._refused: Vote | None = None
        """The transaction that was voted against, until its abort is told."""

    # Frames

    def receive(self, frames: Iterable[wire.Frame]) -> Iterator[Effect]:
        """What is to be done about frames; nothing after a `Close`.

        Each effect must be carried out, and its answer given, before the next is asked for.
        """
        taken: list[wire.Message] = []
        for frame in frames:
            message = self._of_stream(frame)
            if taken and (message is None or message.stream_id != taken[0].stream_id):
                yield Append(taken[0].stream_id, tuple(taken))
                taken = []
            if message is None:
                yield from self._received(frame)
            else:
                self._used += 1
                if message.stream_id not in self._takings:
                    yield from self._opening(message.stream_id)
            if self.state == "closed":
                return
            if message is not None and self._takings[message.stream_id].takes(message):
                taken.append(message)
        if taken:
            yield Append(taken[0].stream_id, tuple(taken))
        yield from self._acknowledged()

    def _of_stream(self, frame: wire.Frame) -> wire.Message | None:
        """The frame, if it is a message of one of the worker's streams."""
        is_open = self.state in ("phase1", "phase2")
        return frame if isinstance(frame, wire.Message) and frame.stream_id and is_open else None

    def _opening(self, stream: int) -> list[Effect]:
        """Begin with a stream, if it is a new one."""
        if stream in self._takings:
            return []
        if len(self._takings) >= STREAMS_MAX:
            return self.fail(f"a worker has at most {STREAMS_MAX} streams")
        self._takings[stream] = Taking(self.standing.kept_of(stream))
        return [Open(stream)]

    def _acknowledged(self) -> list[Effect]:
        if self._used < self._terms.credits // 4 or self.state == "closed":
            return []
        granted, self._used = self._used, 0
        points = ((stream, self.standing.committed_of(stream)) for stream in self._takings)
        return [Send(wire.Ack(granted, tuple(points)))]

    def _received(self, frame: wire.Frame) -> list[Effect]:
        match self.state:
            case "initial":
                return self._hello(frame)
            case "approval":
                self._queued.append(frame)
                if len(self._queued) > QUEUED_MAX:
                    return self.fail(f"more than {QUEUED_MAX} frames before the answer to Hello")
                return []
            case "closed":
                return []
        match frame:
            case wire.Message():
                self._used += 1
                return self._two_phase(frame)
            case wire.Notify():
                return self._notified(frame)
            case wire.Eos():
                self._used += 1
                return []
            case wire.WorkersLeft():
                return [Left(frame.workers)]
            case wire.Error():
                return [self._over(f"the worker says: {frame.message}")]
        return self.fail(f"{type(frame).__name__} is not for a worker to send now")

    def _hello(self, frame: wire.Frame) -> list[Effect]:
        if not isinstance(frame, wire.Hello):
            return self.fail(f"{type(frame).__name__} before Hello")
        if frame.version not in wire.VERSIONS:
            known = " and ".join(wire.VERSIONS)
            return self.fail(f"version {frame.version!r} is not known here; {known} are")
        if not hmac.compare_digest(frame.cookie.encode(), self._terms.cookie.encode()):
            return self.fail("the cookie is not the sink's")
        self.state = "approval"
        self.worker = frame.instance
        return [Approve(frame.instance, frame.program)]

    def _notified(self, frame: wire.Notify) -> list[Effect]:
        self._used += 1
        if not frame.stream_id:
            return self.fail("stream 0 is that of the two-phase commit")
        opening = self._opening(frame.stream_id)
        if self.state == "closed":
            return opening
        at = self.standing.committed_of(frame.stream_id)
        return [*opening, Send(wire.NotifyAck(True, frame.stream_id, at))]

    def _two_phase(self, message: wire.Message) -> list[Effect]:
        told = wire.two_phase(message)
        match told:
            case wire.ListUncommitted(rtag=rtag):
                pending = self.standing.pending
                listed = () if pending is None else (pending.transaction,)
                return [_reply(wire.ReplyUncommitted(rtag, listed))]
            case wire.Phase1():
                return self._phase1(told)
            case wire.Phase2():
                return self._phase2(told)
            case wire.WorkersLeft():
                return [Left(told.workers)]
        return self.fail(f"{type(told).__name__} is not for a worker to send")

    # Two phases

    def _phase1(self, asked: wire.Phase1) -> list[Effect]:
        if self.state == "phase2":
            return self.fail(f"Phase1 of {asked.transaction} while another one is pending")
        vote = Vote(asked.transaction, tuple(Stretch(*stretch) for stretch in asked.stretches))
        wrong = self._broken_of(vote) or self._why_not(vote)
        return self._refuse(vote, wrong) if wrong else [Prepare(vote)]

    def _broken_of(self, vote: Vote) -> str:
        named = (self._takings.get(stretch.stream) for stretch in vote.stretches)
        return next((taking.wrong for taking in named if taking and taking.wrong), "")

    def _why_not(self, vote: Vote) -> str:
        why = self._mismatch(vote)
        return f"{PASSING}{why}" if why else ""  # a worker that comes again knows better

    def _mismatch(self, vote: Vote) -> str:
        if not vote.stretches:
            return "it names no stretch"
        if len({stretch.stream for stretch in vote.stretches}) < len(vote.stretches):
            return "it names a stream twice"
        return next(filter(None, map(self._mismatch_of, vote.stretches)), "")

    def _mismatch_of(self, stretch: Stretch) -> str:
        stream, start, end = stretch
        taking, committed = self._takings.get(stream), self.standing.committed_of(stream)
        if taking is None:
            return f"it names stream {stream}, which was not asked for"
        if start != committed:
            return f"it starts at {start} in stream {stream}, and {committed} is committed"
        if start > end:
            return f"it starts at {start} in stream {stream} and ends at {end}"
        if taking.has_gap or end != taking.received:
            return (
                f"it ends at {end} in stream {stream}, and what came without a gap ends at "
                f"{taking.received}"
            )
        return ""

    def _refuse(self, vote: Vote, why: str) -> list[Effect]:
        """Vote against it. The protocol has no place for the reason: Penstock's own workers,
        which say their attempt, know that an error behind the vote is that, and no end.
        """
        self._refused = vote
        told: list[Effect] = [
            Note(f"worker {self.worker}: voting against {vote.transaction}: {plain(why)}"),
            _reply(wire.Reply(vote.transaction, False)),
        ]
        return [*told, error(why)] if self.attempt else told

    def voted(self, vote: Vote, wrong: str) -> list[Effect]:
        """The bytes are durable and the vote is saved; or why they are not, and it is not."""
        if wrong:
            for stretch in vote.stretches:
                self.broken(stretch.stream, wrong)
            return self._refuse(vote, wrong)
        self.standing = self.with_vote(vote)
        self.state = "phase2"
        return [_reply(wire.Reply(vote.transaction, True))]

    def _phase2(self, told: wire.Phase2) -> list[Effect]:
        pending = self.standing.pending
        if pending is not None and pending.transaction == told.transaction:
            return [Resolve(pending, told.commit)]
        if self.standing.resolved == (told.transaction, told.commit):
            return []
        if self.standing.resolved == (told.transaction, not told.commit):
            return self.fail(f"{told.transaction} was resolved before, and the other way")
        refused = self._refused
        if not told.commit and refused is not None and told.transaction == refused.transaction:
            return [Resolve(self._since_committed(refused), False)]
        what = "commit" if told.commit else "abort"
        return [
            Note(f"worker {self.worker}: {what} of {told.transaction}, which is not known: ignored")
        ]

    def _since_committed(self, refused: Vote) -> Vote:
        """Everything that came of the streams that a refused transaction named."""
        streams = {s.stream for s in refused.stretches if s.stream in self._takings}
        stretches = (
            Stretch(stream, self.standing.committed_of(stream), self._takings[stream].received)
            for stream in sorted(streams)
        )
        return Vote(refused.transaction, tuple(stretches))

    def resolved(self, vote: Vote, commit: bool) -> None:
        """The outcome was carried out and saved."""
        self.standing = self.with_outcome(vote, commit)
        self.state = "phase1"
        self._refused = None
        if not commit:
            for stretch in vote.stretches:
                self._takings[stretch.stream] = Taking(stretch.start)

    def with_vote(self, vote: Vote) -> Standing:
        """Where the worker stands once this vote is given."""
        return msgspec.structs.replace(self.standing, pending=vote, attempt=self.attempt)

    def with_outcome(self, vote: Vote, commit: bool) -> Standing:
        """Where the worker stands once this outcome is carried out."""
        ends = {s.stream: s.end for s in vote.stretches} if commit else {}
        return msgspec.structs.replace(
            self.standing, committed={**self.standing.committed, **ends}, pending=None,
            resolved=(vote.transaction, commit),
        )  # fmt: skip

    # What is decided outside

    def approved(self, standing: Standing) -> Iterator[Effect]:
        """The worker may connect; this is where it stands."""
        self.standing = standing
        for stream in standing.streams():
            yield from self._opening(stream)
        if self.state == "closed":
            return
        self.state = "phase1" if standing.pending is None else "phase2"
        queued, self._queued = self._queued, []
        yield Send(wire.Ok(self._terms.credits))
        yield from self.receive(queued)

    def broken(self, stream: int, reason: str) -> None:
        """Messages could not be taken: the next vote is against. A reason that may not hold for
        long begins with `PASSING`.
        """
        taking = self._takings[stream]
        taking.has_gap, taking.wrong = True, reason

    def fail(self, reason: str) -> list[Effect]:
        """End the connection, telling why."""
        return [error(reason), self._over(reason)]

    def _over(self, reason: str) -> Close:
        self.state = "closed"
        return Close(reason)


def _reply(message: wire.TwoPhase) -> Send:
    return Send(wire.Message(0, 0, 0, None, wire.two_phase_payload(message)))
