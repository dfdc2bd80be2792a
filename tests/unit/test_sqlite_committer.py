"""Many commits in one transaction: what each of them is told, whatever happens to the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.errors import CommitOutcomeUnknownError
from penstock.log import open_log
from penstock.log.api import Commit, Committed
from penstock.log.sqlite import committer as module
from penstock.log.sqlite.committer import Committer, Write
from penstock.log.sqlite.connection import connect
from penstock.log.sqlite.log import SqliteLog
from penstock.testing.contract import create, make_part
from penstock.testing.faults import FaultyVfs, faulty_disk

Work = Callable[[Write], object]


@pytest.fixture
def disk() -> Iterator[FaultyVfs]:
    with faulty_disk() as vfs:
        yield vfs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def log(path: Path, disk: FaultyVfs) -> Iterator[SqliteLog]:
    with open_log(path, upkeep_interval_ms=0, vfs="faulty") as opened:
        assert isinstance(opened, SqliteLog)
        yield opened


class Ticket:
    """A thread that submits some work, and what it is told."""

    def __init__(self, log: SqliteLog, work: Work, timeout_s: float = 30, durable: bool = True):
        self.outcome: object = None
        self._committer: Committer = log._committer
        self._given = (work, timeout_s, durable)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        work, timeout_s, durable = self._given
        try:
            self.outcome = self._committer.submit(work, durable=durable, timeout_s=timeout_s)
        except BaseException as error:
            self.outcome = type(error)

    def wait(self) -> object:
        self._thread.join(30)
        return self.outcome


def save(key: str) -> Work:
    def work(write: Write) -> str:
        write.run("save_progress", key, b"v")
        return key

    return work


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_gives_up_after_the_leader_took_it_does_not_know(log: SqliteLog, path: Path) -> None:
    go_on = threading.Event()

    def slowly(write: Write) -> None:
        write.run("save_progress", "slow", b"v")
        go_on.wait(30)

    with contextlib.closing(connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        leader = Ticket(log, slowly)
        until(log._committer._lock.locked)
        hasty = Ticket(log, save("hasty"), timeout_s=1.0)
        until(lambda: len(log._committer._queue) == 2)
        other.execute("ROLLBACK")
    assert hasty.wait() is CommitOutcomeUnknownError
    go_on.set()
    assert leader.wait() is None
    assert log.progress("hasty") == b"v", "it did happen"


def test_an_interrupt_while_it_commits_leaves_the_others_in_doubt(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        if name == "commit.committed":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "failpoint", interrupt)
    log._committer._lock.acquire()
    tickets = [Ticket(log, save(name)) for name in ("one", "other")]
    until(lambda: len(log._committer._queue) == 2)
    log._committer._lock.release()
    told = {ticket.wait() for ticket in tickets}
    assert told == {KeyboardInterrupt, CommitOutcomeUnknownError}
    assert log.progress("one") == log.progress("other") == b"v"


def test_nobody_who_waits_for_the_disk_joins_those_who_do_not(
    log: SqliteLog, disk: FaultyVfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comes in between the opening of a transaction and the choice of who is in it."""
    careful: list[Ticket] = []

    def come_in(name: str) -> None:
        if name == "commit.begun" and not careful:
            careful.append(Ticket(log, save("careful"), durable=True))
            until(lambda: any(t.durable for t in log._committer._queue))

    monkeypatch.setattr(module, "failpoint", come_in)
    disk.syncs.clear()
    quick = Ticket(log, save("quick"), durable=False)
    assert quick.wait() == "quick"
    assert careful[0].wait() == "careful"
    assert disk.syncs, "what waits for the disk was synced"


def test_one_careful_stream_makes_the_whole_commit_wait_for_the_disk(
    log: SqliteLog, disk: FaultyVfs
) -> None:
    create(log, "fast", acks="write")
    create(log, "safe")
    holder = log.hold("p")
    parts = [make_part(log, name, [1]) for name in ("fast", "safe")]
    disk.syncs.clear()
    log.commit(holder, 0, Commit(parts=parts[:1]))
    assert not disk.syncs
    log.commit(holder, 1, Commit(parts=parts))
    assert disk.syncs


def test_a_stored_batch_has_at_most_so_many_bytes(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0, batch_bytes_max=100_000) as log:
        create(log, "s")
        part = make_part(log, "s", range(50_000))
        assert part.batch.nbytes > 1_000_000
        log.commit(log.hold("p"), 0, Commit(parts=[part]))
        sizes = [batch.nbytes for batch in log.read("s", 0, 0)]
        assert max(sizes) <= 110_000
        assert len(sizes) >= 10


def test_offsets_that_are_missing_are_found(log: SqliteLog, path: Path) -> None:
    create(log, "s")
    holder = log.hold("p")
    for n in range(3):
        log.commit(holder, n, Commit(parts=[make_part(log, "s", range(10))]))
    with contextlib.closing(connect(path)) as other:
        other.execute("DELETE FROM batches WHERE first_offset = 10")
    (damage,) = [found for found in log.verify() if found.stream == "s"]
    assert (damage.first_offset, damage.last_offset) == (10, 19)
    assert "missing" in damage.message


def test_progress_alone_waits_for_the_disk(log: SqliteLog, disk: FaultyVfs) -> None:
    holder = log.hold("p")
    disk.syncs.clear()
    log.commit(holder, 0, Commit(progress={"k": b"v"}))
    assert disk.syncs


def test_what_is_staged_waits_for_the_disk(log: SqliteLog, disk: FaultyVfs) -> None:
    create(log, "s")
    holder = log.hold("p")
    disk.syncs.clear()
    log.stage(holder, 0, make_part(log, "s", [1]))
    assert disk.syncs


def test_a_batch_past_the_recorded_end_is_found(log: SqliteLog, path: Path) -> None:
    create(log, "s")
    holder = log.hold("p")
    for n in range(2):
        log.commit(holder, n, Commit(parts=[make_part(log, "s", range(10))]))
    with contextlib.closing(connect(path)) as other:
        other.execute("UPDATE partitions SET next_offset = 10 WHERE next_offset = 20")
    (damage,) = [found for found in log.verify() if found.stream == "s"]
    assert damage.first_offset == 10
    assert "past the recorded end" in damage.message


def test_an_outcome_of_the_first_version_does_not_say_who_made_the_commit(
    log: SqliteLog, path: Path
) -> None:
    """It can be repeated; a fenced holder in doubt is not told that it was its own."""
    create(log, "s")
    holder = log.hold("p")
    part = make_part(log, "s", [1])
    done = log.commit(holder, 0, Commit(parts=[part]))
    with contextlib.closing(connect(path)) as connection:
        ((packed,),) = connection.execute("SELECT outcome FROM producers").fetchall()
        assert isinstance(packed, bytes)
        assert msgspec.msgpack.decode(packed)["epoch"] == holder.epoch
        assert msgspec.msgpack.decode(packed, type=Committed) == done  # as that version reads it
        older = msgspec.msgpack.encode(done)
        connection.execute("UPDATE producers SET outcome = ?", (older,))
    assert log.commit(holder, 0, Commit(parts=[part])).repeated
    log._doubts.add(holder, 0)
    log.hold("p")
    with pytest.raises(CommitOutcomeUnknownError):
        log.commit(holder, 0, Commit(parts=[part]))
