"""The lines of a growing, rotated file as a source: each line is a message.

A message's number says in which generation of the file its line ends, and at which byte. A small
state file next to it records which file on disk each generation is, whatever its current name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path
from typing import IO, Literal

import msgspec
import xxhash

from penstock.connect.clients.origin import END, End, Item, Source
from penstock.errors import ConnectorError

OFFSET_BITS = 44
READ_BYTES = 1 << 18
LINE_BYTES_MAX = 1 << 20
GENERATIONS_KEPT = 100
MARK_BYTES = 256
QUIET_S = 5.0
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
ROTATED = re.compile(r"[._-].*\d")


class Known(msgspec.Struct, frozen=True):
    """Identifies the file of a generation: its inode, and a hash of its first bytes.

    The inode of a removed file may be reused by another, which may begin in the same way. All that
    is left of a file truncated while it was followed is how many bytes were read: `size`.
    """

    device: int = 0
    inode: int = 0
    size: int = 0
    mark: str = ""
    written_ns: int = 0

    @property
    def is_cut(self) -> bool:
        return not self.mark

    def is_in(self, file: IO[bytes]) -> bool:
        """Whether `file` is the one identified; it may have grown."""
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            return False
        return found.st_size >= self.size and mark_of(file, self.size) == self.mark


class Generations(msgspec.Struct):
    """Which file each generation is, and which files existed `before` the first."""

    files: dict[int, Known]
    before: list[Known] = []

    def first(self) -> int:
        return min(self.files, default=0)

    def has(self, file: IO[bytes], *, is_compressed: bool) -> bool:
        """Whether a file is one of them, or a copy that keeps the original's modification time."""
        all_ = [*self.files.values(), *self.before]
        if is_compressed:
            written_ns = os.fstat(file.fileno()).st_mtime_ns
            return written_ns <= max(known.written_ns for known in all_)
        return any(known.is_in(file) for known in all_)


class FileSource(Source):
    """Follows `path`; with `until_end`, the stream ends at the file's present end.

    When the file is renamed and another one takes its place, the old one is read until it has not
    grown for `quiet_s`, provided that it stays in the same folder, under a name that begins with
    its original name. Then the files that came after it follow, oldest first; they are recognised
    by a number or date after the name (`orders.log.1`, `orders.log-20260131`). A file that is
    truncated while it is followed is read from its start again. `on_gone` says what happens if a
    file no longer exists, was truncated while nobody read it, or was compressed before it was
    read: `fail`, or continue with what exists (`skip`). The state file that records the files is
    next to `path`, or in the folder `state`.
    """

    def __init__(
        self,
        name: str,
        path: Path | str,
        *,
        until_end: bool = False,
        on_gone: Literal["fail", "skip"] = "fail",
        quiet_s: float = QUIET_S,
        state: Path | None = None,
    ) -> None:
        super().__init__(name)
        self._path = path = Path(path)
        self._until_end = until_end
        self._on_gone = on_gone
        self._quiet_s = quiet_s
        self._state = _state_of(path, state)
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
            self._generation, self._offset = self._generations.first(), 0
        else:
            self._generation = point_of_ref >> OFFSET_BITS
            self._offset = point_of_ref & ((1 << OFFSET_BITS) - 1)

    def handle_next(self) -> Item | End | None:
        while not self._lines:
            if self._file is None and not self._open():
                self._wait()
                return None
            if self._read():
                continue
            is_over = self._is_over()
            if is_over is None or (not is_over and not self._until_end):
                return None
            if self._rest:  # the last line of a file that no longer grows
                self._lines, self._rest = [self._rest], b""
            elif is_over:
                self._turn(is_cut=self._is_cut())
            else:
                return END
        line = self._lines.pop()
        self._offset += len(line)
        return Item(line.rstrip(b"\r\n"), (self._generation << OFFSET_BITS) | self._offset)

    def _wait(self) -> None:
        """Wait for the file, which does not exist yet."""
        if self._until_end and not self._path.exists():
            raise ConnectorError(f"{self._path} does not exist")
        if not self._has_waited:
            self.tell(f"waiting for {self._path}")
            self._has_waited = True

    def handle_close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._lines, self._rest = None, [], b""

    # Files

    def _open(self) -> bool:
        """Open the file of the current generation; False if there is none yet."""
        found = self._find_file()
        if found is None:
            return False
        self._file = found.open("rb")
        self._note(known_of(self._file))
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._pass_over(f"{found} was truncated: it has fewer bytes than were read from it")
            self._turn(is_cut=True)
            return False
        self._file.seek(self._offset)
        self._grown_at = time.monotonic()
        return True

    def _find_file(self) -> Path | None:
        known = self._generations.files.get(self._generation)
        if known is None:
            return self._successor()
        if known.is_cut and self._offset >= known.size:
            self._turn()  # all of it was safe before it was truncated
            return None
        for path in self._beside():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if known.is_in(file):
                    return path
        self._pass_over(
            f"the previous file of {self._path.name} is no longer in its folder, or was truncated"
        )
        self._turn()
        return None

    def _successor(self) -> Path | None:
        """The file to read next: first those in between, oldest first, then the one followed."""
        if not self._generations.files:
            if self._generation or self._offset:
                self._pass_over(
                    f"{self._state} does not exist, so it is not known which file was read up to "
                    f"byte {self._offset}"
                )
                self._turn()
            return self._path if self._path.exists() else None
        behind = []
        for path in self._beside():
            is_followed = path == self._path
            if not is_followed and not ROTATED.match(path.name.removeprefix(self._path.name)):
                continue
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if not self._generations.has(file, is_compressed=path.suffix in COMPRESSED):
                    behind.append((is_followed, os.fstat(file.fileno()).st_mtime_ns, path))
        for is_followed, _, path in sorted(behind):
            if is_followed or path.suffix not in COMPRESSED:
                return path
            self._pass_over(f"{path} was compressed before it was read")
        return None

    def _beside(self) -> list[Path]:
        """The file and its predecessors: all files whose name begins with its name."""
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
            raise ConnectorError(f"{self._path} has a line longer than {LINE_BYTES_MAX} bytes")
        parts = (whole + mark).split(b"\n")[:-1]
        self._lines = [part + b"\n" for part in reversed(parts)]
        return True

    def _is_over(self) -> bool | None:
        """Whether another file has taken its place, or it was truncated; `None`: it may grow."""
        assert self._file is not None  # noqa: S101  opened before
        if self._is_cut():
            return True
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if os.path.samestat(found, os.fstat(self._file.fileno())):
            return False
        # The writer may still have the old file open.
        is_quiet = time.monotonic() >= self._grown_at + self._quiet_s
        return True if is_quiet or self._until_end else None

    def _is_cut(self) -> bool:
        assert self._file is not None  # noqa: S101  opened before
        return os.fstat(self._file.fileno()).st_size < self._file.tell()

    def _turn(self, *, is_cut: bool = False) -> None:
        """Continue with the next generation, which is the same file if it was truncated."""
        if is_cut:
            self.tell(f"{self._path} was truncated: reading it from its start")
            self._note(Known(size=self._offset))
        elif self._file is not None:
            self._note(known_of(self._file))
        self.handle_close()
        self._generation, self._offset = self._generation + 1, 0

    def _note(self, known: Known) -> None:
        """Record which file this generation is, before any of its lines is sent."""
        files = self._generations.files
        if files.get(self._generation) == known:
            return
        there = self._there()
        inodes = {(file.device, file.inode) for file in there}
        latest = self._generation - GENERATIONS_KEPT
        kept = {n: f for n, f in files.items() if n > latest or (f.device, f.inode) in inodes}
        before = self._generations.before
        if not files:
            before = [file for file in there if file.inode != known.inode]
        self._generations = Generations({**kept, self._generation: known}, before)
        fresh = self._state.with_name(f"{self._state.name}.new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._generations))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._state)

    def _there(self) -> list[Known]:
        """The files that are next to it now, under whatever name."""
        found = []
        for path in self._beside():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                found.append(known_of(file))
        return found

    def _pass_over(self, why: str) -> None:
        if self._on_gone == "fail":
            raise ConnectorError(f"{why}: restore it, or continue without it (on_gone=skip)")


def known_of(file: IO[bytes]) -> Known:
    """The identification of an open file."""
    found = os.fstat(file.fileno())
    size = found.st_size
    return Known(found.st_dev, found.st_ino, size, mark_of(file, size), found.st_mtime_ns)


def mark_of(file: IO[bytes], size: int) -> str:
    """A hash of the beginning and end of the first `size` bytes."""
    begin = os.pread(file.fileno(), min(size, MARK_BYTES), 0)
    end = os.pread(file.fileno(), min(size, MARK_BYTES), max(0, size - MARK_BYTES))
    return hashlib.sha256(begin + end).hexdigest()


def _state_of(path: Path, folder: Path | None) -> Path:
    """The path of the state file; in a folder shared by several, its name is unique."""
    if folder is None:
        return path.with_name(f".{path.name}.penstock")
    whole = xxhash.xxh3_64_hexdigest(bytes(path.resolve()))
    return folder / f"{path.name}.{whole}.penstock"
