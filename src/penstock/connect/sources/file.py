"""Lines of a file that grows, and is rotated: each is a message.

A message's number says in which generation of the file its line ends, and at which byte. Which
file on the disk a generation is, whatever it is called now, stands in a small file beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Literal

import msgspec

from penstock.connect.source import END, Item, Source, _End
from penstock.errors import ConnectorError

OFFSET_BITS = 44
READ_BYTES = 1 << 18
LINE_BYTES_MAX = 1 << 20
GENERATIONS_KEPT = 100


class Generations(msgspec.Struct):
    """Which file each generation is: its device and inode."""

    files: dict[int, tuple[int, int]]

    def latest(self) -> int:
        return max(self.files, default=0)


class FileSource(Source):
    """Follows `path`; `until_end` ends the stream where the file ends now.

    When the file is renamed and another one takes its place, the old one is read to its end
    first, as long as it is in the same folder. `on_gone` is what happens if it is not there any
    more, or was cut: `fail`, or go on with what is there (`skip`).
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        until_end: bool = False,
        on_gone: Literal["fail", "skip"] = "fail",
    ) -> None:
        super().__init__(name)
        self._path = path
        self._until_end = until_end
        self._on_gone = on_gone
        self._state = path.with_name(f".{path.name}.penstock")
        self._generations = Generations({})
        self._generation = 0
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._lines: list[bytes] = []
        self._rest = b""

    def handle_open(self) -> None:
        if self._state.exists():
            self._generations = msgspec.json.decode(self._state.read_bytes(), type=Generations)

    def handle_reset(self, point_of_ref: int | None) -> None:
        self.handle_close()
        if point_of_ref is None:
            self._generation, self._offset = self._generations.latest(), 0
        else:
            self._generation = point_of_ref >> OFFSET_BITS
            self._offset = point_of_ref & ((1 << OFFSET_BITS) - 1)

    def handle_next(self) -> Item | _End | None:
        while not self._lines:
            if self._file is None and not self._open():
                return None
            if self._read():
                continue
            if not self._is_over():
                return END if self._until_end else None
            if self._rest:  # the last line of a file that will not grow any more
                self._lines, self._rest = [self._rest], b""
            else:
                self._turn()
        line = self._lines.pop()
        self._offset += len(line)
        return Item(line.rstrip(b"\r\n"), (self._generation << OFFSET_BITS) | self._offset)

    def handle_close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._lines, self._rest = None, [], b""

    # Files

    def _open(self) -> bool:
        """Open the file of the present generation; False if there is none yet."""
        found = self._found()
        if found is None:
            return False
        self._file = found.open("rb")
        self._note(_identity_of(self._file))
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._gone(f"{found} was cut: it has fewer bytes than were read of it")
            self._turn()
            return False
        self._file.seek(self._offset)
        return True

    def _found(self) -> Path | None:
        identity = self._generations.files.get(self._generation)
        if identity is None:
            return self._path if self._path.exists() else None
        there = (p for p in self._path.parent.glob(f"{self._path.name}*") if p.is_file())
        found = next((path for path in there if _identity(path) == identity), None)
        if found is None:
            self._gone(f"the file that {self._path.name} was is not in its folder any more")
            self._turn()
        return found

    def _read(self) -> bool:
        assert self._file is not None  # noqa: S101  opened before
        data = self._file.read(READ_BYTES)
        if not data:
            return False
        whole, mark, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ConnectorError(f"{self._path} has a line of more than {LINE_BYTES_MAX} bytes")
        parts = (whole + mark).split(b"\n")[:-1]
        self._lines = [part + b"\n" for part in reversed(parts)]
        return True

    def _is_over(self) -> bool:
        """Whether another file has taken the place of this one, or it was cut."""
        assert self._file is not None  # noqa: S101  opened before
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            return True
        try:
            return _identity(self._path) != _identity_of(self._file)
        except FileNotFoundError:
            return False

    def _turn(self) -> None:
        """Go on with the next generation."""
        self.handle_close()
        self._generation, self._offset = self._generation + 1, 0

    def _note(self, identity: tuple[int, int]) -> None:
        """Remember which file this generation is, before anything of it is sent."""
        files = self._generations.files
        if files.get(self._generation) == identity:
            return
        kept = {n: f for n, f in files.items() if n > self._generation - GENERATIONS_KEPT}
        self._generations = Generations({**kept, self._generation: identity})
        fresh = self._state.with_name(f"{self._state.name}.new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._generations))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._state)

    def _gone(self, why: str) -> None:
        if self._on_gone == "fail":
            raise ConnectorError(f"{why}: bring it back, or go on without it (on_gone=skip)")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _identity_of(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino
