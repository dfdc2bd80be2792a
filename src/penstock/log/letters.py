"""Dead letters: what could not be handled, kept with the reason in a stream of its own.

A letter is sent again once: that it was is saved in the commit that sends it, as ranges of
offsets, so that a crash in between, or a second call, sends none of them twice.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import msgspec

from penstock.errors import ClosedError, ObjectExistsError
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Log, Part
from penstock.log.batch import Batch
from penstock.log.declaring.names import SYSTEM
from penstock.log.declaring.objects import CreateStream, Stream, declare
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.event import StoredEvent
from penstock.records.schema import Record, schema_of

DEAD_CHARS_MAX = 100_000
"""How much of an event's data a dead letter tells."""


class DeadLetter(Record):
    """An event that an agent could not handle, or that could not be read, with why.

    Of one that could not be read, `agent` and `id` are empty, and `data` is what is there. Of a
    connector's message that the stream cannot hold, `id` is the one it would have had, and
    `offset` its number. Of a timer, `stream` is empty, and `data` says when it was due.
    """

    agent: str
    stream: str
    partition: int
    offset: int
    id: str
    key: str | None
    data: str
    error: str
    traceback: str
    tries: int


def dead_name(stream: str) -> str:
    """The stream in which the dead letters of another are."""
    return f"{stream}_dead"


def ensure_letters(log: Log, streams: Iterable[str]) -> None:
    """Make the streams of dead letters that are not there."""
    known = {str(stream.name) for stream in log.streams()}
    for name in sorted({dead_name(stream) for stream in streams} - known):
        with contextlib.suppress(ObjectExistsError):  # somebody else made it just now
            log.apply([CreateStream(declare(name, DeadLetter))])


def letter_streams(log: Log) -> list[Stream]:
    """Every stream that holds dead letters."""
    return [s for s in log.streams() if s.name.namespace != SYSTEM and holds_letters(s)]


def holds_letters(stream: Stream) -> bool:
    """Whether a stream's record is a dead letter, as this or a later version writes them."""
    mine, record = schema_of(DeadLetter), stream.record
    if record is None or record.name != mine.name:
        return False
    return all(record.field(field.name) == field for field in mine.fields)


class Letter(NamedTuple):
    """A dead letter where it lies. Between `first` and `offset` there is no other."""

    partition: int
    first: int
    offset: int
    event: StoredEvent[DeadLetter]

    @property
    def place(self) -> str:
        return f"{self.partition}:{self.offset}"


def letters_in(batch: Batch) -> Iterator[Letter]:
    """The dead letters of a batch."""
    first = batch.first_offset
    for event in batch.events(DeadLetter):
        yield Letter(event.partition, first, event.offset, event)  # type: ignore[arg-type]
        first = event.offset + 1


class SentLetters(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of letters that were sent again, and into which stream."""

    first: int
    last: int
    into: str


class SentAgain:
    """Which letters of a stream were sent again."""

    def __init__(self, log: Log, letters: Stream) -> None:
        self._log = log
        self._letters = letters
        self._sent: dict[int, list[SentLetters]] = {}

    def load(self) -> Self:
        """Read what is saved now. Whoever will add to it holds the producer first."""
        for key, value in self._log.progress_items(self._key("")).items():
            partition = int(key.rpartition("/")[2])
            self._sent[partition] = msgspec.json.decode(value, type=list[SentLetters])
        return self

    def find(self, letter: Letter) -> SentLetters | None:
        """The stretch in which a letter is; `None` if it was not sent again."""
        sent = self._sent.get(letter.partition, [])
        index = bisect_right(sent, letter.offset, key=lambda one: one.first) - 1
        return sent[index] if index >= 0 and sent[index].last >= letter.offset else None

    def after(self, letters: Sequence[Letter], into: str) -> dict[int, list[SentLetters]]:
        """What it is once these are sent, for the partitions that they are in."""
        first = {p: o.first for p, o in self._log.offsets(str(self._letters.name)).items()}
        found: dict[int, list[SentLetters]] = {}
        for letter in letters:
            before = found.get(letter.partition) or self._sent.get(letter.partition, [])
            found[letter.partition] = [*before, SentLetters(letter.first, letter.offset, into)]
        return {p: _merge(sent, first[p]) for p, sent in found.items()}

    def progress(self, sent: Mapping[int, list[SentLetters]]) -> dict[str, bytes]:
        """The same as it is saved."""
        return {self._key(str(p)): msgspec.json.encode(ranges) for p, ranges in sent.items()}

    def note(self, sent: Mapping[int, list[SentLetters]]) -> None:
        """These are saved."""
        self._sent.update(sent)

    def _key(self, partition: str) -> str:
        return f"dead/{self._letters.id}/{partition}"


def _merge(sent: list[SentLetters], first_kept: int) -> list[SentLetters]:
    """In order, neighbours as one, without what retention has removed."""
    found: list[SentLetters] = []
    for one in sorted(sent, key=lambda one: one.first):
        last = found[-1] if found else None
        if one.last < first_kept:
            continue
        if last is not None and last.into == one.into and last.last + 1 >= one.first:
            found[-1] = SentLetters(last.first, max(last.last, one.last), last.into)
        else:
            found.append(one)
    return found


class Resend(NamedTuple):
    """A letter, and the event that it is to be."""

    letter: Letter
    data: object
    options: EventOptions


class Resender:
    """Sends dead letters of one stream again, each once.

    Two of them do not get in each other's way: the later one fences the earlier, which then
    raises `FencedError` and has sent nothing that the later one does not know of.
    """

    def __init__(self, log: Log, letters: Stream, source: str) -> None:
        self._log = log
        self._letters = letters
        self._composer = Composer(source, log.limits)
        self._holder: Holder | None = None
        self._sequence = 0
        self.sent = SentAgain(log, letters)

    def open(self) -> None:
        """Fence whoever else sends these again, then see what was sent."""
        producer = f"dead-letters/{self._letters.id}"
        self._holder = self._log.hold(producer)
        self._sequence = next_sequence(self._log, producer)
        self.sent.load()

    def compose(self, into: Stream, letters: Sequence[Resend]) -> Part:
        """The events, checked; raises the `UsageError` that says what is wrong with one."""
        events = [self._composer.admit(into, one.data, one.options) for one in letters]
        return self._composer.part(into, events)

    def send(
        self, part: Part, letters: Sequence[Resend], options: CommitOptions = CommitOptions()
    ) -> Committed:
        """Commit them, and that they were sent. Call it again with the same after an error."""
        if self._holder is None:
            raise ClosedError("the resender is not open: call open first")
        sent = self.sent.after([one.letter for one in letters], part.stream)
        commit = Commit(parts=[part], progress=self.sent.progress(sent))
        done = self._log.commit(self._holder, self._sequence, commit, options)
        self._sequence += 1
        self.sent.note(sent)
        return done


def readable(data: bytes | None) -> str:
    """Bytes as text that anybody can read, not too much of it."""
    return (data or b"")[:DEAD_CHARS_MAX].decode(errors="backslashreplace")
