"""Lines of a file that grows, and is rotated: each is a message.

A message's number says in which generation of the file its line ends, and at which byte. Which
file on the disk a generation is, whatever it is called now, stands in a small file beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import IO, Literal

import msgspec

from penstock.connect.source import END, Item, Source, _End
from penstock.errors import ConnectorError

OFFSET_BITS = 44
READ_BYTES = 1 << 18
LINE_BYTES_MAX = 1 << 20
GENERATIONS_KEPT = 100
HEAD_BYTES = 256
QUIET_S = 5.0
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}


class Known(msgspec.Struct, frozen=True):
    """Which file a generation is: its device and inode, and a hash of how it begins.

    A file that was removed may leave its inode to another.
    """

    device: int
    inode: int
    head_bytes: int = 0
    head: str = ""

    def is_same(self, other: Known) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)


class Generations(msgspec.Struct):
    """Which file each generation is, and which were there `before` the first."""

    files: dict[int, Known]
    before: list[Known] = []

    def latest(self) -> int:
        return max(self.files, default=0)


class FileSource(Source):
    """Follows `path`; `until_end` ends the stream where the file ends now.

    When the file is renamed and another one takes its place, the old one is read on until it has
    not grown for `quiet_s`, as long as it is in the same folder, under a name that begins like
    its own; then those follow that came after it, oldest first. `on_gone` is what happens if one
    is not there any more, was cut, or was compressed before it was read: `fail`, or go on with
    what is there (`skip`).
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        until_end: bool = False,
        on_gone: Literal["fail", "skip"] = "fail",
        quiet_s: float = QUIET_S,
    ) -> None:
        super().__init__(name)
        self._path = path
        self._until_end = until_end
        self._on_gone = on_gone
        self._quiet_s = quiet_s
        self._state = path.with_name(f".{path.name}.penstock")
        self._generations = Generations({})
        self._generation = 0
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._lines: list[bytes] = []
        self._rest = b""
        self._grown_at = 0.0
        self._has_waited = False

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
                self._wait()
                return None
            if self._read():
                continue
            is_over = self._is_over()
            if is_over is None or (not is_over and not self._until_end):
                return None
            if self._rest:  # the last line of a file that will not grow any more
                self._lines, self._rest = [self._rest], b""
            elif is_over:
                self._turn()
            else:
                return END
        line = self._lines.pop()
        self._offset += len(line)
        return Item(line.rstrip(b"\r\n"), (self._generation << OFFSET_BITS) | self._offset)

    def _wait(self) -> None:
        """There is no such file yet."""
        if self._until_end and not self._path.exists():
            raise ConnectorError(f"there is no file {self._path}")
        if not self._has_waited:
            self.tell(f"waiting for {self._path}")
            self._has_waited = True

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
        self._note(known_of(self._file))
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._gone(f"{found} was cut: it has fewer bytes than were read of it")
            self._turn()
            return False
        self._file.seek(self._offset)
        self._grown_at = time.monotonic()
        return True

    def _found(self) -> Path | None:
        known = self._generations.files.get(self._generation)
        if known is None:
            return self._successor()
        for path in self._beside():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if known.is_same(known_of(file)) and begins_alike(file, known):
                    return path
        self._gone(f"the file that {self._path.name} was is not in its folder any more")
        self._turn()
        return None

    def _successor(self) -> Path | None:
        """The one that is followed; before it those that came between, oldest first."""
        if not self._generations.files:
            return self._path if self._path.exists() else None
        seen = [*self._generations.files.values(), *self._generations.before]
        behind = []
        for path in self._beside():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                now = known_of(file)
                if not any(old.is_same(now) and begins_alike(file, old) for old in seen):
                    written_ns = os.fstat(file.fileno()).st_mtime_ns
                    behind.append((path == self._path, written_ns, path))
        if not behind:
            return None
        path = min(behind)[-1]
        if path.suffix in COMPRESSED:
            self._gone(f"{path} was compressed before it was read")
            return self._path if self._path.exists() else None
        return path

    def _beside(self) -> list[Path]:
        """The file and what it was before, under whatever name begins like its own."""
        there = (path for path in self._path.parent.iterdir() if path.is_file())
        return sorted(path for path in there if path.name.startswith(self._path.name))

    def _read(self) -> bool:
        assert self._file is not None  # noqa: S101  opened before
        data = self._file.read(READ_BYTES)
        if not data:
            return False
        self._grown_at = time.monotonic()
        whole, mark, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ConnectorError(f"{self._path} has a line of more than {LINE_BYTES_MAX} bytes")
        parts = (whole + mark).split(b"\n")[:-1]
        self._lines = [part + b"\n" for part in reversed(parts)]
        return True

    def _is_over(self) -> bool | None:
        """Whether another file has taken its place, or it was cut; `None`: it may yet grow."""
        assert self._file is not None  # noqa: S101  opened before
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            return True
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if os.path.samestat(found, os.fstat(self._file.fileno())):
            return False
        # Whoever writes may still have the old file open.
        is_quiet = time.monotonic() >= self._grown_at + self._quiet_s
        return True if is_quiet or self._until_end else None

    def _turn(self) -> None:
        """Go on with the next generation."""
        if self._file is not None:
            self._note(known_of(self._file))
        self.handle_close()
        self._generation, self._offset = self._generation + 1, 0

    def _note(self, known: Known) -> None:
        """Remember which file this generation is, before anything of it is sent."""
        files = self._generations.files
        if files.get(self._generation) == known:
            return
        kept = {n: f for n, f in files.items() if n > self._generation - GENERATIONS_KEPT}
        before = self._generations.before if files else self._others(known)
        self._generations = Generations({**kept, self._generation: known}, before)
        fresh = self._state.with_name(f"{self._state.name}.new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._generations))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._state)

    def _others(self, known: Known) -> list[Known]:
        """The files beside that one: what was rotated before anybody followed it."""
        found = []
        for path in self._beside():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                found.append(known_of(file))
        return [other for other in found if not other.is_same(known)]

    def _gone(self, why: str) -> None:
        if self._on_gone == "fail":
            raise ConnectorError(f"{why}: bring it back, or go on without it (on_gone=skip)")


def known_of(file: IO[bytes]) -> Known:
    """What to know an open file by."""
    found = os.fstat(file.fileno())
    head = os.pread(file.fileno(), HEAD_BYTES, 0)
    return Known(found.st_dev, found.st_ino, len(head), hashlib.sha256(head).hexdigest())


def begins_alike(file: IO[bytes], known: Known) -> bool:
    """Whether a file begins as that one did when it was last looked at."""
    head = os.pread(file.fileno(), known.head_bytes, 0)
    return not known.head or hashlib.sha256(head).hexdigest() == known.head
