"""Producers on Kafka: who holds one, and its state in the ledger while nobody else can write.

A process writes for a producer only while its session of that name is open: opening it closes
every other one, and only then is the ledger read. So what a session knows about its producer is
correct until a commit fails, and then everything is opened and read again.

Events of an `ids="producer"` stream are written by a separate session of the stream, since only
one writer at a time can compare with the ids that it holds. A producer's line in the ledger names
the streams that it has written to in this way; opening the producer opens their sessions too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from penstock.errors import LogBusyError, LogError, PenstockError
from penstock.failpoints import failpoint
from penstock.log.api import Holder
from penstock.log.kafka.ledger import Ledger, ProducerState, producer_line
from penstock.log.kafka.objects import KafkaCatalogue
from penstock.log.kafka.session import (
    NotCommittedError,
    Session,
    Sessions,
    TakenError,
    UnknownError,
)
from penstock.records.event import now_us

HOLD_TRIES_MAX = 20


class Producers:
    """Opens producers, and sessions that write for them. Thread-safe."""

    def __init__(self, sessions: Sessions, ledger: Ledger, catalogue: KafkaCatalogue) -> None:
        self._sessions = sessions
        self.ledger = ledger
        self.catalogue = catalogue

    def using(self, producer: str) -> contextlib.AbstractContextManager[Session]:
        """The session of a producer, for this thread alone."""
        return self._sessions.using(f"producer.{producer}")

    def using_ids(self, topic: str) -> contextlib.AbstractContextManager[Session]:
        """The session of a stream that compares ids, for this thread alone."""
        return self._sessions.using(f"ids.{topic}")

    def hold(self, producer: str, ephemeral: bool) -> Holder:
        for _ in range(HOLD_TRIES_MAX):
            with self.using(producer) as session, explain_failures():
                with contextlib.suppress(TakenError, UnknownError):
                    state = self.open(session, producer)
                    is_new = state.epoch == 0
                    held = msgspec.structs.replace(
                        state,
                        epoch=self.ledger.unused_epoch(producer) if is_new else state.epoch + 1,
                        ephemeral=ephemeral and (state.ephemeral or is_new),
                        time_us=now_us(),
                        via=self._still_there(state.via),
                    )
                    self._save(session, producer, held)
                    failpoint("hold.epoch")
                    return Holder(producer, held.epoch)
        raise LogBusyError(
            f"producer {producer} is constantly being opened by other processes: stop them"
        )

    def forget(self, producer: str, before_us: int) -> bool:
        """Forget an ephemeral producer, unless it was used since `before_us`."""
        with self.using(producer) as session, explain_failures():
            session.close()
            try:
                state = self.open(session, producer)  # from now on nobody else uses it
                if state.epoch == 0 or not state.is_forgettable(before_us):
                    return False
                line = producer_line(producer, None)
                session.save(self.ledger.topic_of(line), line)
                return True
            except (TakenError, UnknownError):
                return False
            finally:
                session.close()

    def _still_there(self, topics: Sequence[str]) -> tuple[str, ...]:
        """Those topics that still belong to a stream: others are no longer written to."""
        there = {stream.topic for stream in self.catalogue.streams()} if topics else ()
        return tuple(topic for topic in topics if topic in there)

    def open(self, session: Session, producer: str) -> ProducerState:
        """The state of the session's producer in the ledger, which nobody else can change."""
        if not session.is_open:
            session.open()
            try:
                session.state = self._read_state(session, producer)
            except BaseException:
                session.close()  # what it knows about its producer differs from the ledger
                raise
        return session.state

    def _read_state(self, session: Session, producer: str) -> ProducerState:
        """The producer's line, once no transaction that writes for it is in progress.

        Sessions that write for it are named in the line beforehand. Whatever transaction one of
        them left open must be settled before the ledger can be read to its end, which may name
        more sessions.
        """
        session.opened_with = {}
        known = self.ledger.producer(producer, wait=False) or ProducerState()
        while True:
            for stream in set(known.via) - set(session.opened_with):
                with self.using_ids(stream) as ids:
                    ids.close()
                    ids.open()
                    session.opened_with[stream] = ids.opening
            known = self.ledger.producer(producer) or ProducerState()
            if set(known.via) <= set(session.opened_with):
                return known

    def _save(self, session: Session, producer: str, state: ProducerState) -> None:
        line = producer_line(producer, state)
        session.save(self.ledger.topic_of(line), line)
        session.state = state

    def bind(self, session: Session, producer: str, ids: Session, topic: str) -> None:
        """Let the session of a stream write for a producer, only as long as this process has it.

        Opening the producer elsewhere also opens the sessions that its line names, and so closes
        this one. If that happened before this one was opened, writing the line fails.
        """
        state = session.state
        is_bound = ids.is_open and session.opened_with.get(topic) == ids.opening
        if is_bound and topic in state.via:
            return
        if not ids.is_open:
            ids.open()
        via = state.via if topic in state.via else (*state.via, topic)
        self._save(session, producer, msgspec.structs.replace(state, via=via))
        session.opened_with[topic] = ids.opening


def cause_of(error: Exception) -> PenstockError:
    cause = error.__cause__
    return cause if isinstance(cause, PenstockError) else LogError(f"Kafka: {cause}")


@contextlib.contextmanager
def explain_failures() -> Iterator[None]:
    """Raise the cause of a transaction that did not happen."""
    try:
        yield
    except NotCommittedError as error:
        raise cause_of(error) from error
