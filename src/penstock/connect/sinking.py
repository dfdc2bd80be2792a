"""One worker's connection as a sink sees it: a state machine without input or output.

    Initial --Hello--> AwaitApproval --> AwaitMessageOrPhase1 <--> AwaitMessageOrPhase2

Frames go in; effects come out, in the order in which they are to be carried out. What is durable
is a worker's `Standing`; whoever carries the effects out saves it, and tells back.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from penstock.connect import wire
from penstock.connect.effects import Close, Send, error

State = Literal["initial", "approval", "phase1", "phase2", "closed"]
QUEUED_MAX = 10_000


class Vote(msgspec.Struct, frozen=True):
    """A transaction that was voted for: the bytes from `start` up to before `end`."""

    transaction: str
    start: int
    end: int


class Standing(msgspec.Struct, frozen=True):
    """What a sink knows of a worker, whatever happens.

    Everything before `committed` is visible; `pending` is kept until its outcome is told;
    `resolved` is the last transaction whose outcome was, and which it was; `attempt` the last one
    that was voted for, so that an older one is refused after a restart too.
    """

    committed: int = 0
    pending: Vote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()

    @property
    def kept(self) -> int:
        """What lies behind this was never voted for, and is gone after a restart."""
        return self.committed if self.pending is None else self.pending.end


class Approve(msgspec.Struct, frozen=True):
    """Find out whether this worker may connect; `approved` or `fail` is the answer."""

    worker: str
    program: str


class Append(msgspec.Struct, frozen=True):
    """Take these messages; `broken` says that they could not be."""

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


Effect = Send | Approve | Append | Prepare | Resolve | Left | Note | Close


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
        self.received = 0
        """Up to where the worker's bytes have come, since its last `Hello`."""
        self._has_gap = False
        self._wrong = ""
        """Why messages could not be taken, if they could not."""
        self._queued: list[wire.Frame] = []
        self._used = 0
        self._refused: str | None = None
        """The transaction that was voted against, until its abort is told."""

    # Frames

    def receive(self, frames: Iterable[wire.Frame]) -> Iterator[Effect]:
        """What is to be done about frames; nothing after a `Close`.

        Each effect must be carried out, and its answer given, before the next is asked for.
        """
        taken: list[wire.Message] = []
        for frame in frames:
            if isinstance(frame, wire.Message) and frame.stream_id and self._is_open:
                self._used += 1
                if self._takes(frame):
                    taken.append(frame)
                continue
            if taken:
                yield Append(tuple(taken))
                taken = []
            yield from self._received(frame)
            if self.state == "closed":
                return
        if taken:
            yield Append(tuple(taken))
        yield from self._acknowledged()

    @property
    def _is_open(self) -> bool:
        return self.state in ("phase1", "phase2")

    def _takes(self, message: wire.Message) -> bool:
        """Whether the message is the next one; a repeated one is dropped, a gap is remembered."""
        if message.message_id == self.received and not self._has_gap:
            self.received += len(message.payload)
            return True
        if message.message_id + len(message.payload) > self.received:
            self._has_gap = True
        return False

    def _acknowledged(self) -> list[Effect]:
        if self._used < self._terms.credits // 4 or self.state == "closed":
            return []
        granted, self._used = self._used, 0
        return [Send(wire.Ack(granted, ((1, self.standing.committed),)))]

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
                self._used += 1
                answer = wire.NotifyAck(True, frame.stream_id, self.standing.committed)
                return [Send(answer)]
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
        wrong = self._why_not(asked)
        if wrong:
            self._refused = asked.transaction
            return [
                Note(f"worker {self.worker}: voting against {asked.transaction}: {wrong}"),
                _reply(wire.Reply(asked.transaction, False)),
            ]
        _, start, end = asked.stretches[0]
        return [Prepare(Vote(asked.transaction, start, end))]

    def _why_not(self, asked: wire.Phase1) -> str:
        if len(asked.stretches) != 1:
            return f"it names {len(asked.stretches)} stretches, not one"
        _, start, end = asked.stretches[0]
        if start != self.standing.committed:
            return f"it starts at {start}, and {self.standing.committed} is committed"
        if start > end:
            return f"it starts at {start} and ends at {end}"
        if self._wrong:
            return self._wrong
        if self._has_gap or end != self.received:
            return f"it ends at {end}, and what came without a gap ends at {self.received}"
        return ""

    def voted(self, vote: Vote, durable: bool) -> list[Effect]:
        """The bytes are durable and the vote is saved; or it failed, and nothing is."""
        if not durable:
            self._has_gap = True
            self._refused = vote.transaction
            return [_reply(wire.Reply(vote.transaction, False))]
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
        if not told.commit and told.transaction == self._refused:
            start = self.standing.committed
            return [Resolve(Vote(told.transaction, start, self.received), False)]
        what = "commit" if told.commit else "abort"
        return [
            Note(f"worker {self.worker}: {what} of {told.transaction}, which is not known: ignored")
        ]

    def resolved(self, vote: Vote, commit: bool) -> None:
        """The outcome was carried out and saved."""
        self.standing = self.with_outcome(vote, commit)
        self.state = "phase1"
        self._refused = None
        if not commit:
            self.received = vote.start
            self._has_gap = False
            self._wrong = ""

    def with_vote(self, vote: Vote) -> Standing:
        """Where the worker stands once this vote is given."""
        return msgspec.structs.replace(self.standing, pending=vote, attempt=self.attempt)

    def with_outcome(self, vote: Vote, commit: bool) -> Standing:
        """Where the worker stands once this outcome is carried out."""
        committed = vote.end if commit else self.standing.committed
        return msgspec.structs.replace(
            self.standing, committed=committed, pending=None, resolved=(vote.transaction, commit)
        )

    # What is decided outside

    def approved(self, standing: Standing) -> Iterator[Effect]:
        """The worker may connect; this is where it stands."""
        self.standing = standing
        self.received = standing.kept
        self.state = "phase1" if standing.pending is None else "phase2"
        queued, self._queued = self._queued, []
        yield Send(wire.Ok(self._terms.credits))
        yield from self.receive(queued)

    def broken(self, reason: str) -> None:
        """Messages could not be taken: the next vote is against."""
        self._has_gap = True
        self._wrong = reason

    def fail(self, reason: str) -> list[Effect]:
        """End the connection, telling why."""
        return [error(reason), self._over(reason)]

    def _over(self, reason: str) -> Close:
        self.state = "closed"
        return Close(reason)


def _reply(message: wire.TwoPhase) -> Send:
    return Send(wire.Message(0, 0, 0, None, wire.two_phase_payload(message)))
