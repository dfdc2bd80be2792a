"""What a stream holds, delivered to a sink: each event once, without an app.

The stream has a partition for each worker. Where the delivery stands is one record of progress:
the next offset of each partition, and the transactions that were decided with it. Saving it is
the decision, by a producer of its own: whoever holds that last is the only one who can decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from penstock.connect.push import (
    SENDING,
    STARTING,
    TELLING,
    Decision,
    Row,
    Step,
    Target,
    decided_with,
    rows_of,
)
from penstock.errors import UsageError
from penstock.failpoints import failpoint
from penstock.log.api import Commit, Log
from penstock.log.commit import commit_surely

Kind = Literal["stream", "batch"]
AT_ONCE_MAX = 8
PREFIX = "sink/"


class Delivered(msgspec.Struct, frozen=True):
    """Where a delivery stands. A sink that is fed by a stream is not fed by batches too."""

    kind: Kind
    stream: str
    next: dict[int, int] = {}
    transactions: dict[str, Decision] = {}


class Delivery:
    """Takes a delivery over: whoever had it before cannot decide any more.

    Raises `SinkGoneError` if a worker is away; what was decided is safe, and the rest is
    delivered by whoever comes next.
    """

    def __init__(self, log: Log, target: Target, stream: str, kind: Kind) -> None:
        self._log = log
        self._target = target
        self._stream = stream
        self._key = f"{PREFIX}{target.query}"
        self._holder = log.hold(self._key)
        last = log.last_commit(self._key)
        self._sequence = 0 if last is None else last.sequence + 1
        saved = log.progress(self._key)
        self._at = Delivered(kind, stream) if saved is None else _decoder.decode(saved)
        if self._at.kind != kind:
            raise UsageError(
                f"the producer {target.query} has written to its sink by {self._at.kind} before: "
                "use another producer name"
            )
        for worker in target.names():
            target.resolve_open(worker, self._at.transactions, self._step(STARTING))

    def skip(self) -> None:
        """Everything that is there and not delivered never will be."""
        self._save(msgspec.structs.replace(self._at, next=self._ends()))

    def deliver(self) -> int:
        """Push everything that is there, as one; how many events that was."""
        ends = self._ends()
        waiting = [n for n in range(self._target.workers) if self._at.next.get(n, 0) < ends[n]]
        if not waiting:
            return 0
        step = self._step(SENDING)
        with ThreadPoolExecutor(min(len(waiting), AT_ONCE_MAX)) as threads:
            votes = list(
                threads.map(
                    lambda n: self._target.push(self._target.name(n), self._rows(n, ends[n]), step),
                    waiting,
                )
            )
        failpoint("push.voted")
        telling = self._step(TELLING)
        decided = decided_with(self._at.transactions, votes)
        self._save(msgspec.structs.replace(self._at, next=ends, transactions=decided))
        failpoint("push.decided")
        for vote in votes:
            self._target.tell(vote, telling)
            failpoint("push.told")
        return sum(vote.rows for vote in votes)

    def _rows(self, partition: int, end: int) -> Iterator[list[Row]]:
        start = self._at.next.get(partition, 0)
        for batch in self._log.read(self._stream, partition, start, end):
            yield list(rows_of(batch))

    def _ends(self) -> dict[int, int]:
        return {p: offsets.next for p, offsets in self._log.offsets(self._stream).items()}

    def _save(self, at: Delivered) -> None:
        progress: dict[str, bytes | None] = {self._key: msgspec.json.encode(at)}
        commit_surely(self._log, self._holder, self._sequence, Commit(progress=progress))
        self._at = at
        self._sequence += 1

    def _step(self, number: int) -> Step:
        return Step(self._holder.epoch, self._sequence, number)


def deliveries(log: Log) -> Iterator[tuple[Delivered, int]]:
    """Every delivery that the log knows of, and how many events it has still to deliver."""
    known = {str(stream.name) for stream in log.streams()}
    for packed in log.progress_items(PREFIX).values():
        found = _decoder.decode(packed)
        ends = log.offsets(found.stream) if found.stream in known else {}
        waiting = (offsets.next - found.next.get(p, offsets.first) for p, offsets in ends.items())
        yield found, sum(max(0, rows) for rows in waiting)


_decoder = msgspec.json.Decoder(Delivered)
