"""A log that is only read: nothing is written, and no right to write is needed."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import LogBusyError, LogFormatError, LogReadOnlyError, UnknownObjectError
from penstock.log import open_log
from penstock.log.api import Log
from penstock.testing.contract import commit, create, orders

NOBODY = 65534


@pytest.fixture
def path() -> Iterator[Path]:
    """A log in a folder that everybody can look into."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-read-only-"))
    folder.chmod(0o755)
    try:
        yield folder / "a log?.db"
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    with open_log(path, upkeep_interval_ms=0) as opened:
        create(opened, "s", partitions=2)
        create(opened, "t", table=True)
        commit(opened, "p", 0, "s", range(20))
        commit(opened, "p", 1, "t", range(5))
        yield opened


def amounts(log: Log) -> list[int]:
    return sorted(event.data.amount for event in orders(log, "s"))


def as_a_stranger(work: Callable[[], None]) -> None:
    """Run something in a process that may not write to what this one makes."""
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_everything_can_be_read_and_nothing_written(log: Log, path: Path) -> None:
    with open_log(path, read_only=True) as reader:
        assert amounts(reader) == list(range(20))
        assert sum(map(len, reader.snapshot("t"))) == 5
        assert list(reader.verify()) == []
        for write in (
            lambda: reader.hold("p"),
            lambda: create(reader, "new"),
            reader.pin,
            reader.maintain,
        ):
            with pytest.raises(LogReadOnlyError, match="opened read-only"):
                write()
        commit(log, "p", 2, "s", [20])
        assert amounts(reader) == list(range(21))
        backup = path.with_name("copy.db")
        reader.backup(backup)
    with open_log(backup) as copy:
        assert amounts(copy) == list(range(21))


def test_a_file_in_a_read_only_folder(log: Log, path: Path) -> None:
    log.close()
    path.parent.chmod(0o555)
    path.chmod(0o444)

    def read() -> None:
        with pytest.raises(LogReadOnlyError):
            open_log(path)
        with open_log(path, read_only=True) as reader:
            assert amounts(reader) == list(range(20))
            assert list(reader.verify()) == []
        assert os.listdir(path.parent) == [path.name]

    as_a_stranger(read)


def test_a_file_that_somebody_else_uses_now(log: Log, path: Path) -> None:
    """Its newest events are in a file beside it, which is there as long as it is in use."""

    def read() -> None:
        with open_log(path, read_only=True) as reader:
            assert amounts(reader) == list(range(20))

    path.parent.chmod(0o555)
    as_a_stranger(read)


def test_a_file_that_was_not_closed(log: Log, path: Path) -> None:
    kept = {name: (path.parent / name).read_bytes() for name in (path.name, f"{path.name}-wal")}
    log.close()
    for name, content in kept.items():
        (path.parent / name).write_bytes(content)
    path.parent.chmod(0o555)

    def read() -> None:
        with pytest.raises(LogReadOnlyError, match="copy both files"):
            open_log(path, read_only=True)

    as_a_stranger(read)


def test_a_frozen_file_that_changes_is_no_longer_read(log: Log, path: Path) -> None:
    log.close()
    path.parent.chmod(0o555)
    told, tell = os.pipe()
    ready, begin = os.pipe()

    def read() -> None:
        with open_log(path, read_only=True) as reader:
            assert amounts(reader) == list(range(20))
            os.write(begin, b"x")
            os.read(told, 1)
            with pytest.raises(LogBusyError, match="open it again"):
                amounts(reader)

    if os.fork() == 0:
        os.read(ready, 1)
        path.parent.chmod(0o755)
        with open_log(path) as writer:
            commit(writer, "p", 2, "s", [20])
        os.write(tell, b"x")
        os._exit(0)
    as_a_stranger(read)
    os.wait()


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownObjectError, match="there is no log"):
        open_log(tmp_path / "none.db", read_only=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.db").write_text("no database" * 1000)
    with pytest.raises(LogFormatError):
        open_log(tmp_path / "text.db", read_only=True)
