"""Files as sources: following, rotation, and going on after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.listener import Listener
from penstock.connect.source import SourceConnector
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
    source = FileSource("in", path)
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
    with SourceConnector(address, [FileSource("in", path)]):
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
            with pytest.raises(ConnectorError, match="not in its folder any more"):
                connector.finish(30)
