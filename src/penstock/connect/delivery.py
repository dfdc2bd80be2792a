"""What a stream holds, delivered to a sink: each event once, without an app.

The stream has a partition for each worker. Where the delivery stands is one record of progress:
the next offset of each partition, and the transactions that were decided with it. Saving it is
the decision, by a producer of its own: whoever holds that last is the only one who can decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import msgspec

from penstock.connect.push import (
    SENDING,
    STARTING,
    TELLING,
    Decision,
    Row,
    SinkVote,
    Step,
    Target,
    rows_of,
)
from penstock.errors import LogError, SinkGoneError, UsageError
from penstock.failpoints import failpoint
from penstock.log.api import Commit, Committed, Log
from penstock.log.commit import commit_surely, next_sequence
from penstock.log.read import count_from

T = TypeVar("T")
Kind = Literal["stream", "batch"]
AT_ONCE_MAX = 8
ROUND_ROWS = 262_144
"""So many events of a partition are one transaction at most, where they come by stream."""
VISIBLE_S = 60.0
RETRY_S = 0.1
PREFIX = "sink/"


class Delivered(msgspec.Struct, frozen=True):
    """Where a delivery stands. A sink that is fed by a stream is not fed by batches too."""

    kind: Kind
    stream: str
    stream_id: int
    next: dict[int, int]
    transactions: dict[str, Decision] = {}


class Delivery:
    """Takes a delivery over: whoever had it before cannot decide any more.

    Raises `SinkGoneError` if a worker is away; what was decided is safe, and the rest is
    delivered by whoever comes next.
    """

    def __init__(self, log: Log, target: Target, stream: str, kind: Kind) -> None:
        self._log = log
        self._target = target
        self._key = f"{PREFIX}{target.query}"
        self._holder = log.hold(self._key)
        self._sequence = next_sequence(log, self._key)
        saved, made = log.progress(self._key), log.stream(stream)
        self._stream = str(made.name)
        self._at = self._begin(kind, made.id) if saved is None else _decoder.decode(saved)
        if self._at.kind != kind:
            raise UsageError(
                f"the producer {target.query} has written to its sink by {self._at.kind} before: "
                "use another producer name"
            )
        if self._at.stream_id != made.id:
            raise UsageError(
                f"the stream {stream} is not the one that the producer {target.query} delivered "
                "from: it was made anew; use another producer name"
            )
        self._at = msgspec.structs.replace(self._at, stream=self._stream)
        for worker in target.names():
            target.resolve_open(worker, self._at.transactions, self._step(STARTING))

    def _begin(self, kind: Kind, stream_id: int) -> Delivered:
        """Raises `UsageError` if somebody else delivers the stream: each would take every row."""
        for key, packed in self._log.progress_items(PREFIX).items():
            if _decoder.decode(packed).stream_id == stream_id:
                other = key.removeprefix(PREFIX)
                raise UsageError(
                    f"the producer {other} delivers the stream {self._stream} already: use its "
                    "name, or another stream"
                )
        firsts = {p: offsets.first for p, offsets in self._log.offsets(self._stream).items()}
        return Delivered(kind, self._stream, stream_id, firsts)

    def skip(self) -> None:
        """Everything that is there and not delivered never will be."""
        self._save(msgspec.structs.replace(self._at, next=self._ends()))

    def deliver(self, after: Committed | None = None) -> int:
        """Push everything that is there, that commit included; how many events that was.

        What comes by batch is one transaction. Raises `SinkGoneError` if a worker is away.
        """
        rows = 0
        ends = self._ends_with(after)
        while True:
            goal = ends if self._at.kind == "batch" else self._bounded(ends)
            if goal == self._at.next:
                return rows
            rows += self._deliver(goal)

    def _deliver(self, ends: dict[int, int]) -> int:
        target, step, telling = self._target, self._step(SENDING), self._step(TELLING)
        waiting = [p for p in sorted(ends) if self._at.next[p] < ends[p]]
        with ThreadPoolExecutor(min(len(waiting), AT_ONCE_MAX)) as threads:
            pushed = threads.map(
                lambda n: target.push(target.name(n), self._rows(n, ends[n]), step), waiting
            )
            votes = list(pushed)
        failpoint("push.voted")
        decided = target.decided_with(self._at.transactions, votes)
        self._save(msgspec.structs.replace(self._at, next=ends, transactions=decided))
        failpoint("push.decided")
        for vote in votes:
            self._tell(vote, telling)
            failpoint("push.told")
        return sum(vote.rows for vote in votes)

    def _tell(self, vote: SinkVote, step: Step) -> None:
        """It is decided: whoever writes a batch must not think that nothing happened."""
        patience_s = self._target.options.timeout_s if self._at.kind == "batch" else 0.0
        try:
            patiently(patience_s, lambda: self._target.tell(vote, step))
        except SinkGoneError as error:
            raise SinkGoneError(
                "the rows were voted for and are decided: they become visible when the sink is "
                f"back and something is written next; do not write them again ({error})"
            ) from error

    def _bounded(self, ends: dict[int, int]) -> dict[int, int]:
        at = self._at.next
        return {
            p: min(end, self._log.advance(self._stream, p, at[p], ROUND_ROWS))
            for p, end in ends.items()
        }

    def _rows(self, partition: int, end: int) -> Iterator[list[Row]]:
        for batch in self._log.read(self._stream, partition, self._at.next[partition], end):
            yield list(rows_of(batch))

    def _ends(self) -> dict[int, int]:
        return {p: offsets.next for p, offsets in self._log.offsets(self._stream).items()}

    def _ends_with(self, after: Committed | None) -> dict[int, int]:
        """Where partitions end, once everything of the commit can be read."""
        placements = [] if after is None else after.placements
        least = [r for p in placements if p.stream == self._stream for r in p.ranges]
        deadline = time.monotonic() + VISIBLE_S
        while True:
            ends = self._ends()
            if all(ends[partition] >= first + rows for partition, first, rows in least):
                return ends
            if time.monotonic() > deadline:
                raise LogError(f"a commit to {self._stream} cannot be read after {VISIBLE_S} s")
            time.sleep(RETRY_S)

    def _save(self, at: Delivered) -> None:
        progress: dict[str, bytes | None] = {self._key: msgspec.json.encode(at)}
        commit_surely(self._log, self._holder, self._sequence, Commit(progress=progress))
        self._at = at
        self._sequence += 1

    def _step(self, number: int) -> Step:
        return Step(self._holder.epoch, self._sequence, number)


def patiently(timeout_s: float, do: Callable[[], T]) -> T:
    """Do it; again and again while the sink is away, for so long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return do()
        except SinkGoneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def deliveries(log: Log) -> Iterator[tuple[Delivered, int]]:
    """Every delivery that the log knows of, and how many events it has still to deliver."""
    known = {stream.id: str(stream.name) for stream in log.streams()}
    for packed in log.progress_items(PREFIX).values():
        found = _decoder.decode(packed)
        stream = known.get(found.stream_id)
        yield found, count_from(log, stream, found.next).events if stream else 0


_decoder = msgspec.json.Decoder(Delivered)
