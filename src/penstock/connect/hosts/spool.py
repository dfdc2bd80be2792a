"""The stage of every sink: messages wait on the host's disk until the target has them.

Messages that were voted for are durable here; committed ones are taken from here in commit order,
and removed once the target has them. Only one process uses the folder at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.connect.hosts import earlier
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark
from penstock.connect.protocol.sink_session import WorkerStanding
from penstock.errors import BufferFullError, SinkGoneError, UsageError
from penstock.resources import statements

SQL = statements("penstock.connect.hosts", "spool.sql")
FILE = "spool.db"
LOCK = "spool.lock"
VERSION = 2
FIRST_STREAM = 1
PAGE_BYTES = 16_384
"""Page size of the file; large, since the values written to it are."""
SPOOL_BYTES_MAX = 1 << 30
LEFT_MS = 7 * 24 * 3600 * 1000
"""How long the position of a worker that has left is remembered."""


Lot = tuple[list[SinkMessage], Mark, Mark]
"""Messages that were staged together, and the marks before and after them."""


class StageMarks(NamedTuple):
    """How far a worker's stream is applied, committed and, if a vote is open, voted for."""

    applied: Mark = Mark()
    committed: Mark = Mark()
    voted: Mark | None = None

    @property
    def kept(self) -> Mark:
        """Everything after this was never voted for, and is lost on a restart."""
        return self.committed if self.voted is None else self.voted


class StagedCommit(NamedTuple):
    """Messages of one commit of a worker's stream that the target does not have yet."""

    number: int
    name: str
    start: Mark
    end: Mark


class DeadMessage(NamedTuple):
    """A message that the target refuses permanently, set aside after its transaction committed."""

    name: str
    place: Mark
    time_ms: int
    message: SinkMessage
    error: str


class Stage:
    """Where messages of a worker's stream are staged on one connection.

    It ends when the stream turns out to be at another position: nothing more is staged then.
    """

    def __init__(self, name: str, at: Mark, generation: int) -> None:
        self.name = name
        self.at = at
        self.generation = generation
        self.refusals: list[tuple[int, str]] = []
        """Messages that the target can never accept: their number in the transaction, and why."""


class Spool:
    """The spool file. Safe to use from any thread."""

    def __init__(self, folder: Path, bytes_max: int = SPOOL_BYTES_MAX) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._waiting_bytes = 0
        self._generations: dict[str, int] = {}
        self._exits = contextlib.ExitStack()

    def open(self) -> None:
        """Open it. Raises `UsageError` if another process uses the folder, or it is unusable."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as exits:
            holder = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            exits.callback(os.close, holder)
            try:
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another process is using the sink folder {self._folder}: stop it, or choose "
                    "another folder"
                ) from None
            self._database = sqlite3.connect(
                self._folder / FILE, isolation_level=None, check_same_thread=False
            )
            exits.callback(self._database.close)
            self._database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._create()
            self._count_waiting()
            self._exits = exits.pop_all()

    def _create(self) -> None:
        (version,) = self._database.execute(SQL["version"]).fetchone()
        if version > VERSION:
            raise UsageError(
                f"{self._folder / FILE} was written by a later version of Penstock: use that one"
            )
        if version < VERSION:
            with self.write(durable=True) as database:
                for name, text in SQL.items():
                    if name.startswith("create "):
                        for statement in filter(str.strip, text.split(";\n")):
                            database.execute(statement)
                self._take_over(database)
                database.execute(f"PRAGMA user_version = {VERSION}")
        earlier.retire(self._folder)

    def _take_over(self, database: sqlite3.Connection) -> None:
        """Import what a sink of an earlier version has left here."""
        ends: dict[str, Mark] = {}
        for worker, standing in earlier.read_standings(self._folder).items():
            self._save_standing(database, worker, standing)
            for stream, end in standing.committed.items():
                ends[sink_name(worker, stream)] = Mark(end)
        if earlier.has_messages(database, SQL):
            for name, messages in earlier.read_messages(database, SQL, self._folder):
                size = sum(len(message.data) for message in messages)
                ends[name] = Mark(ends[name].offset - size, ends[name].messages)
            for name, messages in earlier.read_messages(database, SQL, self._folder):
                stage = Stage(name, ends[name], 0)
                self._insert(database, stage, messages)
                database.execute(SQL["add commit"], (name, *ends[name], *stage.at))
                ends[name] = stage.at
            earlier.drop_messages(database, SQL)
        for name, mark in ends.items():
            self._save_marks(name, StageMarks(mark, mark))

    def close(self) -> None:
        with self._lock:
            self.changed.notify_all()
            self._exits.close()

    @contextlib.contextmanager
    def write(self, durable: bool) -> Iterator[sqlite3.Connection]:
        """A transaction; a durable one also makes durable everything written before it."""
        with self._lock:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
            self.changed.notify_all()

    # Workers

    def standings(self) -> dict[str, WorkerStanding]:
        with self._lock:
            rows = self._database.execute(SQL["standings"]).fetchall()
        return {worker: _standings.decode(text) for worker, text in rows}

    def leave(self, worker: str, standing: WorkerStanding, names: Sequence[str]) -> None:
        """Note that the worker will not return; its undecided messages are discarded."""
        with self.write(durable=True) as database:
            for name in names:
                marks = self._marks(name) or StageMarks()
                self._save_marks(name, marks._replace(voted=None))
                database.execute(SQL["discard"], (name, marks.committed.messages))
            text = msgspec.json.encode(standing).decode()
            database.execute(SQL["leave"], (text, now_ms(), worker))

    def forget_left(self) -> None:
        """Forget workers that left long ago and have nothing waiting."""
        with self.write(durable=False) as database:
            gone = database.execute(SQL["gone workers"], (now_ms() - LEFT_MS,)).fetchall()
            for (worker,) in gone:
                (waiting,) = database.execute(SQL["has commits"], {"worker": worker}).fetchone()
                if not waiting:
                    database.execute(SQL["forget worker"], (worker,))
                    database.execute(SQL["forget sinks"], {"worker": worker})

    # Staging

    def marks(self, name: str) -> StageMarks | None:
        """How far a worker's stream is; `None` if the spool does not know it."""
        with self._lock:
            return self._marks(name)

    def _marks(self, name: str) -> StageMarks | None:
        row = self._database.execute(SQL["sink"], (name,)).fetchone()
        if row is None:
            return None
        voted = None if row[4] is None else Mark(*row[4:6])
        return StageMarks(Mark(*row[0:2]), Mark(*row[2:4]), voted)

    def _save_marks(self, name: str, marks: StageMarks) -> None:
        voted = (None, None) if marks.voted is None else marks.voted
        row = (name, *marks.applied, *marks.committed, *voted)
        self._database.execute(SQL["save sink"], row)

    def adopt(self, name: str, at: Mark) -> None:
        """Start at the target's position; everything staged for this stream is discarded."""
        with self.write(durable=True) as database:
            self._generations[name] = self._generations.get(name, 0) + 1
            self._save_marks(name, StageMarks(at, at))
            database.execute(SQL["discard"], (name, 0))
            database.execute(SQL["forget commits of"], (name,))
        self._count_waiting()

    def begin(self, name: str) -> Stage:
        """Discard messages that were never voted for; the next one is staged after the rest."""
        with self.write(durable=False) as database:
            kept = (self._marks(name) or StageMarks()).kept
            database.execute(SQL["discard"], (name, kept.messages))
            return Stage(name, kept, self._generations.get(name, 0))

    def add(self, stage: Stage, messages: Sequence[SinkMessage]) -> None:
        """Stage messages, which become durable only when they are voted for."""
        with self.write(durable=False) as database:
            self._check(stage)
            self._insert(database, stage, messages)

    def _insert(
        self, database: sqlite3.Connection, stage: Stage, messages: Sequence[SinkMessage]
    ) -> None:
        size = sum(len(message.data) for message in messages)
        end = Mark(stage.at.offset + size, stage.at.messages + len(messages))
        data = _encoder.encode(messages)
        row = (stage.name, stage.at.offset, stage.at.messages, end.messages, data)
        database.execute(SQL["add"], row)
        stage.at = end

    def _check(self, stage: Stage) -> None:
        if self._generations.get(stage.name, 0) != stage.generation:
            raise SinkGoneError(f"{stage.name} is at another position in its target: reconnect")

    def check_room(self) -> None:
        """Raise `BufferFullError` while too much is waiting."""
        if self._waiting_bytes >= self._bytes_max:
            raise BufferFullError(
                f"the spool is full: {self._waiting_bytes:,} bytes are waiting, and the limit is "
                f"{self._bytes_max:,} (spool_bytes_max)"
            )

    def save_vote(self, worker: str, standing: WorkerStanding, stages: Sequence[Stage]) -> None:
        """Save a vote and the messages it covers; durable when this returns."""
        with self.write(durable=True) as database:
            for stage in stages:
                self._check(stage)
                marks = self._marks(stage.name) or StageMarks()
                self._save_marks(stage.name, marks._replace(voted=stage.at))
            self._save_standing(database, worker, standing)

    def save_outcome(
        self, worker: str, standing: WorkerStanding, stages: Sequence[Stage], commit: bool
    ) -> None:
        """Save an outcome, durably. Committed messages wait for the target from now on."""
        with self.write(durable=True) as database:
            for stage in stages:
                self._check(stage)
                marks = self._marks(stage.name) or StageMarks()
                if commit and marks.voted is not None:
                    row = (stage.name, *marks.committed, *marks.voted)
                    database.execute(SQL["add commit"], row)
                    self._save_marks(stage.name, marks._replace(committed=marks.voted, voted=None))
                    self._waiting_bytes += marks.voted.offset - marks.committed.offset
                else:
                    self._save_marks(stage.name, marks._replace(voted=None))
                    database.execute(SQL["discard"], (stage.name, marks.committed.messages))
                    stage.at, stage.refusals = marks.committed, []
            self._save_standing(database, worker, standing)

    def _save_standing(
        self, database: sqlite3.Connection, worker: str, standing: WorkerStanding
    ) -> None:
        text = msgspec.json.encode(standing).decode()
        database.execute(SQL["save standing"], (worker, text))

    # Applying

    def names_with_commits(self) -> list[str]:
        """The streams with committed messages that the target does not have."""
        with self._lock:
            return [name for (name,) in self._database.execute(SQL["names with commits"])]

    def next_commit(self, name: str | None = None) -> StagedCommit | None:
        """The oldest waiting commit, of one stream or of all."""
        with self._lock:
            query, values = ("next commit", ()) if name is None else ("next commit of", (name,))
            row = self._database.execute(SQL[query], values).fetchone()
        return (
            None if row is None else StagedCommit(row[0], row[1], Mark(*row[2:4]), Mark(*row[4:6]))
        )

    def messages(self, name: str, after: Mark, end: Mark) -> Iterator[Lot]:
        """The messages between two marks, as they were staged; one lot at a time is in memory."""
        while after.messages < end.messages:
            with self._lock:
                wanted = (name, after.messages, end.messages)
                row = self._database.execute(SQL["chunk"], wanted).fetchone()
            if row is None:
                raise UsageError(f"the spool does not contain {name} from {after} to {end}")
            first, data = row
            found = _decoder.decode(data)[after.messages - first : end.messages - first]
            at = Mark(after.offset + sum(len(m.data) for m in found), after.messages + len(found))
            yield found, after, at
            after = at

    def set_applied(self, name: str, mark: Mark) -> None:
        """Discard everything up to this mark, which the target has. Not durable: the target's own
        mark says the same.
        """
        with self.write(durable=False) as database:
            marks = self._marks(name) or StageMarks()
            self._save_marks(name, marks._replace(applied=mark))
            done = (name, mark.messages)
            (size,) = database.execute(SQL["waiting bytes of"], done).fetchone()
            database.execute(SQL["forget commits"], done)
            database.execute(SQL["forget chunks"], done)
            self._waiting_bytes -= size

    def forget_commit(self, commit: StagedCommit) -> None:
        """Discard a commit that the program has read."""
        with self.write(durable=False) as database:
            database.execute(SQL["forget commit"], (commit.number,))
            database.execute(SQL["forget chunks"], (commit.name, commit.end.messages))
            self._waiting_bytes -= commit.end.offset - commit.start.offset

    def _count_waiting(self) -> None:
        with self._lock:
            (self._waiting_bytes,) = self._database.execute(SQL["waiting bytes"]).fetchone()

    # Dead letters

    def bury(self, dead: DeadMessage) -> None:
        """Set a message aside durably; repeating this after an interruption is harmless."""
        name, place, time_ms, message, error = dead
        row = (
            *(name, place.messages, place.offset, time_ms),
            *(message.key, message.time_ns, message.data, error),
        )
        with self.write(durable=True) as database:
            database.execute(SQL["bury"], row)

    def dead(self) -> list[DeadMessage]:
        with self._lock:
            return list(map(_to_dead, self._database.execute(SQL["dead"])))


def read_dead(folder: Path) -> list[DeadMessage]:
    """The messages set aside in a sink's folder, whether or not the sink is running."""
    if not (folder / FILE).exists():
        raise UsageError(f"{folder} is not a sink's folder: it contains no {FILE}")
    address = f"{(folder / FILE).resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
        (version,) = database.execute(SQL["version"]).fetchone()
        return list(map(_to_dead, database.execute(SQL["dead"]))) if version == VERSION else []


def _to_dead(row: tuple[str, int, int, int, bytes | None, int, bytes, str]) -> DeadMessage:
    name, number, start, time_ms, key, time_ns, data, error = row
    return DeadMessage(name, Mark(start, number), time_ms, SinkMessage(key, time_ns, data), error)


def sink_name(worker: str, stream: int) -> str:
    """The name of a worker's stream in the spool: the worker's own name for the first one."""
    return worker if stream == FIRST_STREAM else f"{worker}#{stream}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[SinkMessage])
_standings = msgspec.json.Decoder(WorkerStanding)
