"""Disks at their worst: full, failing, read-only, losing power, and flipping bits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import (
    CommitOutcomeUnknownError,
    DamagedError,
    FencedError,
    LogError,
    LogFullError,
    LogIOError,
    LogReadOnlyError,
    PenstockError,
    PieceError,
)
from penstock.log import open_log
from penstock.log.api import Commit, CommitOptions, Damage, Log, Piece
from penstock.log.reading.read import ReadOptions, read_events
from penstock.log.sqlite.connection import PAGE_BYTES, connect
from penstock.testing.contract import Order, commit_as, create, make_part, orders
from penstock.testing.faults import Fault, FaultyVfs, faulty_disk


@pytest.fixture
def disk() -> Iterator[FaultyVfs]:
    with faulty_disk() as vfs:
        yield vfs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def open_on(path: Path, **options: str | int) -> Log:
    return open_log(path, create=True, vfs="faulty", upkeep_interval_ms=0, **options)


def amounts(path: Path) -> list[int]:
    """What a new process would find."""
    with open_log(path, upkeep_interval_ms=0) as log:
        return [event.data.amount for event in orders(log, "s")]


def test_a_full_disk_refuses_and_recovers(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", [0])
        disk.faults = [Fault("write", "full", lasting=True)]
        for _ in range(3):
            with pytest.raises(LogFullError, match="free some space"):
                commit_as(log, holder, 1, "s", [1])
            assert [e.data.amount for e in orders(log, "s")] == [0]
        disk.faults = []
        commit_as(log, holder, 1, "s", [1])
    assert amounts(path) == [0, 1]


def test_a_write_error_is_never_called_failed_when_it_may_have_happened(
    disk: FaultyVfs, path: Path
) -> None:
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        disk.faults = [Fault("write", "io")]
        with pytest.raises((CommitOutcomeUnknownError, LogIOError)):
            commit_as(log, holder, 0, "s", [0])
        done = commit_as(log, holder, 0, "s", [0])
        assert not done.repeated
    assert amounts(path) == [0]


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_fsync_has_an_unknown_outcome(
    disk: FaultyVfs, path: Path, tmp_path: Path, late: bool
) -> None:
    """After it, the process may go on and retry, or die and let the next one recover."""
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", [0])
        disk.faults = [Fault("sync", "io", late=late)]
        with pytest.raises(CommitOutcomeUnknownError, match="commit again under the same name"):
            commit_as(log, holder, 1, "s", [1])
        died = tmp_path / "died.db"
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{died}{suffix}")
        with open_log(died, upkeep_interval_ms=0) as recovered:
            assert [e.data.amount for e in orders(recovered, "s")] in ([0], [0, 1])
            commit_as(recovered, recovered.hold("p"), 1, "s", [1])
            assert [e.data.amount for e in orders(recovered, "s")] == [0, 1]
        commit_as(log, holder, 1, "s", [1])
    assert amounts(path) == [0, 1]


def test_a_full_disk_after_an_unknown_outcome_is_still_unknown(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        disk.faults = [Fault("sync", "io")]
        with pytest.raises(CommitOutcomeUnknownError):
            commit_as(log, holder, 0, "s", [0])
        disk.faults = [Fault("write", "full", lasting=True)]
        for _ in range(3):
            with pytest.raises(CommitOutcomeUnknownError, match="may or may not have happened"):
                commit_as(log, holder, 0, "s", [0])
        disk.faults = []
        commit_as(log, holder, 0, "s", [0])
    assert amounts(path) == [0]


def test_a_commit_in_doubt_that_did_not_happen_is_found_out(disk: FaultyVfs, path: Path) -> None:
    """Once something else was written, what a failed COMMIT left behind cannot turn up any more.

    Recovery finds everything that is in the file beside the log, synced or not.
    """

    def after_a_crash(name: str) -> list[int]:
        folder = path.parent / name
        folder.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{folder / path.name}{suffix}")
        return amounts(folder / path.name)

    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        part = make_part(log, "s", [0])
        for sequence in (0, 1):
            disk.faults = [Fault("sync", "io")]
            with pytest.raises(CommitOutcomeUnknownError):
                log.commit(holder, sequence, Commit(parts=[part]))
            disk.faults = []
            assert after_a_crash(f"doubt{sequence}") == [0]
            if sequence == 0:
                with pytest.raises(PieceError):
                    log.commit(holder, sequence, Commit(pieces=[Piece("s", (999,), 1)]))
            else:
                log.hold("p")
                with pytest.raises(FencedError):
                    log.commit(holder, sequence, Commit(parts=[part]))
            assert after_a_crash(f"known{sequence}") == []
    assert amounts(path) == []


@pytest.mark.parametrize("failure", ["io", "full"])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_any_single_failure_loses_and_doubles_nothing(
    disk: FaultyVfs, tmp_path: Path, operation: str, failure: str
) -> None:
    """Fail the n-th operation, for every n that a commit with a checkpoint has."""
    for at in range(1, 40, 3):
        path = tmp_path / f"{at}.db"
        with open_on(path) as log:
            create(log, "s")
            holder = log.hold("p")
            disk.faults = [
                Fault(operation, failure, suffix=suffix, at=at)  # type: ignore[arg-type]
                for suffix in ("-wal", ".db")
            ]
            for sequence in range(6):
                for _ in range(5):
                    try:
                        commit_as(log, holder, sequence, "s", [sequence])
                        break
                    except PenstockError as error:
                        if not error.retriable:
                            raise
            disk.faults = []
        assert amounts(path) == list(range(6))


@pytest.mark.row("H10", engine="embedded")
@pytest.mark.parametrize("acks", ["majority", "all"])
def test_what_was_acknowledged_survives_loss_of_power(
    disk: FaultyVfs, path: Path, tmp_path: Path, acks: str
) -> None:
    """Only what was synced is left; a commit at these acks is."""
    disk.durable = tmp_path / "durable"
    disk.durable.mkdir()
    with open_on(path) as log:
        create(log, "s", acks=acks)
        holder = log.hold("p")
        for n in range(10):
            commit_as(log, holder, n, "s", [n])
            after = tmp_path / f"after-{n}"
            shutil.copytree(disk.durable, after)
            assert amounts(after / "log.db") == list(range(n + 1))


@pytest.mark.row("H10", engine="embedded")
def test_a_commit_syncs_what_was_staged_without(
    disk: FaultyVfs, path: Path, tmp_path: Path
) -> None:
    """Tasks stage without waiting for the disk; the commit waits for all of it."""
    disk.durable = tmp_path / "durable"
    disk.durable.mkdir()
    with open_on(path) as log, open_on(path) as other:
        create(log, "s")
        holder = log.hold("p")
        disk.syncs.clear()
        lazily = CommitOptions(acks="write")
        pieces = [
            where.stage(holder, 0, make_part(where, "s", [n]), lazily)
            for n, where in enumerate((log, other))
        ]
        assert not disk.syncs
        log.commit(holder, 0, Commit(pieces=pieces))
        after = tmp_path / "after"
        shutil.copytree(disk.durable, after)
        assert amounts(after / "log.db") == [0, 1]


def test_a_commit_that_is_repeated_is_synced_again(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "s", acks="write")
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", [1])
        disk.syncs.clear()
        part = make_part(log, "s", [1])
        done = log.commit(holder, 0, Commit(parts=[part]), CommitOptions(acks="all"))
        assert done.repeated
        assert len(disk.syncs) == 1


def test_a_commit_whose_pieces_are_gone_is_synced_when_it_is_repeated(
    disk: FaultyVfs, path: Path
) -> None:
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        lazily = CommitOptions(acks="write")
        piece = log.stage(holder, 0, make_part(log, "s", [1]), lazily)
        log.commit(holder, 0, Commit(pieces=[piece]), lazily)
        disk.syncs.clear()
        assert log.commit(holder, 0, Commit(pieces=[piece])).repeated
        assert len(disk.syncs) == 1


def test_commits_that_wait_together_are_synced_together(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "s")
        holders = [log.hold(f"p{n}") for n in range(12)]
        parts = [make_part(log, "s", [n]) for n in range(12)]
        threads = [
            threading.Thread(target=log.commit, args=(holder, 0, Commit(parts=[part])))
            for holder, part in zip(holders, parts, strict=True)
        ]
        committer = log._committer  # type: ignore[attr-defined]
        with committer._lock:
            for thread in threads:
                thread.start()
            while len(committer._queue) < len(threads):
                threads[0].join(0.001)
            disk.syncs.clear()
        for thread in threads:
            thread.join(30)
        assert len(disk.syncs) == 1
        assert sorted(e.data.amount for e in orders(log, "s")) == list(range(12))


@pytest.mark.row("H10", engine="embedded")
def test_acks_write_does_not_wait_for_the_disk(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "fast", acks="write")
        create(log, "safe")
        holder = log.hold("p")
        syncs: dict[str, list[int]] = {}
        for n, stream in enumerate(("fast", "safe", "fast", "safe")):
            disk.syncs.clear()
            commit_as(log, holder, n, stream, [n])
            syncs.setdefault(stream, []).append(len(disk.syncs))
        assert syncs["fast"] == [0, 0]
        assert min(syncs["safe"]) >= 1
        assert [e.data.amount for e in orders(log, "fast")] == [0, 2]


def as_nobody(work: Callable[[], object]) -> str:
    """Do it in a process without privileges, root's or others'; what it raised, in words."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            told = "nothing was raised"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    return told


@pytest.fixture
def locked() -> Iterator[Path]:
    """A directory that everybody may read and nobody may write."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_read_only_directory_is_refused(locked: Path) -> None:
    locked.chmod(0o555)
    told = as_nobody(lambda: open_log(locked / "log.db"))
    assert told.startswith("LogReadOnlyError: ")
    assert "is read-only" in told
    assert list(locked.iterdir()) == []


def test_a_log_in_a_read_only_directory_is_refused(locked: Path) -> None:
    with open_log(locked / "log.db", upkeep_interval_ms=0) as log:
        create(log, "s")
    (locked / "log.db").chmod(0o444)
    locked.chmod(0o555)
    told = as_nobody(lambda: open_log(locked / "log.db", upkeep_interval_ms=0).hold("p"))
    assert told.startswith("LogReadOnlyError: ")
    assert "write access" in told


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogReadOnlyError, match="does not exist"):
        open_log(tmp_path / "nowhere" / "log.db")


def flip(path: Path, where: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ (1 << bit)]))


def find_blob(path: Path, first_offset: int) -> bytes:
    connection = connect(path)
    query = "SELECT data FROM blobs JOIN batches ON blob_id = id WHERE first_offset = ?"
    try:
        row = connection.execute(query, (first_offset,)).fetchone()
    finally:
        connection.close()
    assert row is not None
    return bytes(row[0])


def place_in_file(whole: bytes, blob: bytes, rng: random.Random) -> int:
    """A random byte of the blob, where the file has it; other blobs look alike in places."""
    while True:
        at = rng.randrange(len(blob) - 64)
        if whole.count(blob[at : at + 64]) == 1:
            return whole.find(blob[at : at + 64]) + rng.randrange(64)


def test_bit_flips_over_a_stored_batch_are_found(path: Path) -> None:
    """Flip bits all over one batch: each is an error that names it, and never wrong data."""
    seed = int(os.environ.get("PENSTOCK_SEED", random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        create(log, "other")
        holder = log.hold("p")
        for n in range(3):
            commit_as(log, holder, n, "s", range(n * 200, n * 200 + 200))
        commit_as(log, holder, 3, "other", [7])
    blob = find_blob(path, 200)
    whole = path.read_bytes()
    for _ in range(60):
        path.write_bytes(whole)
        flip(path, place_in_file(whole, blob, rng), rng.randrange(8))
        with open_log(path, upkeep_interval_ms=0) as log:
            with pytest.raises(DamagedError, match="offsets 200 to 399") as damage:
                list(orders(log, "s"))
            where = damage.value
            assert (where.stream, where.partition) == ("s", 0), f"seed {seed}"
            assert (where.first_offset, where.last_offset) == (200, 399), f"seed {seed}"
            told: list[DamagedError] = []
            rest = read_events(log, "s", Order, ReadOptions(on_damage=told.append))
            good = [*range(200), *range(400, 600)]
            assert [event.data.amount for event in rest] == good, f"seed {seed}"
            assert len(told) == 1
            assert [e.data.amount for e in orders(log, "other")] == [7]
            log.maintain()
            found = [d for d in log.verify() if d.stream]
            assert [(d.stream, d.first_offset, d.last_offset) for d in found] == [("s", 200, 399)]


@pytest.mark.parametrize(
    "change",
    [
        "rows = rows - 1", "rows = 0", "rows = -3", "rows = 1 << 33",
        "commit_number = commit_number + 1", "time_us = time_us + 1",
        "blob_id = (SELECT min(id) FROM blobs)", "checksum = checksum + 1", "runs = x'90'",
        "first_offset = first_offset + 1",
    ],
)  # fmt: skip
def test_a_damaged_index_row_is_found(path: Path, change: str) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", range(10))
        commit_as(log, holder, 1, "s", range(10, 20))
        with contextlib.closing(connect(path)) as connection:
            connection.execute(f"UPDATE batches SET {change} WHERE first_offset = 10")  # noqa: S608
        with pytest.raises(DamagedError, match="are damaged"):
            list(orders(log, "s"))
        assert [d for d in log.verify() if d.stream == "s"]
        commit_as(log, holder, 2, "s", range(20, 30))
        told: list[DamagedError] = []
        good = read_events(log, "s", Order, ReadOptions(on_damage=told.append))
        assert [e.data.amount for e in good] == [*range(10), *range(20, 30)]
        assert len(told) == 1
        with pytest.raises(DamagedError):
            list(log.read("s", 0, 15))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE blobs SET data = x'00' WHERE id = (SELECT max(blob_id) FROM batches "
        "WHERE first_offset = 20 AND stream_id = ?)",
        "UPDATE batches SET seal = seal + 1 WHERE first_offset = 20 AND stream_id = ?",
    ],
)
def test_upkeep_goes_on_beside_damage(path: Path, damage: str) -> None:
    """A damaged batch is left alone; what can be merged is, and the damage stays findable."""
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        create(log, "other")
        holder = log.hold("p")
        for n in range(40):
            commit_as(log, holder, 2 * n, "s", [n])
            commit_as(log, holder, 2 * n + 1, "other", [n])
        with contextlib.closing(connect(path)) as connection:
            connection.execute(damage, (log.stream("s").id,))
        assert log.maintain().batches_merged > 0
        assert [e.data.amount for e in orders(log, "other")] == list(range(40))
        assert [d.first_offset for d in log.verify() if d.stream == "s"] == [20]


def test_damage_anywhere_never_gives_wrong_data(path: Path, seed: int) -> None:
    """Flip bits all over the file: what is read is right, or it is an error."""
    rng = random.Random(seed)
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        holder = log.hold("p")
        for n in range(5):
            commit_as(log, holder, n, "s", range(n * 100, n * 100 + 100))
    whole = path.read_bytes()
    for _ in range(80):
        path.write_bytes(whole)
        flip(path, rng.randrange(100, len(whole)), rng.randrange(8))
        try:
            with open_log(path, upkeep_interval_ms=0) as log:
                found = [event.data.amount for event in orders(log, "s")]
        except (LogError, DamagedError, PenstockError):
            continue
        assert found == list(range(len(found)))
        assert len(found) in (0, 100, 200, 300, 400, 500)


def test_outcome_is_unknown_only_for_what_was_in_the_commit(disk: FaultyVfs, path: Path) -> None:
    with open_on(path) as log:
        create(log, "s")
        holder = log.hold("p")
        disk.faults = [Fault("sync", "io")]
        with pytest.raises(CommitOutcomeUnknownError):
            log.commit(holder, 0, Commit(progress={"k": b"v"}))
        disk.faults = []
        log.commit(holder, 0, Commit(progress={"k": b"v"}))
        assert log.progress("k") == b"v"


def test_verify_says_what_damage_of_the_file_s_own_pages_means(path: Path, seed: int) -> None:
    """Overwrite a page here and there: what verify does not list can be read, and is right."""
    rng = random.Random(seed)
    with open_log(path, upkeep_interval_ms=0) as log:
        for name in ("s", "other"):
            create(log, name, partitions=2)
        create(log, "t", table=True)
        holder = log.hold("p")
        for n in range(60):
            commit_as(log, holder, n, ("s", "other", "t")[n % 3], range(n * 20, n * 20 + 20))
    whole = path.read_bytes()
    texts = set()
    pages = range(PAGE_BYTES, len(whole), PAGE_BYTES)
    for at in (*pages, *(page + 3000 for page in rng.choices(pages, k=10))):
        path.write_bytes(whole[:at] + rng.randbytes(3000) + whole[at + 3000 :])
        with open_log(path, read_only=True) as log:
            found = list(log.verify())
            texts |= {damage.message for damage in found}
            assert not any("penstock verify" in damage.message for damage in found)
            check_listed(log, found)
    path.write_bytes(whole[:100] + rng.randbytes(3000) + whole[3100:])
    with pytest.raises(LogError, match="is damaged"):
        open_log(path, read_only=True)
    assert any("its declaration cannot be read" in text for text in texts), f"seed {seed}"
    assert any("cannot be read" in text and "table t" in text for text in texts)
    assert any("latest commits of producers" in text for text in texts)


def check_listed(log: Log, found: list[Damage]) -> None:
    """What is not in the list of damage can be read, all of it."""
    if any("list of streams" in damage.message for damage in found):
        return
    for name in ("s", "other"):
        lost = [damage for damage in found if damage.stream == name]
        told: list[DamagedError] = []
        spans = [(damage.first_offset, damage.last_offset) for damage in lost]
        if (None, None) in spans:
            continue  # of the stream as a whole
        events = read_events(log, name, Order, ReadOptions(on_damage=told.append))
        rows = sum(
            last + 1 - first for first, last in spans if first is not None and last is not None
        )
        assert sum(1 for _ in events) == 400 - rows


def test_a_damaged_piece_is_not_committed(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "t", table=True)
        holder = log.hold("p")
        piece = log.stage(holder, 0, make_part(log, "t", range(100)))
        blob = piece.batches[0]
        with contextlib.closing(connect(path)) as connection:
            [row] = connection.execute("SELECT data FROM blobs WHERE id = ?", (blob,)).fetchall()
            assert isinstance(row[0], bytes)
            data = bytearray(row[0])
            data[-80] ^= 1
            connection.execute("UPDATE blobs SET data = ? WHERE id = ?", (bytes(data), blob))
        with pytest.raises(PieceError, match="damaged: stage it again"):
            log.commit(holder, 0, Commit(pieces=[piece]))
        piece = log.stage(holder, 0, make_part(log, "t", range(100)))
        log.commit(holder, 0, Commit(pieces=[piece]))
        assert len(log.page("t")) == 10


def test_a_follower_is_told_of_damage_once(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        holder = log.hold("p")
        for n in range(2):
            commit_as(log, holder, n, "s", [n])
        with contextlib.closing(connect(path)) as connection:
            connection.execute("UPDATE batches SET seal = seal + 1 WHERE first_offset = 1")
        told: list[DamagedError] = []
        events = read_events(log, "s", Order, ReadOptions(on_damage=told.append, follow=True))
        assert next(events).data.amount == 0
        later = threading.Timer(0.2, lambda: commit_as(log, holder, 2, "s", [2]))
        later.start()
        assert next(events).data.amount == 2
        later.join()
        assert [damage.first_offset for damage in told] == [1]
