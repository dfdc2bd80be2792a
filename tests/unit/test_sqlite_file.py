"""The file of the embedded log: formats, migrations, refusals, upkeep and copies."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from pathlib import Path

import apsw
import pytest

from penstock.errors import (
    ClosedError,
    LogBusyError,
    LogFormatError,
    ObjectExistsError,
    PinExpiredError,
    UnknownObjectError,
    UsageError,
)
from penstock.log import open_log
from penstock.log.api import Commit, CommitOptions
from penstock.log.reading.table import Table
from penstock.log.sqlite import connection as sqlite
from penstock.log.sqlite.committer import Write
from penstock.testing.contract import Order, commit_as, create, make_part, orders


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def schema_of(path: Path) -> list[tuple[object, ...]]:
    connection = sqlite.connect(path)
    try:
        return connection.execute(
            "SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
    finally:
        connection.close()


def test_migrations_step_by_step_give_what_a_new_log_has(path: Path, tmp_path: Path) -> None:
    with open_log(path):
        pass
    stepwise = tmp_path / "steps.db"
    with contextlib.closing(sqlite.connect(stepwise)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        for number in range(1, sqlite.FORMAT + 1):
            connection.execute("BEGIN IMMEDIATE")
            sqlite.upgrade(connection, number)
            connection.execute("COMMIT")
            assert connection.pragma("user_version") == number
    assert schema_of(stepwise) == schema_of(path)
    with open_log(stepwise) as log:
        create(log, "s")
        commit_as(log, log.hold("p"), 0, "s", [1])
    folder = Path(sqlite.__file__).parent / "migrations"
    assert len(list(folder.glob("*.sql"))) == sqlite.FORMAT


def test_every_statement_fits_the_schema_and_is_used(path: Path) -> None:
    with open_log(path):
        pass
    folder = Path(sqlite.__file__).parents[1]
    files = [*folder.glob("sqlite/*.py"), *folder.glob("engine/*.py")]
    code = "".join(file.read_text("utf-8") for file in files)
    with contextlib.closing(sqlite.connect(path)) as connection:
        for name in sqlite.statement_names():
            connection.execute(
                f"EXPLAIN {sqlite.sql(name)}", _anything(sqlite.sql(name))
            ).fetchall()
            assert f'"{name}"' in code, f"{name} is not used"


def _anything(statement: str) -> dict[str, int] | tuple[int, ...]:
    names = re.findall(r":([a-z]+)", statement)
    return dict.fromkeys(names, 1) if names else (1,) * statement.count("?")


def test_a_newer_format_is_refused(path: Path) -> None:
    with open_log(path):
        pass
    with contextlib.closing(sqlite.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {sqlite.FORMAT + 1}")
    before = path.read_bytes()
    with pytest.raises(LogFormatError, match=f"format {sqlite.FORMAT + 1}.*upgrade Penstock"):
        open_log(path)
    assert path.read_bytes() == before


def test_an_old_sqlite_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(LogFormatError, match=r"SQLite 3\.51\.2 is too old.*3\.51\.3"):
        open_log(path)
    assert not path.exists()
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.3")
    open_log(path).close()


def test_files_of_others_are_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("hello")
    with pytest.raises(LogFormatError, match="not a Penstock log"):
        open_log(text)
    assert text.read_text() == "hello"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(LogFormatError, match="another program"):
        open_log(path)
    assert path.read_bytes() == before
    with pytest.raises(LogFormatError, match="directory"):
        open_log(tmp_path)


def test_a_log_that_is_not_there(path: Path) -> None:
    with pytest.raises(UnknownObjectError, match="no log at"):
        open_log(path, create=False)
    assert not path.exists()


def test_options_are_checked(path: Path) -> None:
    with pytest.raises(UsageError, match="no log option 'colour'"):
        open_log(path, colour="red")
    with pytest.raises(UsageError, match="event_bytes_max"):
        open_log(path, event_bytes_max="many")
    with pytest.raises(UsageError, match="scheme 'ftp'"):
        open_log("ftp://x")
    with open_log(path, event_bytes_max="1000") as log:
        assert log.limits.event_bytes_max == 1000


def test_a_closed_log_refuses(path: Path) -> None:
    log = open_log(path)
    create(log, "s")
    part = make_part(log, "s", [1])
    holder = log.hold("p")
    log.close()
    log.close()
    for call in (
        lambda: log.stream("s"),
        lambda: log.hold("p"),
        lambda: log.stage(holder, 0, part),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_forked_process_must_open_its_own(path: Path) -> None:
    with open_log(path) as log:
        create(log, "s")
        pid = os.fork()
        if pid == 0:
            try:
                log.stream("s")
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_writer_that_hangs_is_not_waited_for_forever(path: Path) -> None:
    with open_log(path) as log, contextlib.closing(sqlite.connect(path)) as other:
        create(log, "s")
        holder = log.hold("p")
        other.execute("BEGIN IMMEDIATE")
        commit = Commit(parts=[make_part(log, "s", [1])])
        with pytest.raises(LogBusyError, match="try again"):
            log.commit(holder, 0, commit, CommitOptions(timeout_ms=50))
        other.execute("ROLLBACK")
        log.commit(holder, 0, commit)
        assert [e.data.amount for e in orders(log, "s")] == [1]


def test_a_backup_is_consistent_while_others_write(path: Path, tmp_path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "a")
        create(log, "b")
        stop = threading.Event()

        def write() -> None:
            with open_log(path, upkeep_interval_ms=0) as other:
                holder, n = other.hold("w"), 0
                while not stop.is_set():
                    parts = [make_part(other, name, range(n, n + 20)) for name in ("a", "b")]
                    other.commit(holder, n, Commit(parts=parts))
                    n += 20

        thread = threading.Thread(target=write)
        thread.start()
        while not log.offsets("b")[0].next:
            stop.wait(0.01)
        for n in range(5):
            target = tmp_path / f"copy-{n}.db"
            calls: list[tuple[int, int]] = []
            log.backup(target, lambda done, total, calls=calls: calls.append((done, total)))  # type: ignore[misc]
            assert calls[-1][0] == calls[-1][1] > 0
            with open_log(target, create=False, upkeep_interval_ms=0) as copy:
                amounts = [e.data.amount for e in orders(copy, "a")]
                assert amounts == list(range(len(amounts)))
                assert [e.data.amount for e in orders(copy, "b")] == amounts
                assert list(copy.verify()) == []
        stop.set()
        thread.join()
        with pytest.raises(ObjectExistsError, match="already exists"):
            log.backup(tmp_path / "copy-0.db")
        assert not list(tmp_path.glob("*.partial"))


def test_an_interrupt_harms_nobody_else(path: Path) -> None:
    """Ctrl-C in the thread that commits for others: they hear that it did not happen."""
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        committer = log._committer  # type: ignore[attr-defined]
        outcomes: list[object] = []

        def submit(work: object) -> None:
            try:
                outcomes.append(committer.submit(work, durable=True, timeout_s=30))
            except BaseException as error:
                outcomes.append(type(error))

        def good(write: Write) -> str:
            write.run("save_progress", "k", b"v")
            return "done"

        def interrupted(write: Write) -> None:
            raise KeyboardInterrupt

        committer._lock.acquire()
        threads = [threading.Thread(target=submit, args=(work,)) for work in (good, interrupted)]
        for thread in threads:
            thread.start()
        while len(committer._queue) < 2:
            pass
        committer._lock.release()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 2
        assert KeyboardInterrupt in outcomes
        if "done" in outcomes:  # the leader was interrupted after it had taken only its own
            assert log.progress("k") == b"v"
        else:
            assert LogBusyError in outcomes
            assert log.progress("k") is None
        commit_as(log, log.hold("p"), 0, "s", [1])
        with open_log(path, upkeep_interval_ms=0) as other:
            commit_as(other, other.hold("q"), 0, "s", [2])


def test_work_that_fails_half_way_harms_nobody_else(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        committer = log._committer  # type: ignore[attr-defined]
        outcomes: list[object] = []

        def good(write: Write) -> str:
            write.run("save_progress", "good", b"v")
            return "done"

        def bad(write: Write) -> None:
            write.run("save_progress", "bad", b"v")
            raise RuntimeError("half-way")

        def submit(work: object) -> None:
            try:
                outcomes.append(committer.submit(work, durable=True, timeout_s=30))
            except RuntimeError as error:
                outcomes.append(str(error))

        with committer._lock:
            threads = [threading.Thread(target=submit, args=(work,)) for work in (bad, good)]
            for thread in threads:
                thread.start()
            while len(committer._queue) < 2:
                threads[0].join(0.001)
        for thread in threads:
            thread.join(30)
        assert sorted(map(str, outcomes)) == ["done", "half-way"]
        assert log.progress_items("") == {"good": b"v"}


def test_whoever_reads_keys_that_begin_alike_leaves_no_pin_behind(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "t", table=True)
        commit_as(log, log.hold("p"), 0, "t", range(10))
        table = Table(log, "t", Order)
        assert len(list(table.starting_with("u"))) == 10
        early = table.starting_with("u")
        next(early)
        early.close()
    with contextlib.closing(sqlite.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM pins").fetchall() == [(0,)]


def test_a_pin_that_ended_stays_so_although_the_clock_is_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote meanwhile kept nothing for it."""
    real = time.time_ns()
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "t", table=True)
        holder = log.hold("p")
        commit_as(log, holder, 0, "t", [1])
        pin = log.pin(60)
        monkeypatch.setattr(time, "time_ns", lambda: real + 3600 * 10**9)
        commit_as(log, holder, 1, "t", [11])
        monkeypatch.setattr(time, "time_ns", lambda: real)
        with pytest.raises(PinExpiredError):
            log.get("t", [b"u1"], pin)


def test_a_pin_holds_although_the_clock_jumps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns()
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "t", table=True)
        holder = log.hold("p")
        hour = 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: real + hour)
        commit_as(log, holder, 0, "t", [1])
        monkeypatch.setattr(time, "time_ns", lambda: real)
        pin = log.pin()
        commit_as(log, holder, 1, "t", [11])
        log.maintain()
        table = Table(log, "t", Order)
        assert table.get("u1", at=pin) == Order("u1", 1)
        assert table.get("u1") == Order("u1", 11)


def test_a_forgotten_directory_or_name_makes_no_file(tmp_path: Path) -> None:
    for wrong in (None, "", 5):
        with pytest.raises(UsageError, match="a path or a URL"):
            open_log(wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leader", ["hasty", "patient"])
def test_each_commit_waits_as_long_as_it_said(path: Path, leader: str) -> None:
    """Whoever leads the group: a hasty commit knows that it did not happen, a patient one waits."""
    with (
        open_log(path, upkeep_interval_ms=0) as log,
        contextlib.closing(sqlite.connect(path)) as other,
    ):
        create(log, "s")
        holders = {name: log.hold(name) for name in ("hasty", "patient")}
        parts = {name: make_part(log, "s", [n]) for n, name in enumerate(holders)}
        outcomes: dict[str, str] = {}

        def commit(name: str) -> None:
            options = CommitOptions(timeout_ms=300 if name == "hasty" else 30_000)
            try:
                log.commit(holders[name], 0, Commit(parts=[parts[name]]), options)
                outcomes[name] = "committed"
            except LogBusyError:
                outcomes[name] = "busy"

        threads = {name: threading.Thread(target=commit, args=(name,)) for name in holders}
        follower = "patient" if leader == "hasty" else "hasty"
        committer = log._committer  # type: ignore[attr-defined]
        other.execute("BEGIN IMMEDIATE")
        threads[leader].start()
        while not committer._lock.locked():
            threads[leader].join(0.001)
        threads[follower].start()
        threads["hasty"].join(30)
        other.execute("ROLLBACK")
        threads["patient"].join(30)
        assert outcomes == {"hasty": "busy", "patient": "committed"}
        commit("hasty")
        assert [event.data.amount for event in orders(log, "s")] == [1, 0]


def test_two_backups_to_one_target_do_not_mix(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        commit_as(log, log.hold("p"), 0, "s", range(5000))
        told: list[str] = []

        def back_up() -> None:
            try:
                log.backup(target)
                told.append("copied")
            except ObjectExistsError:
                told.append("exists")

        threads = [threading.Thread(target=back_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(told) == ["copied", "exists", "exists", "exists"]
    with open_log(target, create=False, upkeep_interval_ms=0) as copy:
        assert sum(1 for _ in orders(copy, "s")) == 5000
    assert not list(tmp_path.glob("*.partial"))


def test_a_damaged_declaration_is_found_and_the_rest_verified(path: Path) -> None:
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "good")
        create(log, "bad")
        with contextlib.closing(sqlite.connect(path)) as connection:
            connection.execute("UPDATE streams SET grown = '[2]' WHERE name = 'bad'")
    with open_log(path, upkeep_interval_ms=0) as log:
        assert [damage.stream for damage in log.verify()] == ["bad"]
        assert list(orders(log, "good")) == []
        assert log.facts()["streams"] == 4


def test_a_backup_is_on_the_disk_before_it_has_its_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, synced = tmp_path / "copy.db", []
    real = os.fsync

    def sync(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")), target.exists()))
        real(handle)

    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        monkeypatch.setattr("os.fsync", sync)
        log.backup(target)
    (copy, early), folder = synced
    assert copy.suffix == ".partial"
    assert not early
    assert folder == (tmp_path, True)
