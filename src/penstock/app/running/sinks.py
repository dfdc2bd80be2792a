"""Events pushed into a sink connector exactly once, by two-phase commit from a query.

A batch goes to the sink's workers, in one task for each. The commit that moves the query's position
also saves the books of the sink, which name the transactions that the workers voted for. This
commit is the decision, and it is fenced like any commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from penstock.app.declaring.definitions import Sinking
from penstock.app.running.positions import SinkPosition, pack_position, progress_key
from penstock.app.running.query import Query
from penstock.app.running.splits import BatchInput
from penstock.app.tasks.task import (
    BatchOrder,
    FailedError,
    Failure,
    Inputs,
    Outcome,
    Range,
    Split,
    derived_id,
    read_split,
    stage,
    user_traceback,
)
from penstock.connect.push.books import Decision, Share, SinkBooks
from penstock.connect.push.remote import (
    SENDING,
    STARTING,
    TELLING,
    DialStep,
    RemoteSink,
    leave_out,
    rows_of,
    slot_rows,
)
from penstock.connect.push.worker import DialOptions, EncodedRow
from penstock.errors import ConnectorError, OffsetGoneError, RowsRefusedError
from penstock.failpoints import failpoint
from penstock.log.api import Commit, Log, Piece
from penstock.log.batch import Batch
from penstock.log.letters import DeadLetter, dead_name, readable
from penstock.log.writing.commit import commit_surely
from penstock.log.writing.compose import Composer
from penstock.records.arrow import codec_of

ASK_S = 0.02
ASK_S_MAX = 2.0
"""How often a sink is asked whether its target has what was decided: with growing intervals."""


class SinkWork:
    """Sends a worker's share of a batch to its sink, and asks for the vote.

    A row that the sink's target can never accept ends the query, is skipped, or becomes a dead
    letter, as the stream's `on_damage` says.
    """

    def __init__(self, app: str, definition: Sinking) -> None:
        self.name = definition.name
        self._source = f"{app}.{definition.name}"
        self._sink = sink_of(app, definition)
        self._encoder = definition.encoder
        (stream,) = definition.inputs
        self._on_damage = getattr(stream, "on_damage", "stop")
        self._dead = dead_name(stream.name)

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        refused: dict[int, str] = {}
        worker = self._sink.name(split.number)
        step = DialStep(batch.holder.epoch, batch.sequence, SENDING)
        while True:
            rows = (self.rows(item, split.slot, split.slots) for item in inputs.batches)
            try:
                left = leave_out(rows, refused)
                vote = self._sink.push(worker, left, step, split.sink_start)
                break
            except RowsRefusedError as error:
                if self._on_damage == "stop":
                    raise FailedError(self._failure(error)) from error
                refused = add_refusals(refused, error.refusals)
            except ConnectorError as error:
                if error.retriable:
                    raise
                raise FailedError(self._failure(error)) from error
        pieces: tuple[Piece, ...] = ()
        if refused and self._on_damage == "dead-letter":
            pieces = self._bury(log, batch, split, inputs, refused)
        vote = vote._replace(left_out=tuple(sorted(refused)))
        return Outcome(rows_out=vote.rows, votes=(vote,), pieces=pieces, rows_skipped=len(refused))

    def rows(self, batch: Batch, slot: int, slots: int) -> list[EncodedRow]:
        """The messages of a batch that belong to the slot."""
        if self._encoder is None:
            return list(rows_of(batch, slot, slots))
        try:
            return list(rows_of(batch, slot, slots, self._encoder))
        except Exception as error:
            place = f"{batch.stream.name}[{batch.partition}] from offset {batch.first_offset}"
            raise FailedError(
                Failure(
                    definition=self.name, place=place, error=f"{type(error).__name__}: {error}",
                    traceback=user_traceback(error),
                )
            ) from error  # fmt: skip

    def _bury(
        self,
        log: Log,
        batch: BatchOrder,
        split: Split,
        inputs: Inputs,
        refused: Mapping[int, str],
    ) -> tuple[Piece, ...]:
        """Stage dead letters for the rows that are left out, for the commit of the batch."""
        letters, ids, first = [], [], 0
        for item in inputs.batches:
            found = slot_rows(item, split.slot, split.slots, ["_key", "_id", "_offset"])
            for number in range(found.num_rows):
                if first + number in refused:
                    row = {name: found.column(name)[number].as_py() for name in found.schema.names}
                    letters.append(self._letter(item, row, refused[first + number]))
                    ids.append(derived_id(self._source, row["_id"], 0))
            first += found.num_rows
        columns = codec_of(DeadLetter).to_arrow(letters)
        columns = columns.append_column("_id", pa.array(ids, pa.string()))
        part = Composer(self._source, log.limits).arrow_part(log.stream(self._dead), columns)
        return stage(log, batch, [part])

    def _letter(self, batch: Batch, row: Mapping[str, object], why: str) -> DeadLetter:
        key, offset = row["_key"], row["_offset"]
        at = batch.slice_offsets(int(offset), int(offset) + 1)  # type: ignore[call-overload]
        (data,) = (payload for _, _, payload in rows_of(at))
        return DeadLetter(
            agent=self.name, stream=str(batch.stream.name), partition=batch.partition,
            offset=int(offset), id=str(row["_id"]),  # type: ignore[call-overload]
            key=None if key is None else readable(key),  # type: ignore[arg-type]
            data=readable(data), error=why, traceback="", tries=1,
        )  # fmt: skip

    def _failure(self, error: ConnectorError) -> Failure:
        place = f"the sink at {self._sink.address}"
        return Failure(
            definition=self.name, place=place, error=str(error), traceback="", code=error.code
        )


def add_refusals(refused: Mapping[int, str], more: Sequence[tuple[int, str]]) -> dict[int, str]:
    """The rows to leave out, by their number in the batch.

    `more` are numbered by the sink, which counted only the rows that it was sent.
    """
    found = dict(refused)
    for number, why in more:
        for earlier in sorted(refused):
            if earlier <= number:
                number += 1  # noqa: PLW2901  the sink did not count that row
        found[number] = why
    return found


class SinkQuery(Query):
    """A query whose batches go to a sink."""

    position_kind = SinkPosition
    position: SinkPosition
    _has_told = False
    """Whether every worker has been told every outcome."""
    _ask_s = ASK_S
    _ask_at = 0.0

    def start(self) -> None:
        """Start, or start again: first, transactions that a worker has voted for are resolved, and
        decided ones that it lacks are sent again.
        """
        self._has_told = False
        super().start()
        sink, step = self._sink, self._step(self._sequence, STARTING)
        books = self._books
        for worker in sink.names():
            books = books.replace(
                worker, sink.resume(worker, books.book(worker), step, self._reread)
            )
        is_new = books.begins_after(self.position.books)
        self.position.books = books
        if is_new:
            self._save_position()
        self._has_told = True

    def _save_position(self) -> None:
        """Save where the workers begin, before anything is sent to them."""
        progress = {progress_key(self._app, self._definition.name): pack_position(self.position)}
        commit_surely(self._log, self._holder, self._sequence, Commit(progress=progress))
        self._sequence += 1

    def is_idle(self) -> bool:
        """Only once every worker was told every outcome and the target has what was decided."""
        return self._has_told and not self._books.has_unapplied() and super().is_idle()

    def wait(self, timeout_s: float) -> bool:
        """Wait for events; while the target lacks a decided transaction, ask the sink about it."""
        if not self._books.has_unapplied():
            return super().wait(timeout_s)
        found = super().wait(max(0.0, min(timeout_s, self._ask_at - time.monotonic())))
        most = self._definition.unapplied_max
        is_full = any(len(book.open) >= most for book in self._books.books.values())
        if time.monotonic() >= self._ask_at and (is_full or not found):
            self._ask_applied()
        elif is_full:
            time.sleep(ASK_S)
        return found and not is_full

    def _ask_applied(self) -> None:
        """Ask what the target has; if nothing changed, wait longer before asking again."""
        sink, step = self._sink, self._step(self._sequence, STARTING)
        before = books = self._books
        for worker, book in before.books.items():
            if book.open:
                books = books.replace(worker, book.without_applied(sink.ask(worker, step)))
        self.position.books = books
        self._ask_s = min(2 * self._ask_s, ASK_S_MAX) if books == before else ASK_S
        self._ask_at = time.monotonic() + self._ask_s

    @property
    def _books(self) -> SinkBooks:
        return self.position.books or SinkBooks(self._sink.workers)

    @property
    def _definition(self) -> Sinking:
        found = self.definitions[0]
        assert isinstance(found, Sinking)  # noqa: S101  it is made with one
        return found

    @property
    def _sink(self) -> RemoteSink:
        return sink_of(self._app, self._definition)

    def _step(self, sequence: int, number: int) -> DialStep:
        return DialStep(self._holder.epoch, sequence, number)

    def _cut(self, batch: BatchInput) -> list[Split]:
        """One split for each worker: its partition, or its share of the keys of all partitions."""
        workers, ranges = self._sink.workers, batch.ranges
        (stream,) = batch.streams.values()
        if stream.partitions == workers and stream.keeps_keys_together:
            homes = sorted({range_.partition for range_ in ranges})
            return [
                Split(
                    number=home,
                    ranges=tuple(r for r in ranges if r.partition == home),
                    sink_start=self._start_of(home),
                )
                for home in homes
            ]
        return [
            Split(number=n, ranges=ranges, slot=n, slots=workers, sink_start=self._start_of(n))
            for n in range(workers)
        ]

    def _start_of(self, number: int) -> int | None:
        return self._books.book(self._sink.name(number)).start

    def _position_after(
        self, batch: BatchInput, outcomes: Sequence[Outcome], order: BatchOrder
    ) -> SinkPosition:
        failpoint("push.voted")
        position = super()._position_after(batch, outcomes, order)
        assert isinstance(position, SinkPosition)  # noqa: S101  it is made with one
        votes = [vote for outcome in outcomes for vote in outcome.votes]
        left_out = {vote.worker: vote.left_out for vote in votes}
        shares = {}
        for split in order.splits:
            worker = self._sink.name(split.number)
            parts = tuple((r.stream, r.partition, r.start, r.end) for r in split.ranges)
            shares[worker] = Share(parts, split.slot, split.slots, left_out.get(worker, ()))
        position.books = self._books.decide(votes, shares, self._sink.place)
        self._has_told = False
        return position

    def _after_commit(self, order: BatchOrder, outcomes: Sequence[Outcome]) -> None:
        failpoint("push.decided")
        books = self._books
        for outcome in outcomes:
            for vote in outcome.votes:
                progress = self._sink.tell(vote, self._step(order.sequence, TELLING))
                book = books.book(vote.worker).without_applied(progress)
                books = books.replace(vote.worker, book)
                failpoint("push.told")
        self.position.books = books
        self._has_told = True
        self._ask_s, self._ask_at = ASK_S, time.monotonic() + ASK_S

    def _reread(self, decision: Decision) -> Iterator[list[EncodedRow]]:
        """The messages of a decision, read and encoded again as before."""
        work, share = SinkWork(self._app, self._definition), decision.share
        ranges = tuple(Range(*range_) for range_ in share.ranges)
        split = Split(number=0, ranges=ranges, slot=share.slot, slots=share.slots)
        order = BatchOrder(
            query=self.name, holder=self._holder, sequence=self._sequence,
            now_us=self._clock(), splits=(split,), past=self._definition.past,
        )  # fmt: skip
        try:
            batches = read_split(self._log, order, split).batches
        except OffsetGoneError as error:
            raise ConnectorError(
                f"the sink is missing the messages of {decision.transaction}, and retention has "
                f"removed them from the log: restore the sink's folder, or {self._sink.way_out}"
            ) from error
        rows = (work.rows(item, share.slot, share.slots) for item in batches)
        return leave_out(rows, share.left_out)


def sink_of(app: str, definition: Sinking) -> RemoteSink:
    """The definition's sink, and its workers there."""
    options = DialOptions(cookie=definition.cookie, timeout_s=definition.timeout_s)
    query = f"{app}.{definition.name}"
    way_out = f"run `penstock reset APP {definition.name}` to start from the beginning"
    return RemoteSink(query, definition.address, definition.workers, options, way_out)
