"""Commits on Kafka: numbered, fenced, and one transaction each."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

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
from penstock.log.declaring.objects import Stream
from penstock.log.engine.checks import check_columns, check_conditions, check_writer
from penstock.log.engine.doubts import Doubts, unknown
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.ledger import ProducerState, producer_line, progress_line
from penstock.log.kafka.objects import KafkaStream, StreamGoneError
from penstock.log.kafka.producers import Producers, cause_of
from penstock.log.kafka.sending import KafkaPrepared, KafkaSending, prepare
from penstock.log.kafka.session import (
    NotCommittedError,
    Session,
    TakenError,
    TransactionFailedError,
    UnknownError,
)
from penstock.log.kafka.staging import Staging, Tag
from penstock.log.kafka.tables import KafkaTables
from penstock.log.writing.fate import (
    Again,
    Ending,
    ProducerStanding,
    RefusedCommit,
    RepeatedCommit,
    Tries,
    check_stageable,
    judge,
)
from penstock.log.writing.partitioning import chunks, without
from penstock.records.event import from_microseconds, ids_of, now_us

RETRY_PAUSE_S = 0.05
VISIBLE_S = 2.0
"""How long a commit waits to be readable; another open transaction can delay it longer."""


class _CommitOrder(NamedTuple):
    """What to commit, under which name, and until when."""

    holder: Holder
    sequence: int
    commit: Commit
    deadline: float


class KafkaWriter:
    """Stages and commits. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        producers: Producers,
        staging: Staging,
        tables: KafkaTables,
        limits: Limits,
    ) -> None:
        self._cluster = cluster
        self._producers = producers
        self._ledger = producers.ledger
        self._catalogue = producers.catalogue
        self._staging = staging
        self._tables = tables
        self._limits = limits
        self._doubts = Doubts()

    # Staging

    def stage(self, holder: Holder, sequence: int, part: Part, options: CommitOptions) -> Piece:
        stream = self._catalogue.stream(part.stream)
        check_columns(stream, part.batch)
        check_stageable(self._standing(holder.producer), holder, sequence)
        check_writer(stream, holder.producer)
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
        """Try until the outcome is known, or the time is up."""
        deadline = time.monotonic() + options.timeout_ms / 1000
        tries = Tries(_pauses(), deadline_s=deadline, in_doubt=self._doubts.has(holder, sequence))
        while True:
            try:
                with self._cluster.within(deadline):
                    done = self._attempt(_CommitOrder(holder, sequence, commit, deadline), tries)
                self._doubts.remove(holder, sequence)
                return done
            except (FencedError, SequenceError) as error:
                self._note(tries, holder, sequence)
                return self._doubts.conclude(
                    holder, sequence, error, lambda _: self._standing(holder.producer)
                )
            except CommitOutcomeUnknownError:
                self._doubts.add(holder, sequence)
                raise
            except (PenstockError, TransactionFailedError) as error:
                failed = _failure(error, holder)
            except BaseException:
                self._doubts.add(holder, sequence)
                raise
            match tries.after(failed, time.monotonic()):
                case Again(pause_s):
                    time.sleep(pause_s)
                case ending:
                    self._note(tries, holder, sequence)
                    if ending is Ending.UNKNOWN:
                        raise unknown(failed) from failed
                    raise failed

    def _note(self, tries: Tries, holder: Holder, sequence: int) -> None:
        """Remember whether the commit is in doubt, for the next call that names it."""
        if tries.in_doubt:
            self._doubts.add(holder, sequence)
        else:
            self._doubts.remove(holder, sequence)

    def _standing(self, producer: str) -> ProducerStanding:
        return (self._ledger.producer(producer) or ProducerState()).standing

    def _attempt(self, order: _CommitOrder, tries: Tries) -> Committed:
        """One attempt.

        1. Open the producer's session, unless it is open, and read its line of the ledger.
        2. The holder must hold it, and the sequence be new; a repeated one returns its outcome.
        3. Send the events, wait until they have offsets, then send progress and the outcome.
        4. Check that the streams are unchanged: if one is dropped or changed after that, this
           happens while the commit is in progress.
        5. Commit the transaction, and wait until readers see it.
        """
        holder = order.holder
        with self._producers.using(holder.producer) as session:
            state = self._producers.open(session, holder.producer)
            match judge(state.standing, holder, order.sequence):
                case RepeatedCommit(outcome):
                    return outcome
                case RefusedCommit(error):
                    raise error
            tries.find_out()  # no earlier attempt can succeed while the session is open
            prepared = self._prepare_all(holder, order.sequence, order.commit)
            self._check_conditions(order.commit, holder, prepared)
            failpoint("commit.prepared")
            with self._writer(session, holder, prepared) as (writer, compared):
                sent = [KafkaSending(item) for item in compared]
                session.state, done = self._transact(writer, session, order, sent)
        self._pass_failpoint(holder.producer)
        self._until_visible([item.stream.topic for item in sent], done.placements)
        return done

    @staticmethod
    def _pass_failpoint(producer: str) -> None:
        try:
            failpoint("commit.committed")
        except FailpointError as error:
            raise CommitOutcomeUnknownError(
                f"the commit of {producer} may or may not have happened ({error}): commit again "
                "under the same name to find out"
            ) from error

    def _transact(
        self, writer: Session, session: Session, order: _CommitOrder, sent: Sequence[KafkaSending]
    ) -> tuple[ProducerState, Committed]:
        """Write everything in one transaction; return the producer's new line, and the outcome."""
        holder, commit = order.holder, order.commit
        streams = [item.stream for item in sent]

        def glance() -> None:
            with contextlib.suppress(LogUnreachableError), self._cluster.within(time.monotonic()):
                self._check_unchanged(streams)

        def fill() -> tuple[ProducerState, Committed]:
            failpoint("commit.begun")
            for item in sent:
                item.send(writer)
            failpoint("commit.blobs")
            writer.flush(order.deadline, glance)
            failpoint("commit.index")
            times = [item.time_ms for item in sent if item.time_ms is not None]
            committed = Committed(
                producer=holder.producer,
                sequence=order.sequence,
                commit=0,
                time=from_microseconds(min(times) * 1000 if times else now_us()),
                placements=tuple(item.placement(self._cluster) for item in sent),
            )
            pieces = tuple(number for piece in commit.pieces for number in piece.batches)
            state = msgspec.structs.replace(
                session.state,
                committed=committed,
                committed_epoch=holder.epoch,
                pieces=pieces,
                time_us=now_us(),
            )
            lines = [progress_line(key, value) for key, value in commit.progress.items()]
            for line in [*lines, producer_line(holder.producer, state)]:
                topic = self._ledger.topic_of(line)
                writer.send(topic, line.partition, line.key, line.value)
            failpoint("commit.progress")
            self._check_unchanged(streams)
            writer.flush(order.deadline, glance)
            failpoint("commit.producer")
            return state, committed

        try:
            return writer.transact(fill, order.deadline)
        except (NotCommittedError, TakenError):
            raise  # it did not happen
        except BaseException:
            session.close()  # the outcome must be determined again
            writer.close()
            raise

    def _check_unchanged(self, streams: Sequence[KafkaStream]) -> None:
        """Abort the transaction if one of its streams has changed since it was prepared."""
        for stream in self._catalogue.look_again(streams) if streams else ():
            raise NotCommittedError from LogBusyError(
                f"stream {stream.name} was changed while events were written to it: commit again"
            )

    def _check_conditions(
        self, commit: Commit, holder: Holder, prepared: Sequence[KafkaPrepared]
    ) -> None:
        """Nobody else writes to the tables, and this session is the producer's: what is found
        stays so until the commit.
        """

        def find(table: Stream, key: bytes) -> int | None:
            if table.spec.writer != holder.producer:
                raise UsageError(
                    f"condition on table {table.name}: others may write to it, and Kafka has no "
                    "atomic compare-and-write: give it one writer (penstock stream alter "
                    f"{table.name} --writer {holder.producer})"
                )
            stream = self._catalogue.stream(str(table.name))
            (entry,) = self._tables.get(stream, [key], None, settled=True)
            return None if entry is None else entry.offset

        check_conditions(commit, (item.stream for item in prepared), find)

    # What is to be written

    def prepare(self, part: Part) -> Part:
        stream = self._catalogue.stream(part.stream)
        check_columns(stream, part.batch)
        ready = prepare(stream, [part.batch], self._limits, ahead=stream.spec.ids != "producer")
        return msgspec.structs.replace(part, ready=ready)

    def _prepare_all(self, holder: Holder, sequence: int, commit: Commit) -> list[KafkaPrepared]:
        made = []
        names = {part.stream for part in commit.parts} | {piece.stream for piece in commit.pieces}
        for name in names:
            check_writer(self._catalogue.stream(name), holder.producer)
        for part in commit.parts:
            stream = self._catalogue.stream(part.stream)
            ready = part.ready
            if isinstance(ready, KafkaPrepared) and ready.stream is stream:
                made.append(ready)
                continue
            check_columns(stream, part.batch)
            made.append(prepare(stream, [part.batch], self._limits))
        if commit.pieces:
            streams = {p.stream: self._catalogue.stream(p.stream) for p in commit.pieces}
            staged = self._read_staged(holder, sequence, commit.pieces, streams)
            for piece in commit.pieces:
                batches = [staged[number] for number in piece.batches]
                made.append(prepare(streams[piece.stream], batches, self._limits))
        return made

    def _read_staged(
        self,
        holder: Holder,
        sequence: int,
        pieces: Sequence[Piece],
        streams: Mapping[str, KafkaStream],
    ) -> dict[int, pa.RecordBatch]:
        numbers = [number for piece in pieces for number in piece.batches]
        if len(set(numbers)) < len(numbers):
            raise PieceError("a staged piece is listed twice")
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
        self, session: Session, holder: Holder, prepared: Sequence[KafkaPrepared]
    ) -> Iterator[tuple[Session, Sequence[KafkaPrepared]]]:
        """The session that writes, and what is left to write after comparing ids."""
        comparing = {p.stream.id: p.stream for p in prepared if p.stream.spec.ids == "producer"}
        if not comparing:
            yield session, prepared
            return
        if len(comparing) > 1:
            names = " and ".join(str(stream.name) for stream in comparing.values())
            raise UsageError(
                f"{names} both take ids from the producer, and on Kafka a commit can write to only "
                "one such stream, since each has its own writer: commit them one after the other"
            )
        stream = next(iter(comparing.values()))
        with self._producers.using_ids(stream.topic) as ids:
            self._producers.bind(session, holder.producer, ids, stream.topic)
            yield ids, self._without_held(stream, prepared)
            failpoint("commit.ids")

    def _without_held(
        self, stream: KafkaStream, prepared: Sequence[KafkaPrepared]
    ) -> list[KafkaPrepared]:
        """Drop the events whose ids the stream already holds."""
        place = (stream.topic, 0)  # nobody else can write there while we compare
        with self._cluster.watching(lambda: self._catalogue.check_there(stream)):
            end = self._cluster.wait_for_ends([place])[place]
        mine = [item for item in prepared if item.stream.id == stream.id]
        ids = [
            id_ for item in mine for chunk in item.chunks for id_ in ids_of(chunk.batch).to_pylist()
        ]
        gone = set(self._tables.store.find_held(stream, ids, end))
        made, at = [], 0
        for item in prepared:
            if item.stream.id != stream.id:
                made.append(item)
                continue
            rows = sum(chunk.batch.num_rows for chunk in item.chunks)
            dropped = tuple(row - at for row in sorted(gone) if at <= row < at + rows)
            at += rows
            made.append(_thin_out(item, dropped) if dropped else item)
        return made

    # Being seen

    def _until_visible(self, topics: Sequence[str], placements: Sequence[Placement]) -> None:
        """Wait, for a limited time, until the commit can be read; it is durable in any case."""
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
                return  # dropped in the meantime, or unreachable
            last = {place: offset for place, offset in last.items() if ends[place] <= offset}
            if last:
                time.sleep(0.001)


def _thin_out(item: KafkaPrepared, dropped: Sequence[int]) -> KafkaPrepared:
    """What is left to send without these rows."""
    at, kept = 0, []
    for chunk in item.chunks:
        rows = range(at, at + chunk.batch.num_rows)
        gone = [row - at for row in dropped if row in rows]
        at = rows.stop
        if len(gone) < len(rows):
            left = without(chunk.batch, gone)
            kept.append(msgspec.structs.replace(chunk, batch=left, encoded=None))
    return KafkaPrepared(item.stream, kept, tuple(dropped))


def _pauses() -> Iterator[float]:
    """How long to wait before each further attempt: randomised, so that two take turns."""
    while True:
        yield RETRY_PAUSE_S * random.uniform(0.5, 2)  # noqa: S311


def _failure(error: Exception, holder: Holder) -> PenstockError:
    """The error of an attempt, as the rules for all engines expect it (`log.writing.fate`)."""
    match error:
        case TakenError():
            return LogBusyError(
                f"producer {holder.producer} is constantly in use by other processes, or its "
                "commit takes longer than transaction_timeout_ms: commit less at a time"
            )
        case UnknownError():
            # Whatever the error: opening the producer again tells the outcome.
            return CommitOutcomeUnknownError(str(cause_of(error)))
        case NotCommittedError():
            return cause_of(error)
        case StreamGoneError():
            return LogBusyError(str(error))  # commit to the stream that exists now
        case PenstockError():
            return error
    return LogError(f"Kafka: {error}")
