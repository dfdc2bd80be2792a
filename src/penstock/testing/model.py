"""A simple in-memory model of the log, and a state machine that compares an engine with it.

The model is the contract in its simplest form: lists and dictionaries, no storage. Hypothesis
generates sequences of operations; after each one, both must give the same results.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import FencedError, PieceError, SequenceError, UnknownObjectError
from penstock.log.api import Commit, Committed, Holder, Log, Part, Piece
from penstock.log.declaring.objects import CreateStream, DropStream, GrowStream, declare
from penstock.log.reading.read import read_changes
from penstock.log.reading.table import Table
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.schema import Record

NAMES = ("plain", "table", "unique")
PRODUCERS = ("p", "q")
ModelOutcome = Literal["committed", "repeated", "fenced", "old", "no piece", "no stream"]


class ModelEntry(Record):
    key: str
    value: int


ModelRow = tuple[str, str | int | None, int]
"""Key, id if the producer gives one, and value."""


class ModelStaged(NamedTuple):
    """A staged piece, which may or may no longer be published."""

    piece: Piece
    producer: str
    epoch: int
    sequence: int
    stream: str
    stream_id: int
    partitions: int
    rows: list[ModelRow]


class Model:
    """The expected state of the log after a sequence of operations."""

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self.events: dict[str, list[list[tuple[str, int]]]] = {}
        self.ids: dict[str, set[str]] = {}
        self.epochs: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.progress: dict[str, bytes] = {}

    def create(self, name: str, partitions: int) -> None:
        self.partitions[name] = partitions
        self.events[name] = [[] for _ in range(partitions)]
        self.ids[name] = set()

    def grow(self, name: str, partitions: int) -> None:
        self.events[name] += [[] for _ in range(partitions - self.partitions[name])]
        self.partitions[name] = partitions

    def drop(self, name: str) -> None:
        del self.partitions[name], self.events[name], self.ids[name]

    def hold(self, producer: str) -> int:
        self.epochs[producer] = self.epochs.get(producer, 0) + 1
        return self.epochs[producer]

    def admit(self, producer: str, epoch: int, sequence: int) -> ModelOutcome | None:
        """The answer to a commit of this name that does not depend on its content."""
        if self.epochs.get(producer) != epoch:
            return "fenced"
        latest = self.latest.get(producer)
        if latest is not None and sequence < latest:
            return "old"
        return "repeated" if sequence == latest else None

    def append(self, name: str, rows: list[ModelRow], partitions: int) -> None:
        for key, id_, value in rows:
            if id_ is not None:
                if str(id_) in self.ids[name]:
                    continue
                self.ids[name].add(str(id_))
            self.events[name][zlib.crc32(key.encode()) % partitions].append((key, value))

    def table(self) -> dict[bytes, int]:
        rows = self.events.get("table", [[]])
        # One partition at a time: a key's latest value is the last one in its partition. The
        # machine never grows the table, so a key has only one partition.
        return {key.encode(): value for partition in rows for key, value in partition}


keys = st.sampled_from(["a", "b", "c", "d", "e"])
values = st.integers(0, 99)
ids = st.one_of(st.integers(0, 12), st.sampled_from(["x", "y", "007"]))
rows = st.lists(st.tuples(keys, ids, values), min_size=1, max_size=5)
sequences = st.integers(0, 12)


class LogMachine(RuleBasedStateMachine):
    """Subclass it with `open_log`, which returns a new, empty log; `close_log` closes it."""

    open_log: Callable[[], Log]

    def close_log(self) -> None:
        self.log.close()

    @initialize()
    def begin(self) -> None:
        self.log = self.open_log()
        self.model = Model()
        self.composer = Composer("machine", self.log.limits)
        self.holders: list[tuple[Holder, int]] = []
        self.staged: list[ModelStaged] = []
        for name in NAMES:
            self._create(name)

    def _create(self, name: str) -> None:
        partitions = 2 if name == "plain" else 1
        ids_from = "producer" if name == "unique" else "log"
        spec = declare(
            name, ModelEntry, key="key", partitions=partitions, ids=ids_from, table=name == "table"
        )
        self.log.apply([CreateStream(spec)])
        self.model.create(name, partitions)

    @rule(producer=st.sampled_from(PRODUCERS))
    def hold(self, producer: str) -> None:
        self.holders.append((self.log.hold(producer), self.model.hold(producer)))

    @rule(name=st.sampled_from(NAMES))
    def drop_and_create(self, name: str) -> None:
        self.log.apply([DropStream(name)])
        self.model.drop(name)
        self._create(name)

    @rule(more=st.integers(1, 2))
    def grow(self, more: int) -> None:
        partitions = self.model.partitions["plain"] + more
        if partitions <= 8:
            self.log.apply([GrowStream("plain", partitions)])
            self.model.grow("plain", partitions)

    @rule(data=st.data(), sequence=sequences, content=st.dictionaries(st.sampled_from(NAMES), rows))
    def commit(
        self, data: st.DataObject, sequence: int, content: dict[str, list[ModelRow]]
    ) -> None:
        """Commit parts with any holder that has ever existed."""
        if not self.holders:
            return
        holder, epoch = data.draw(st.sampled_from(self.holders))
        parts = [self._part(name, found) for name, found in content.items()]
        progress: dict[str, bytes | None] = {holder.producer: str(sequence).encode()}
        commit = Commit(parts=parts, progress=progress)
        answer = self._answer(lambda: self.log.commit(holder, sequence, commit))
        expected = self.model.admit(holder.producer, epoch, sequence)
        assert answer == (expected or "committed")
        if expected is None:
            for name, found in content.items():
                wanted = self._rows(name, found)
                self.model.append(name, wanted, self.model.partitions[name])
            self._note_commit(holder.producer, sequence)

    def _note_commit(self, producer: str, sequence: int) -> None:
        self.model.latest[producer] = sequence
        self.model.progress[producer] = str(sequence).encode()

    @rule(data=st.data(), sequence=sequences, name=st.sampled_from(NAMES), content=rows)
    def stage(self, data: st.DataObject, sequence: int, name: str, content: list[ModelRow]) -> None:
        if not self.holders:
            return
        holder, epoch = data.draw(st.sampled_from(self.holders))
        part = self._part(name, content)
        pieces: list[Piece] = []
        answer = self._answer(lambda: pieces.append(self.log.stage(holder, sequence, part)))
        expected = self.model.admit(holder.producer, epoch, sequence)
        assert answer == ("old" if expected == "repeated" else expected or "committed")
        if pieces:
            stream = self.log.stream(name)
            self.staged.append(
                ModelStaged(
                    pieces[0],
                    holder.producer,
                    epoch,
                    sequence,
                    name,
                    stream.id,
                    stream.partitions,
                    self._rows(name, content),
                )
            )

    @rule(data=st.data(), sequence=sequences)
    def publish(self, data: st.DataObject, sequence: int) -> None:
        """Commit some staged pieces, valid or invalid."""
        if not self.holders or not self.staged:
            return
        holder, epoch = data.draw(st.sampled_from(self.holders))
        chosen = data.draw(st.lists(st.sampled_from(self.staged), min_size=1, max_size=3))
        commit = Commit(
            pieces=[item.piece for item in chosen],
            progress={holder.producer: str(sequence).encode()},
        )
        answer = self._answer(lambda: self.log.commit(holder, sequence, commit))
        expected = self.model.admit(holder.producer, epoch, sequence)
        if expected is not None and answer == "no piece":
            return  # both answers are right: the piece is looked up first
        if expected is None and not self._may_publish(chosen, holder, epoch, sequence):
            expected = "no piece"
        assert answer == (expected or "committed")
        if expected is None:
            for item in chosen:
                self.model.append(item.stream, item.rows, item.partitions)
                self.staged.remove(item)
            self._note_commit(holder.producer, sequence)

    def _may_publish(
        self, chosen: list[ModelStaged], holder: Holder, epoch: int, sequence: int
    ) -> bool:
        names = [item.piece.batches for item in chosen]
        mine = (holder.producer, epoch, sequence)
        return len(set(names)) == len(names) and all(
            (item.producer, item.epoch, item.sequence) == mine
            and item.stream_id == self.log.stream(item.stream).id
            for item in chosen
        )

    @rule()
    def maintain(self) -> None:
        self.log.maintain()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "log"):
            return
        for name, partitions in self.model.events.items():
            found: list[list[tuple[str, int]]] = [[] for _ in partitions]
            last = [-1] * len(partitions)
            for event in read_changes(self.log, name, ModelEntry):
                assert event.data is not None
                assert event.offset > last[event.partition]
                last[event.partition] = event.offset
                found[event.partition].append((event.data.key, event.data.value))
            assert found == partitions, name
        table = Table(self.log, "table", ModelEntry)
        assert {key: entry.value for key, entry in table.items()} == self.model.table()
        assert self.log.progress_items("") == dict(sorted(self.model.progress.items()))

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.close_log()

    def _part(self, name: str, found: list[ModelRow]) -> Part:
        stream = self.log.stream(name)
        events = [
            self.composer.admit(
                stream, ModelEntry(key, value), EventOptions(id=id_ if name == "unique" else None)
            )
            for key, id_, value in found
        ]
        return self.composer.part(stream, events)

    @staticmethod
    def _rows(name: str, found: list[ModelRow]) -> list[ModelRow]:
        return [(key, id_ if name == "unique" else None, value) for key, id_, value in found]

    @staticmethod
    def _answer(work: Callable[[], Committed | None]) -> ModelOutcome:
        try:
            done = work()
        except FencedError:
            return "fenced"
        except SequenceError:
            return "old"
        except PieceError:
            return "no piece"
        except UnknownObjectError as error:
            note(str(error))
            return "no stream"
        return "repeated" if isinstance(done, Committed) and done.repeated else "committed"
