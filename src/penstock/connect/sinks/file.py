"""A file for each worker: messages are appended, and cut off again if they are not to be.

Readers of the file may see what is not yet committed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.connect.wire import Message
from penstock.errors import UsageError

ENDS_KEPT = 10


class FileSink:
    """Appends messages to `folder/NAME.WORKER`, each followed by `separator`.

    The protocol counts bytes of messages; the file has separators too. So a second file beside it
    says where in the file each stretch ends.
    """

    def __init__(self, folder: Path, worker: str, separator: bytes = b"\n") -> None:
        safe = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):02x}" for c in worker)
        self.path = folder / f"{safe}.out"
        self._ends = folder / f"{safe}.ends"
        self._separator = separator
        self._file: IO[bytes] | None = None
        self._at = 0

    def open(self, committed: int, kept: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.close()
        self._file = self.path.open("a+b")
        self._cut(kept if kept in self._places() else committed)

    def append(self, messages: Sequence[Message]) -> None:
        file = self._open_file()
        file.write(b"".join(part for m in messages for part in (m.payload, self._separator)))
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        file = self._open_file()
        file.flush()
        os.fsync(file.fileno())
        with self._ends.open("a") as ends:
            ends.write(f"{self._at} {file.tell()}\n")
            ends.flush()
            os.fsync(ends.fileno())

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """It is in its place already, or was never here."""
        if self._at < end:
            raise UsageError(f"{self.path} ends at byte {self._at} of the messages, not at {end}")

    def abort(self, start: int) -> None:
        self._cut(start)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, at: int) -> None:
        """Forget everything behind the byte `at` of the messages."""
        places = self._places()
        place = places.get(at)
        if place is None:
            raise UsageError(f"{self._ends} does not say where byte {at} is: it is not this sink's")
        file = self._open_file()
        file.truncate(place)
        file.seek(place)
        os.fsync(file.fileno())
        self._at = at
        fresh = self._ends.with_suffix(".new")
        with fresh.open("w") as ends:
            # What is kept may yet be aborted, back to the end before it.
            for end in sorted(end for end in places if end <= at)[-ENDS_KEPT:]:
                ends.write(f"{end} {places[end]}\n")
            ends.flush()
            os.fsync(ends.fileno())
        fresh.replace(self._ends)

    def _places(self) -> dict[int, int]:
        """Where in the file bytes of the messages are; a line that is not whole does not count."""
        text = self._ends.read_text() if self._ends.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return {0: 0} | {int(at): int(place) for at, place in map(str.split, lines)}

    def _open_file(self) -> IO[bytes]:
        assert self._file is not None  # noqa: S101  open comes first
        return self._file
