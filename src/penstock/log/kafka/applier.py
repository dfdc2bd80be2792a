"""Changes of the catalogue: carried out by one process at a time, each change atomically.

A process that changes the catalogue holds its session, so its change is based on the current
contents. Kafka has no such session for creating, configuring and removing topics. Therefore:

- a change has happened when the catalogue says so, and topics are adapted afterwards; what is to
  be done is written with the change, and done by the next process if this one dies;
- topics that a stream needs from its first moment on are created before: topics that nobody knows
  do no harm;
- a topic is removed by name. Only the process that recorded the removal knows when none of its own
  requests is in flight any more; if another process had to do it, the name is not used again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import LogBusyError, LogError, ObjectExistsError, UsageError
from penstock.failpoints import failpoint
from penstock.log.declaring.names import OBJECTS
from penstock.log.declaring.objects import Defaults, ObjectChanged, describe_change, to_event
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.messages import encode
from penstock.log.kafka.objects import (
    SESSION,
    Configuration,
    Draft,
    Duty,
    KafkaCatalogue,
    Removal,
)
from penstock.log.kafka.producers import explain_failures
from penstock.log.kafka.session import (
    KafkaMessage,
    NotCommittedError,
    Session,
    Sessions,
    TakenError,
    UnknownError,
)
from penstock.log.kafka.topics import Topics
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.event import now_us

TRIES_MAX = 50
PAUSE_S, PAUSE_S_MAX = 0.05, 2.0
LEFT_ALONE_US = 60 * 1_000_000
"""How long the removal of a topic is left to the process that recorded it."""
DraftChange = Callable[[Draft], list[ObjectChanged]]
"""Makes changes to a draft; returns the events that describe them."""


class Applier:
    """Changes the catalogue, and the topics accordingly. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        sessions: Sessions,
        catalogue: KafkaCatalogue,
        composer: Composer,
        defaults: Defaults,
        partitions_max: int,
    ) -> None:
        self._cluster = cluster
        self._sessions = sessions
        self._catalogue = catalogue
        self._composer = composer
        self._defaults = defaults
        self._partitions_max = partitions_max
        self._topics = Topics(cluster)

    def change(self, work: DraftChange) -> None:
        """Change the catalogue, as its only writer.

        1. Open the catalogue's session, which fences everyone else, and read it to its end.
        2. Finish what is left of earlier changes.
        3. Determine the changes; create the topics of new streams, and add partitions to topics.
        4. Write the changes, an event for each, and what is to be done to topics, atomically.
        5. Do that, and remove it from the list.
        """
        own: Mapping[str, Duty] | None = None
        for tries in range(TRIES_MAX):
            with self._sessions.using(SESSION) as session, explain_failures():
                try:
                    if not session.is_open:
                        session.open()
                    self._catalogue.look()
                    if own is None:
                        self._do_duties(session, {})
                        own = self._write_down(session, work)
                    self._do_duties(session, own)
                    return
                except (TakenError, UnknownError):
                    longest_s = min(PAUSE_S_MAX, PAUSE_S * 2**tries)
                    time.sleep(random.uniform(PAUSE_S, longest_s))  # noqa: S311  to take turns
                except (LogError, NotCommittedError):
                    if own is None:
                        raise
                    return  # it has happened, and the next process does the rest
        if own is None:
            raise LogBusyError(
                "the catalogue is constantly being changed by other processes: try again"
            )

    def finish_leftovers(self) -> None:
        """Finish what processes left undone when they died in the middle of a change."""
        draft = self._draft(self._cluster.topics())
        is_due = any(_is_due(duty) for duty in draft.duties().values())
        if is_due or self._topics.find_overlooked(draft.streams(), draft.there):
            self.change(lambda _: [])

    def _draft(self, there: Mapping[str, int]) -> Draft:
        lines, address = self._catalogue.lines(), self._cluster.address
        return Draft(lines, address, self._defaults, self._partitions_max, there)

    def _write_down(self, session: Session, work: DraftChange) -> Mapping[str, Duty]:
        """Do steps 3 and 4; return what is to be done in step 5."""
        known = self._catalogue.lines()
        draft = self._draft(self._cluster.topics())
        notes = []
        for growth in self._topics.find_overlooked(draft.streams(), draft.there):
            with contextlib.suppress(UsageError):  # more partitions than are allowed
                notes.append(to_event(growth, describe_change(growth, draft.change(growth))))
        notes += work(draft)
        try:
            duties = self._topics.check(draft)
        except ObjectExistsError:
            self._catalogue.look()
            if self._catalogue.lines() != known:
                raise TakenError from None  # it is another's, who was faster: look again
            raise
        for topic, duty in duties.items():
            draft.note(topic, duty)
        self._topics.make(draft)
        self._write(session, draft, notes)
        failpoint("objects.event")
        return duties

    def _do_duties(self, session: Session, own: Mapping[str, Duty]) -> None:
        """Do what is to be done: what this call recorded, and what others left behind.

        Own settings are set again if another process has made changes in the meantime: this one may
        have been late, and have overwritten theirs.
        """
        draft = self._draft({})
        again = {t: duty for t, duty in own.items() if isinstance(duty, Configuration)}
        for topic, duty in {**again, **draft.duties()}.items():
            if topic in own or _is_due(duty):
                # Whatever Kafka refuses, or cannot do now, is left to others.
                with contextlib.suppress(LogError):
                    self._topics.carry_out(topic, duty, draft.stream_in(topic))
                    spend = isinstance(duty, Removal) and topic not in own
                    draft.discharge(topic, spend=spend)
        self._send(session, draft, [])

    def _write(self, session: Session, draft: Draft, notes: Sequence[ObjectChanged]) -> None:
        """Write a change, and find out whether that has happened."""
        try:
            self._send(session, draft, notes)
        except UnknownError:
            session.open()
            self._catalogue.look()
            lines = self._catalogue.lines()
            if any(lines.get(key) != value for key, value in draft.values.items()):
                raise

    def _send(self, session: Session, draft: Draft, notes: Sequence[ObjectChanged]) -> None:
        if not draft.values:
            return
        deadline = time.monotonic() + self._cluster.timeout_s
        told = self._messages_of(notes)  # before the transaction: reading waits for open ones

        def fill() -> None:
            for key, value in draft.values.items():
                session.send(self._catalogue.topic, 0, key.encode(), value)
            session.send_all(self._cluster.address.topic(OBJECTS), 0, told)

        session.transact(fill, deadline)
        self._catalogue.look()

    def _messages_of(self, notes: Sequence[ObjectChanged]) -> list[KafkaMessage]:
        """The events of `_system.objects` that go with a change."""
        if not notes:
            return []
        stream = self._catalogue.stream(str(OBJECTS))
        events = [self._composer.admit(stream, note, EventOptions(), system=True) for note in notes]
        encoded = encode(stream, self._composer.part(stream, events).batch)
        return list(zip(encoded.keys, encoded.values, encoded.headers(), strict=True))


def _is_due(duty: Duty) -> bool:
    """Whether another process should do it: settings at once, a removal after a while."""
    return isinstance(duty, Configuration) or duty.since_us < now_us() - LEFT_ALONE_US
