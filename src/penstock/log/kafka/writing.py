"""Commits on Kafka: numbered, fenced, and one transaction each."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import (
    CommitOutcomeUnknownError,
    FencedError,
    LogBusyError,
    LogError,
    LogUnreachableError,
    PenstockError,
    PieceError,
    SequenceError,
    UsageError,
)
from penstock.failpoints import FailpointError, failpoint
from penstock.log.api import (
    Commit,
    CommitOptions,
    Committed,
    Holder,
    Limits,
    Part,
    Piece,
    Placement,
)
from penstock.log.checks import check_columns, check_held, check_stageable, repeated
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.ledger import Ledger, ProducerState, producer_line, progress_line
from penstock.log.kafka.objects import Catalogue, KafkaStream, StreamGoneError
from penstock.log.kafka.producers import Producers, cause_of
from penstock.log.kafka.sending import Prepared, Sent, prepare
from penstock.log.kafka.session import (
    NotCommittedError,
    Session,
    TakenError,
    UnknownError,
)
from penstock.log.kafka.staging import Staging, Tag
from penstock.log.kafka.tables import Tables
from penstock.log.partitioning import chunks
from penstock.records.event import from_microseconds, ids_of, now_us, numbered

RETRY_PAUSE_S = 0.05
VISIBLE_S = 2.0
"""A commit waits so long to be readable; another one under way can hold it back longer."""


class Writer:
    """Stages and commits. For any thread."""

    def __init__(
        self,
        cluster: Cluster,
        producers: Producers,
        ledger: Ledger,
        catalogue: Catalogue,
        staging: Staging,
        tables: Tables,
        limits: Limits,
    ) -> None:
        self._cluster = cluster
        self._producers = producers
        self._ledger = ledger
        self._catalogue = catalogue
        self._staging = staging
        self._tables = tables
        self._limits = limits
        self._uncertain: set[tuple[str, int]] = set()

    # Staging

    def stage(self, holder: Holder, sequence: int, part: Part, options: CommitOptions) -> Piece:
        stream = self._catalogue.stream(part.stream)
        check_columns(stream, part.batch)
        state = _held(holder, self._ledger.producer(holder.producer))
        check_stageable(holder, sequence, state.sequence)
        failpoint("stage.begun")
        tag = Tag(holder.producer, holder.epoch, sequence, stream.id)
        batches = chunks(part.batch, self._limits)
        piece = self._staging.write(tag, part.stream, batches, options.compression)
        failpoint("stage.committed")
        return piece

    # Committing

    def commit(
        self, holder: Holder, sequence: int, commit: Commit, options: CommitOptions
    ) -> Committed:
        """Try until it is known what became of it, or the time is over."""
        name = (holder.producer, sequence)
        deadline = time.monotonic() + options.timeout_ms / 1000
        while True:
            try:
                with self._cluster.within(deadline):
                    done = self._attempt(holder, sequence, commit, deadline)
                self._uncertain.discard(name)
                return done
            except TakenError:
                failed: PenstockError = LogBusyError(
                    f"the producer {holder.producer} is used by other processes all the time, or "
                    "its commit takes longer than transaction_timeout_ms: commit less at a time"
                )
            except UnknownError as error:
                self._uncertain.add(name)
                # Whatever it was: opening the producer again tells what became of it.
                failed = LogUnreachableError(str(cause_of(error)))
            except NotCommittedError as error:
                failed = cause_of(error)
            except StreamGoneError as error:
                failed = LogBusyError(str(error))  # commit to the one that is there now
            except (FencedError, SequenceError) as error:
                return self._found_out(holder, sequence, error)
            except CommitOutcomeUnknownError:
                self._uncertain.add(name)
                raise
            except PenstockError as error:
                failed = error
            if not failed.retriable or time.monotonic() > deadline:
                raise self._outcome(name, failed) from failed
            time.sleep(RETRY_PAUSE_S * random.uniform(0.5, 2))  # noqa: S311  so that two take turns

    def _found_out(self, holder: Holder, sequence: int, error: PenstockError) -> Committed:
        """What became of a commit whose producer somebody else has by now; or raise why not."""
        name = (holder.producer, sequence)
        if name in self._uncertain:
            try:
                found = self._ledger.producer(holder.producer) or ProducerState()
            except PenstockError as failed:
                raise self._outcome(name, failed) from error
            last = found.committed
            if last is not None and last.sequence == sequence:
                # Under the same name by another holder: then it was free, and ours did not happen.
                if found.committed_epoch == holder.epoch:
                    self._uncertain.discard(name)
                    return msgspec.structs.replace(last, repeated=True)
            elif last is not None and last.sequence > sequence:
                raise self._outcome(name, error) from error
        self._uncertain.discard(name)
        raise error

    def _outcome(self, name: tuple[str, int], failed: PenstockError) -> PenstockError:
        """What to say of a commit that was given up."""
        if name not in self._uncertain:
            return failed
        return CommitOutcomeUnknownError(
            f"the commit may or may not have happened ({failed}); commit again under the same name "
            "to find out"
        )

    def _attempt(self, holder: Holder, sequence: int, commit: Commit, deadline: float) -> Committed:
        """One try.

        1. Open the producer's session, unless it is open, and look at its line of the ledger.
        2. The holder must hold it, and the sequence be new; a repeated one returns its outcome.
        3. Send the events, wait until they have offsets, then send progress and the outcome.
        4. Look whether the streams are still what they were: whoever drops or changes one after
           that does so while this commit is under way.
        5. Commit the transaction, and wait until readers see it.
        """
        with self._producers.using(holder.producer) as session:
            state = _held(holder, self._producers.opened(session, holder.producer))
            if state.committed is not None and sequence <= state.committed.sequence:
                return repeated(holder, sequence, state.committed)
            prepared = self._prepared(holder, sequence, commit)
            failpoint("commit.prepared")
            with self._writer(session, holder, prepared) as (writer, compared):
                sent = [Sent(item) for item in compared]
                after = self._transact(writer, session, holder, sequence, sent, commit, deadline)
            session.state = after
        done = after.committed
        assert done is not None  # noqa: S101  just made
        self._reached(holder.producer)
        self._until_visible([item.stream.topic for item in sent], done.placements)
        return done

    @staticmethod
    def _reached(producer: str) -> None:
        try:
            failpoint("commit.committed")
        except FailpointError as error:
            raise CommitOutcomeUnknownError(
                f"the commit of {producer} may or may not have happened ({error}); commit again "
                "under the same name to find out"
            ) from error

    def _transact(
        self, writer: Session, session: Session, holder: Holder, sequence: int,
        sent: Sequence[Sent], commit: Commit, deadline: float,
    ) -> ProducerState:  # fmt: skip
        streams = [item.stream for item in sent]

        def glance() -> None:
            with contextlib.suppress(LogUnreachableError), self._cluster.within(time.monotonic()):
                self._check_unchanged(streams)

        def fill() -> ProducerState:
            failpoint("commit.begun")
            for item in sent:
                item.send(writer)
            failpoint("commit.blobs")
            writer.flush(deadline, glance)
            failpoint("commit.index")
            times = [item.time_ms for item in sent if item.time_ms is not None]
            committed = Committed(
                producer=holder.producer,
                sequence=sequence,
                commit=0,
                time=from_microseconds(min(times) * 1000 if times else now_us()),
                placements=tuple(item.placement(self._cluster) for item in sent),
            )
            pieces = tuple(number for piece in commit.pieces for number in piece.batches)
            state = msgspec.structs.replace(
                session.state, committed=committed, committed_epoch=holder.epoch, pieces=pieces,
                time_us=now_us(),
            )  # fmt: skip
            lines = [progress_line(key, value) for key, value in commit.progress.items()]
            for line in [*lines, producer_line(holder.producer, state)]:
                writer.send(self._ledger.topic, line.partition, line.key, line.value)
            failpoint("commit.progress")
            self._check_unchanged(streams)
            writer.flush(deadline, glance)
            failpoint("commit.producer")
            return state

        try:
            return writer.transact(fill, deadline)
        except (NotCommittedError, TakenError):
            raise  # it did not happen
        except BaseException:
            session.close()  # it must be found out anew what became of it
            writer.close()
            raise

    def _check_unchanged(self, streams: Sequence[KafkaStream]) -> None:
        """Undo the transaction if one of its streams has changed since it was prepared."""
        for stream in self._catalogue.look_again(streams) if streams else ():
            raise NotCommittedError from LogBusyError(
                f"stream {stream.name} was changed while it was written to: commit again"
            )

    # What is to be written

    def prepare(self, part: Part) -> Part:
        stream = self._catalogue.stream(part.stream)
        check_columns(stream, part.batch)
        ready = prepare(stream, [part.batch], self._limits, ahead=stream.spec.ids != "producer")
        return msgspec.structs.replace(part, ready=ready)

    def _prepared(self, holder: Holder, sequence: int, commit: Commit) -> list[Prepared]:
        made = []
        for part in commit.parts:
            stream = self._catalogue.stream(part.stream)
            ready = part.ready
            if isinstance(ready, Prepared) and ready.stream is stream:
                made.append(ready)
                continue
            check_columns(stream, part.batch)
            made.append(prepare(stream, [part.batch], self._limits))
        if commit.pieces:
            streams = {p.stream: self._catalogue.stream(p.stream) for p in commit.pieces}
            staged = self._staged(holder, sequence, commit.pieces, streams)
            for piece in commit.pieces:
                batches = [staged[number] for number in piece.batches]
                made.append(prepare(streams[piece.stream], batches, self._limits))
        return made

    def _staged(
        self,
        holder: Holder,
        sequence: int,
        pieces: Sequence[Piece],
        streams: Mapping[str, KafkaStream],
    ) -> dict[int, pa.RecordBatch]:
        numbers = [number for piece in pieces for number in piece.batches]
        if len(set(numbers)) < len(numbers):
            raise PieceError("a staged piece is named twice")
        tags = {
            number: Tag(holder.producer, holder.epoch, sequence, streams[piece.stream].id)
            for piece in pieces
            for number in piece.batches
        }
        found = self._staging.read(tags)
        failpoint("publish.pieces")
        return found

    @contextlib.contextmanager
    def _writer(
        self, session: Session, holder: Holder, prepared: Sequence[Prepared]
    ) -> Iterator[tuple[Session, Sequence[Prepared]]]:
        """Whose transaction it is, and what is left to write after comparing ids."""
        comparing = {p.stream.id: p.stream for p in prepared if p.stream.spec.ids == "producer"}
        if not comparing:
            yield session, prepared
            return
        if len(comparing) > 1:
            names = " and ".join(str(stream.name) for stream in comparing.values())
            raise UsageError(
                f"{names} both have ids from the producer: on Kafka a commit may write to one such "
                "stream, since each has a writer of its own; commit them one after the other"
            )
        stream = next(iter(comparing.values()))
        with self._producers.using_ids(stream.topic) as ids:
            self._producers.bind(session, holder.producer, ids, stream.topic)
            yield ids, self._without_held(stream, prepared)
            failpoint("commit.ids")

    def _without_held(self, stream: KafkaStream, prepared: Sequence[Prepared]) -> list[Prepared]:
        """Without the events whose ids the stream holds already."""
        place = (stream.topic, 0)  # nobody else can write there while we compare
        with self._cluster.watching(lambda: self._catalogue.check_there(stream)):
            end = self._cluster.settled_ends([place])[place]
        mine = [item for item in prepared if item.stream.id == stream.id]
        ids = [
            id_ for item in mine for chunk in item.chunks for id_ in ids_of(chunk.batch).to_pylist()
        ]
        gone = set(self._tables.store.held(stream, ids, end))
        made, at = [], 0
        for item in prepared:
            if item.stream.id != stream.id:
                made.append(item)
                continue
            rows = sum(chunk.batch.num_rows for chunk in item.chunks)
            dropped = tuple(row - at for row in sorted(gone) if at <= row < at + rows)
            at += rows
            made.append(_thinned(item, dropped) if dropped else item)
        return made

    # Being seen

    def _until_visible(self, topics: Sequence[str], placements: Sequence[Placement]) -> None:
        """Wait until what was committed can be read; only for so long, for it is safe anyway."""
        last: dict[tuple[str, int], int] = {}
        for topic, placement in zip(topics, placements, strict=True):
            for partition, first, rows in placement.ranges:
                last[topic, partition] = max(last.get((topic, partition), 0), first + rows - 1)
        deadline = time.monotonic() + VISIBLE_S
        while last and time.monotonic() < deadline:
            try:
                with self._cluster.within(deadline):
                    ends = self._cluster.ends(list(last), committed=True)
            except LogError:
                return  # dropped in the meantime, or out of reach
            last = {place: offset for place, offset in last.items() if ends[place] <= offset}
            if last:
                time.sleep(0.001)


def _thinned(item: Prepared, dropped: tuple[int, ...]) -> Prepared:
    at, kept = 0, []
    gone = set(dropped)
    for chunk in item.chunks:
        rows = chunk.batch.num_rows
        mask = pa.array([at + row not in gone for row in range(rows)])
        at += rows
        if pc.any(mask).as_py():
            batch = numbered(chunk.batch).filter(mask)
            kept.append(msgspec.structs.replace(chunk, batch=batch, encoded=None))
    return Prepared(item.stream, kept, dropped)


def _held(holder: Holder, state: ProducerState | None) -> ProducerState:
    """The state of the producer, if the holder holds it."""
    check_held(holder, (state and state.epoch) or None)
    return cast(ProducerState, state)
