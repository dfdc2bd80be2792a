"""A file for each worker, to which messages are appended once they are committed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.connect.hosts.targets import SinkMessage, SinkTarget, check_mark
from penstock.connect.protocol.marks import Mark
from penstock.errors import UsageError


class FileEnd(msgspec.Struct, frozen=True):
    """Where messages end: their bytes and number, and the byte of the file."""

    at: int = 0
    place: int = 0
    messages: int = 0

    @property
    def mark(self) -> Mark:
        return Mark(self.at, self.messages)


class FileEnds(msgspec.Struct, frozen=True):
    """Up to where the contents of the file are valid. Earlier versions also kept what was voted
    for, which is cut off."""

    committed: FileEnd = FileEnd()


class FileSink(SinkTarget):
    """Appends messages to `folder/WORKER.out`, each followed by `separator`.

    The protocol counts bytes of messages, but the file also has separators. So a second file,
    `WORKER.ends`, says where in the first file they end. If the sink is killed between the two
    writes, readers may see messages that the second file does not include yet; these are cut off
    and appended again.
    """

    def __init__(self, folder: Path | str, worker: str, separator: bytes = b"\n") -> None:
        folder, safe = Path(folder), safe_name(worker)
        self.path = folder / f"{safe}.out"
        self._ends = folder / f"{safe}.ends"
        self._separator = separator

    def applied(self) -> Mark:
        return self._read_ends().mark

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        end = self._read_ends()
        check_mark(end.mark, after)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            size = file.tell()
            if size < end.place:
                raise UsageError(
                    f"{self.path} is shorter than what was written to it: restore it, or start "
                    "over with another folder"
                )
            if size > end.place:
                file.truncate(end.place)
            lines = [message.data for message in messages]
            file.write(self._separator.join([*lines, b""]))
            file.flush()
            os.fsync(file.fileno())
            place = file.tell()
        self._save(FileEnd(mark.offset, place, mark.messages))

    def _read_ends(self) -> FileEnd:
        if not self._ends.exists():
            return FileEnd()
        return msgspec.json.decode(self._ends.read_bytes(), type=FileEnds).committed

    def _save(self, end: FileEnd) -> None:
        fresh = self._ends.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(FileEnds(end)))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._ends)
        sync_folder(self._ends.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's list of files durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def safe_name(worker: str) -> str:
    """A worker's name, escaped for use as a file name."""
    return "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):02x}" for c in worker)
