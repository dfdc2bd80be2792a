"""Sinks that a program reads: order, timeouts, kills, limits; and ports found by name."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.connect.addresses import ENVIRONMENT, announce, check_address, resolve_address
from penstock.connect.clients.codecs import decoder, encoder
from penstock.connect.clients.reader import SinkClient
from penstock.connect.hosts.inbox import Inbox
from penstock.connect.hosts.sink_host import SinkOptions
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.errors import (
    ClosedError,
    ConnectorTimeoutError,
    RecordError,
    SinkGoneError,
    UsageError,
)
from penstock.testing.processes import wait_until
from tests.connect.hosting import Pusher


@pytest.fixture(autouse=True)
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ports"
    monkeypatch.setenv(ENVIRONMENT, str(folder))
    return folder


@decoder
def number(data: bytes) -> int:
    return int(data)


@pytest.mark.row("W7", engine="any")
def test_messages_are_read_once_they_are_committed(tmp_path: Path) -> None:
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        pusher, other = Pusher("auto:numbers"), Pusher("auto:numbers", "other")
        pusher.push("1", "2")
        pusher.push("8", "9", commit=False)
        other.push("10")
        pusher.push("3")
        assert [sink.read(timeout=5) for _ in range(3)] == [1, 2, 10]
        assert sink.last is not None
        assert (sink.last.worker, sink.last.key, sink.last.time_ns) == ("other", b"k", 7)
        assert sink.read() == 3
        with pytest.raises(ConnectorTimeoutError, match=r"no message arrived within 0.05 s"):
            sink.read(timeout=0.05)
        pusher.push("4")
        assert sink.read(timeout=0) == 4
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        with pytest.raises(ConnectorTimeoutError):
            sink.read(timeout=0)


@pytest.mark.row("W7", engine="any")
def test_a_read_that_waits_ends_when_it_is_closed(tmp_path: Path) -> None:
    """And one that waits without limit, and many of them."""
    seen: list[str] = []

    def read() -> None:
        try:
            sink.read()
        except ClosedError as error:
            seen.append(str(error))

    with SinkClient[bytes]("127.0.0.1:0", tmp_path) as sink:
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        sink.close()
        for reader in readers:
            reader.join(10)
    assert len(seen) == 3
    with pytest.raises(ClosedError):
        sink.read()
    assert list(sink) == []


def test_a_message_that_failed_comes_again(tmp_path: Path) -> None:
    """The block was left by an error: the last message was not handled."""
    with pytest.raises(ZeroDivisionError):
        with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
            Pusher("auto:numbers").push("1", "2")
            assert sink.read() == 1
            assert sink.read() == 2
            raise ZeroDivisionError
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        assert sink.read(timeout=5) == 2


def test_a_decoder_that_fails(tmp_path: Path) -> None:
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        Pusher("auto:numbers").push("one", "2")
        with pytest.raises(RecordError, match=r"decoder number cannot decode b'one': ValueError"):
            sink.read(timeout=5)
        assert sink.read(timeout=5) == 2


def test_codecs_say_what_is_wrong() -> None:
    @encoder
    def wrong(message: object) -> bytes:
        return message  # type: ignore[return-value]

    assert wrong("é") == "é".encode()
    with pytest.raises(UsageError, match="encoder wrong must return bytes or str, not int"):
        wrong(1)


def test_what_nobody_reads_is_bounded(tmp_path: Path) -> None:
    told: list[str] = []
    with SinkClient[bytes]("auto:full", tmp_path, spool_bytes_max=1000, tell=told.append) as sink:
        pusher = Pusher("auto:full")
        pusher.push("x" * 900)
        pusher.push("y" * 900)
        with pytest.raises(SinkGoneError):
            pusher.push("z")
        assert any("1,800 bytes are waiting, and the limit is 1,000" in line for line in told)
        sink.read()
        sink.read()
        with pytest.raises(ConnectorTimeoutError):
            sink.read(timeout=0)
        pusher.push("z")
        assert sink.read(timeout=5) == b"z"


@pytest.mark.row("W7", engine="any")
def test_a_program_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, chance: random.Random
) -> None:
    command = [sys.executable, "-m", "tests.connect.reading_lines", str(tmp_path), "lines"]
    output = tmp_path / "read.txt"
    pusher = Pusher("auto:lines")
    program = subprocess.Popen(command)
    count, kills = 0, 5
    try:
        for _ in range(kills):
            for _ in range(chance.randrange(3, 30)):
                pusher.push_surely(*(str(n) for n in range(count, count + 100)))
                count += 100
            program.kill()
            program.wait()
            program = subprocess.Popen(command)
        last = str(count - 1)
        wait_until(lambda: output.exists() and output.read_text().endswith(f" {last}\n"), 60, last)
    finally:
        program.kill()
        program.wait()
    lines = [line.split() for line in output.read_text().splitlines()]
    by_id = dict(lines)
    assert [int(text) for text in by_id.values()] == list(range(count)), "all of them, in order"
    assert len(lines) - len(by_id) <= kills, "only the last one before a kill comes again"


@pytest.mark.row("W7", engine="any")
def test_killed_when_all_was_read_and_before_it_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it comes again, and what comes behind it is read."""

    def killed(spool: Inbox) -> None:
        raise ZeroDivisionError

    pusher = Pusher("auto:numbers")
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        pusher.push("1", "2")
        assert [sink.read(timeout=5), sink.read(timeout=5)] == [1, 2]
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(Inbox, "_finish", killed)
            sink.read(timeout=0)
        sink.close()
    for following in (3, 4):
        with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
            with pytest.raises(ConnectorTimeoutError):
                sink.read(timeout=0)
            pusher.push(str(following))
            assert sink.read(timeout=5) == following


@pytest.mark.row("W7", engine="any")
def test_what_came_first_and_was_committed_last_is_read_last(tmp_path: Path) -> None:
    """How far one transaction was read says nothing of another, whose messages are older."""
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        with worker_of("first") as first, worker_of("last") as last:
            for sent, texts in ((last, b"34"), (first, b"12")):
                sent.send([(None, 0, bytes([text])) for text in texts])
                assert sent.vote("t", 0)
            for told in (first, last):
                told.resolve("t", True)
        found = [(sink.read(timeout=5), sink.last and sink.last.worker) for _ in range(4)]
    assert found == [(1, "first"), (2, "first"), (3, "last"), (4, "last")]


def worker_of(name: str) -> SinkWorker:
    return SinkWorker("auto:numbers", name, (1,), DialOptions(timeout_s=10.0))


EARLIER = """
    CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, worker TEXT NOT NULL, key BLOB,
        time_ns INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE TABLE votes (worker TEXT PRIMARY KEY, last INTEGER NOT NULL, end INTEGER NOT NULL);
    CREATE TABLE ends (worker TEXT PRIMARY KEY, last INTEGER NOT NULL, end INTEGER NOT NULL);
    CREATE TABLE stretches (number INTEGER PRIMARY KEY AUTOINCREMENT, worker TEXT NOT NULL,
        first INTEGER NOT NULL, last INTEGER NOT NULL, bytes INTEGER NOT NULL);
    INSERT INTO messages VALUES (1, 'w', NULL, 7, X'31'), (2, 'w', X'6B', 7, X'32'),
        (3, 'w', NULL, 7, X'33'), (4, 'v', NULL, 7, X'35'), (5, 'w', NULL, 7, X'34');
    INSERT INTO stretches VALUES (1, 'w', 1, 3, 3), (2, 'w', 5, 5, 1), (3, 'v', 4, 4, 1);
    INSERT INTO ends VALUES ('w', 5, 4), ('v', 4, 1);
"""


def test_what_an_earlier_version_has_not_read_carries_over(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "spool.db")) as database:
        database.executescript(EARLIER)
    (tmp_path / "spool.place").write_bytes((1).to_bytes(8, "big") * 2)  # the first was read
    (tmp_path / "transactions.jsonl").write_text(
        '{"worker":"w","standing":{"committed":{"1":4},"attempt":[3]}}\n'
        '{"worker":"v","standing":{"committed":{"1":1}}}\n'
    )
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        assert [sink.read(timeout=5) for _ in range(2)] == [2, 3]
        with SinkWorker("auto:numbers", "w", (4,), DialOptions(timeout_s=10.0)) as worker:
            assert worker.committed == 4
            worker.send([(None, 0, b"6")])
            assert worker.vote("t", 4)
            worker.resolve("t", True)
        assert [sink.read(timeout=5) for _ in range(3)] == [4, 5, 6]


def test_addresses(ports: Path) -> None:
    check_address("127.0.0.1:1")
    check_address("auto:words")
    for wrong in ("nowhere", "h:0", "h:99999", "auto:", "auto:../x", "auto:a b"):
        with pytest.raises(UsageError):
            check_address(wrong)
    with pytest.raises(OSError, match="no program on this machine listens as words"):
        resolve_address("auto:words")
    with announce("words", ("127.0.0.1", 4)):
        assert resolve_address("auto:words") == ("127.0.0.1", 4)
        with announce("words", ("127.0.0.1", 5)):
            assert resolve_address("auto:words") == ("127.0.0.1", 5)
        assert not list(ports.iterdir()), "the one who came last has taken its note away"
    assert resolve_address("[::1]:80") == ("::1", 80)
    assert SinkOptions().address == "127.0.0.1:0"


def test_whoever_ends_does_not_take_a_successors_note_away(
    ports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor comes between looking at the note and removing it."""
    is_over = threading.Event()

    def succeed() -> None:
        with announce("words", ("127.0.0.1", 5)):
            is_over.wait(30)

    successor = threading.Thread(target=succeed)
    read_text = Path.read_text

    def slow(path: Path) -> str:
        found = read_text(path)
        if not successor.is_alive():
            successor.start()
            successor.join(0.3)  # time enough to leave a note, if it may
        return found

    with announce("words", ("127.0.0.1", 4)):
        monkeypatch.setattr(Path, "read_text", slow)
    try:
        wait_until((ports / "words").exists, 5, "the successor's note")
        assert resolve_address("auto:words") == ("127.0.0.1", 5)
    finally:
        is_over.set()
        successor.join(30)


def test_closing_from_elsewhere_does_not_count_as_having_read(tmp_path: Path) -> None:
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        Pusher("auto:numbers").push("1", "2")
        assert sink.read() == 1
        closer = threading.Thread(target=sink.close)
        closer.start()
        closer.join(30)
        with pytest.raises(ClosedError):
            sink.read()
    with SinkClient("auto:numbers", tmp_path, decoder=number) as sink:
        assert [sink.read(timeout=5), sink.read(timeout=5)] == [1, 2]


def test_reading_for_anybody_needs_a_cookie(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"anyone who can reach 0.0.0.0:1 could write"):
        SinkClient("0.0.0.0:1", tmp_path)
