"""A file for each worker: messages are appended, and cut off again if they are not to be.

Readers of the file may see what is not yet committed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from penstock.connect.transactions import sync_folder
from penstock.connect.wire import Message
from penstock.errors import ConnectorError


class End(msgspec.Struct, frozen=True):
    """Where messages end: at which byte of them, and at which byte of the file."""

    at: int = 0
    place: int = 0


class Ends(msgspec.Struct, frozen=True):
    """Where those that are committed end, and behind them those that were voted for, if any."""

    committed: End = End()
    voted: End | None = None


class FileSink:
    """Appends messages to `folder/WORKER.out`, each followed by `separator`.

    The protocol counts bytes of messages; the file has separators too. So a second file beside it
    says where in the file they end.
    """

    def __init__(self, folder: Path | str, worker: str, separator: bytes = b"\n") -> None:
        folder, safe = Path(folder), safe_name(worker)
        self.path = folder / f"{safe}.out"
        self._ends = folder / f"{safe}.ends"
        self._separator = separator
        self._file: IO[bytes] | None = None
        self._at = 0

    def open(self, committed: int, kept: int | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.close()
        self._file = self.path.open("a+b")
        saved = self._saved()
        if saved.voted is not None and saved.voted.at == kept:
            self._cut(saved)
        elif saved.committed.at in (committed, kept):
            self._cut(Ends(saved.committed))
        else:
            raise ConnectorError(
                f"{self._ends} ends at byte {saved.committed.at}, and {committed} were committed: "
                "it is not this sink's, or is older"
            )

    def append(self, messages: Sequence[Message]) -> None:
        file = self._open_file()
        file.write(b"".join(part for m in messages for part in (m.payload, self._separator)))
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        file = self._open_file()
        file.flush()
        os.fsync(file.fileno())
        self._save(Ends(self._saved().committed, End(self._at, file.tell())))

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """It is in its place already, or was never here."""
        saved = self._saved()
        if saved.voted is not None and saved.voted.at == end:
            self._save(Ends(saved.voted))
        elif saved.committed.at != end:
            raise ConnectorError(f"{self.path} does not hold the messages up to byte {end}")

    def abort(self, start: int) -> None:  # noqa: ARG002  what is committed says it
        self._cut(Ends(self._saved().committed))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, ends: Ends) -> None:
        """Forget everything behind these."""
        last = ends.voted or ends.committed
        file = self._open_file()
        if file.seek(0, os.SEEK_END) < last.place:
            raise ConnectorError(
                f"{self.path} is shorter than what was committed: bring it back, or begin anew "
                "with another folder"
            )
        self._save(ends)
        file.truncate(last.place)
        file.seek(last.place)
        os.fsync(file.fileno())
        self._at = last.at

    def _saved(self) -> Ends:
        if not self._ends.exists():
            return Ends()
        return msgspec.json.decode(self._ends.read_bytes(), type=Ends)

    def _save(self, ends: Ends) -> None:
        fresh = self._ends.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(ends))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._ends)
        sync_folder(self._ends.parent)

    def _open_file(self) -> IO[bytes]:
        assert self._file is not None  # noqa: S101  open comes first
        return self._file


def safe_name(worker: str) -> str:
    """A worker's name as one of a file."""
    return "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):02x}" for c in worker)
