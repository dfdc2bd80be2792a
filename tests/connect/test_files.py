"""Files as sources: following, rotation, and going on after a restart."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.clients.source import Item, SourceConnector
from penstock.connect.hosts.listener import Listener
from penstock.connect.sources.file import FileSource
from penstock.errors import ConnectorError
from penstock.testing.processes import wait_until
from tests.connect.test_sources import RAW, address_of


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


@pytest.fixture
def address(log: Log) -> Iterator[str]:
    with Listener(log, RAW) as listener:
        yield address_of(listener)


def lines(log: Log) -> list[str]:
    return [event.data.decode() for event in read_events(log, "raw")]  # type: ignore[attr-defined]


def append(path: Path, *texts: str) -> None:
    with path.open("a") as file:
        file.write("".join(f"{text}\n" for text in texts))


@pytest.mark.row("W9", engine="any")
def test_a_file_is_read_to_its_end_and_then_what_is_new(
    tmp_path: Path, log: Log, address: str
) -> None:
    path = tmp_path / "in.txt"
    for n in range(3):
        append(path, f"a{n}", f"b{n}")
        with SourceConnector(address, [FileSource("in", path, until_end=True)]) as connector:
            connector.finish(30)
    assert lines(log) == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.row("W9", engine="any")
def test_a_file_is_followed_through_rotations(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    source = FileSource("in", path, quiet_s=0.5)
    with SourceConnector(address, [source]) as connector:
        append(path, "one", "two")
        wait_until(lambda: lines(log) == ["one", "two"], 20, "the first lines")
        with path.open("a") as file:
            file.write("three, in two ")
        path.rename(tmp_path / "in.txt.1")
        append(path, "four")
        wait_until(lambda: "four" in lines(log), 20, "the rotation")
        connector.check()
    append(path, "five")
    path.rename(tmp_path / "in.txt.2")  # while nobody reads
    append(path, "six")
    with SourceConnector(address, [FileSource("in", path, quiet_s=0.5)]):
        wait_until(lambda: "six" in lines(log), 20, "the second rotation")
    assert lines(log) == ["one", "two", "three, in two ", "four", "five", "six"]


@pytest.mark.parametrize("on_gone", ["fail", "skip"])
def test_a_file_that_is_gone(tmp_path: Path, log: Log, address: str, on_gone: str) -> None:
    path = tmp_path / "in.txt"
    append(path, "one")
    with SourceConnector(address, [FileSource("in", path, until_end=True)]) as connector:
        connector.finish(30)
    fresh = tmp_path / "fresh"
    append(fresh, "two")
    fresh.replace(path)
    source = FileSource("in", path, until_end=True, on_gone=on_gone)  # type: ignore[arg-type]
    with SourceConnector(address, [source]) as connector:
        if on_gone == "skip":
            connector.finish(30)
            assert lines(log) == ["one", "two"]
        else:
            with pytest.raises(ConnectorError, match="no longer in its folder"):
                connector.finish(30)


def read_all(address: str, source: FileSource) -> None:
    with SourceConnector(address, [source]) as connector:
        connector.finish(30)


def test_several_rotations_while_nobody_reads(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in[1].txt"
    append(tmp_path / "in[1].txt.9", "from before anybody followed it")
    append(path, "x1")
    read_all(address, FileSource("in", path, until_end=True))
    append(path, "x2")
    for n, texts in ((2, ("y1", "y2")), (1, ("z1",))):
        path.rename(tmp_path / f"in[1].txt.{n}")
        append(path, *texts)
    read_all(address, FileSource("in", path, until_end=True))
    assert lines(log) == ["x1", "x2", "y1", "y2", "z1"]


def test_one_that_was_compressed_before_it_was_read(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    append(path, "x1")
    read_all(address, FileSource("in", path, until_end=True))
    path.rename(tmp_path / "in.txt.2")
    (tmp_path / "in.txt.1.gz").write_bytes(b"packed")
    append(tmp_path / "in.txt.0", "y1")
    append(path, "z1")
    with pytest.raises(ConnectorError, match="was compressed before it was read"):
        read_all(address, FileSource("in", path, until_end=True))
    read_all(address, FileSource("in", path, until_end=True, on_gone="skip"))
    assert lines(log) == ["x1", "y1", "z1"]


def test_whoever_writes_may_still_have_the_old_file(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    with path.open("a") as writer, SourceConnector(address, [FileSource("in", path, quiet_s=1.0)]):
        writer.write("old1\n")
        writer.flush()
        wait_until(lambda: lines(log) == ["old1"], 20, "the first line")
        path.rename(tmp_path / "in.txt.1")
        append(path, "new1")
        threading.Event().wait(0.5)  # long enough to turn to the new one too early
        writer.write("old2\n")
        writer.flush()
        wait_until(lambda: "new1" in lines(log), 20, "the rotation")
    assert lines(log) == ["old1", "old2", "new1"]


def test_another_file_that_got_the_same_inode(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    append(path, "one", "two")
    read_all(address, FileSource("in", path, until_end=True))
    with path.open("r+") as file:
        file.write("another file altogether\n")
    with pytest.raises(ConnectorError, match="no longer in its folder"):
        read_all(address, FileSource("in", path, until_end=True))


HEADER = "a header that every file begins with" * 20


@pytest.mark.row("W9", engine="any")
def test_a_file_that_is_cut_while_it_is_followed(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    append(path, HEADER, "one")
    with SourceConnector(address, [FileSource("in", path)]) as connector:
        wait_until(lambda: "one" in lines(log), 20, "the first line")
        os.truncate(path, 0)
        threading.Event().wait(1.0)  # seen empty
        append(path, HEADER, "two")
        wait_until(lambda: "two" in lines(log), 20, "what came after the cut")
        path.write_text(f"{HEADER}\n")
        wait_until(lambda: lines(log).count(HEADER) == 3, 20, "the second cut")
        append(path, "three")
        wait_until(lambda: "three" in lines(log), 20, "what came after that")
        connector.check()
    append(path, "four")
    read_all(address, FileSource("in", path, until_end=True))
    assert lines(log) == [HEADER, "one", HEADER, "two", HEADER, "three", "four"]


def test_a_file_that_is_cut_while_nobody_reads(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    append(path, HEADER, "one", "two")
    read_all(address, FileSource("in", path, until_end=True))
    path.write_text(f"{HEADER}\nthree\n")
    with pytest.raises(ConnectorError, match="or was truncated"):
        read_all(address, FileSource("in", path, until_end=True))
    read_all(address, FileSource("in", path, until_end=True, on_gone="skip"))
    append(path, "four")
    read_all(address, FileSource("in", path, until_end=True))
    assert lines(log) == [HEADER, "one", "two", HEADER, "three", "four"]


def sent(source: FileSource) -> list[tuple[str, int]]:
    """What a source gives now, and each one's number."""
    found = []
    while isinstance(item := source.handle_next(), Item):
        found.append((item.data.decode(), item.point_of_ref))
    return found


def test_a_cut_file_and_a_new_connection_before_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    append(path, "one", "two")
    source = FileSource("in", path)
    source.handle_open()
    source.handle_reset(None)
    (_, first), (_, second) = sent(source)
    os.truncate(path, 0)
    assert sent(source) == []
    source.handle_reset(second)
    append(path, "three")
    assert [text for text, _ in sent(source)] + [text for text, _ in sent(source)] == ["three"]
    source.handle_reset(first)
    with pytest.raises(ConnectorError, match="or was truncated"):
        sent(source)
    source.handle_close()


def test_nothing_was_safe_before_the_rotation(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    append(path, "one")
    source = FileSource("in", path, quiet_s=0)
    source.handle_open()
    source.handle_reset(None)
    assert [text for text, _ in sent(source)] == ["one"]
    path.rename(tmp_path / "in.txt.1")
    append(path, "two")
    assert [text for text, _ in sent(source)] == ["two"]
    for again in (source, FileSource("in", path, quiet_s=0)):
        again.handle_open()
        again.handle_reset(None)
        assert [text for text, _ in sent(again)] == ["one", "two"]
        again.handle_close()


def test_the_note_of_what_was_read_is_gone(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    append(path, "one", "two")
    read_all(address, FileSource("in", path, until_end=True))
    (tmp_path / ".in.txt.penstock").unlink()
    path.unlink()
    append(path, "three", "four", "five")
    with pytest.raises(ConnectorError, match=r"\.in\.txt\.penstock does not exist"):
        read_all(address, FileSource("in", path, until_end=True))
    read_all(address, FileSource("in", path, until_end=True, on_gone="skip"))
    assert lines(log) == ["one", "two", "three", "four", "five"]


def test_what_was_read_may_be_compressed(tmp_path: Path, log: Log, address: str) -> None:
    """As logrotate does it: numbers move on, the older ones are compressed and keep their time."""
    path = tmp_path / "in.txt"
    append(tmp_path / "in.txt.1", "before anybody followed it")
    for day in range(5):
        append(path, f"{day}")
        read_all(address, FileSource("in", path, until_end=True))
        for number in range(day + 1, 0, -1):
            plain, packed = tmp_path / f"in.txt.{number}", tmp_path / f"in.txt.{number}.gz"
            if packed.exists():
                packed.rename(tmp_path / f"in.txt.{number + 1}.gz")
            elif plain.exists():
                subprocess.run(["gzip", str(plain)], check=True)
                packed.rename(tmp_path / f"in.txt.{number + 1}.gz")
        path.rename(tmp_path / "in.txt.1")
    assert len(list(tmp_path.glob("*.gz"))) == 5
    assert lines(log) == [f"{day}" for day in range(5)]


def test_nothing_that_was_read_is_read_again(
    tmp_path: Path, log: Log, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files there are; and nothing that only has a similar name."""
    monkeypatch.setattr("penstock.connect.sources.file.GENERATIONS_KEPT", 2)
    path = tmp_path / "in.txt"
    for day in range(6):
        append(path, f"{day}")
        read_all(address, FileSource("in", path, until_end=True))
        path.rename(tmp_path / f"in.txt-2026010{day}")
        append(tmp_path / f"in.txt.{'x' * (day + 1)}", "a copy that somebody made")
        append(tmp_path / f"in.txt{day}", "another file")
    append(path, "last")
    read_all(address, FileSource("in", path, until_end=True))
    assert lines(log) == [*(f"{day}" for day in range(6)), "last"]


def test_a_last_line_without_an_end(tmp_path: Path, log: Log, address: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo")
    read_all(address, FileSource("in", path, until_end=True))
    assert lines(log) == ["one", "two"]
    with pytest.raises(ConnectorError, match="does not exist"):
        read_all(address, FileSource("missing", tmp_path / "missing", until_end=True))


def test_old_files_that_are_still_there_are_known_however_many_came_since(
    tmp_path: Path, log: Log, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of files that are gone is bounded; those beside it would be read again."""
    monkeypatch.setattr("penstock.connect.sources.file.GENERATIONS_KEPT", 2)
    path = tmp_path / "in.txt"
    for number in range(6):
        append(path, f"line {number}")
        with SourceConnector(address, [FileSource("in", path, until_end=True)]) as connector:
            connector.finish(30)
        if number < 5:
            path.rename(tmp_path / f"in.txt.{number}")
    assert lines(log) == [f"line {n}" for n in range(6)]


def test_a_line_without_an_end_is_not_read_for_ever(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connect.sources.file.LINE_BYTES_MAX", 100)
    path = tmp_path / "in.txt"
    path.write_text("x" * 101)
    with SourceConnector(address, [FileSource("in", path, until_end=True)]) as connector:
        with pytest.raises(ConnectorError, match="has a line longer than 100 bytes"):
            connector.finish(30)
