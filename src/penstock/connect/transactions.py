"""A sink's transaction log: where each of its workers stands, on disk.

One file of lines of JSON. A line is written whole and synced before its vote or outcome counts;
a last line that is not whole was never counted, and is cut off. Nothing in it is evaluated, and
no name from outside becomes a name of a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock.connect.sinking import Standing, Stretch, Vote
from penstock.errors import DamagedError, UsageError

FILE = "transactions.jsonl"
LINES_MAX = 10_000
"""After so many lines the file is written anew, with one for each worker."""


class Line(msgspec.Struct, frozen=True):
    """Where a worker stands from here on."""

    worker: str
    standing: Standing


class TransactionLog:
    """The standings of a sink's workers; one process has it at a time. For any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._standings: dict[str, Standing] = {}
        self._exits = contextlib.ExitStack()
        self._folder = -1
        self._file = -1
        self._size = 0
        """Where the last line ends that counts; what lies behind it does not."""
        self._is_settled = True
        """Whether nothing lies behind it, and the file is known to the disk by its name."""
        self._lines = 0

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as exits:
            # Kept open: a process that has no files left must still be able to sync it.
            self._folder = os.open(self._path.parent, os.O_RDONLY)
            exits.callback(os.close, self._folder)
            self._file = self._locked()
            exits.callback(lambda: os.close(self._file))
            os.fsync(self._folder)
            self._load()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def _locked(self) -> int:
        """The file, once nobody else has it; another may have put a new one in its place."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise UsageError(
                    f"another process keeps the transactions of {self._path.parent}: stop it, or "
                    "choose another folder"
                ) from None
            if os.fstat(file).st_ino == self._path.stat().st_ino:
                return file
            os.close(file)

    def standing(self, worker: str) -> Standing:
        with self._lock:
            return self._standings.get(worker, Standing())

    def workers(self) -> dict[str, Standing]:
        with self._lock:
            return dict(self._standings)

    def save(self, worker: str, standing: Standing) -> None:
        """Durable when this returns; raises `OSError` if it cannot be, and does not count then."""
        with self._lock:
            self._settle()
            self._is_settled = False
            try:
                self._size = _append(self._file, self._size, _line(worker, standing))
            except OSError:
                with contextlib.suppress(OSError):  # else before the next line
                    self._settle()
                raise
            self._is_settled = True
            self._standings[worker] = standing
            self._lines += 1
            if self._lines > LINES_MAX + len(self._standings):
                with contextlib.suppress(OSError):  # it is saved; the file is only longer
                    self._condense()

    def _settle(self) -> None:
        """Undo what an earlier failure left; until that is possible nothing more is saved."""
        if not self._is_settled:
            os.ftruncate(self._file, self._size)
            os.fsync(self._folder)
            self._is_settled = True

    def _load(self) -> None:
        data = b"".join(iter(lambda: os.read(self._file, 1 << 20), b""))
        self._size = data.rfind(b"\n") + 1
        self._is_settled = self._size == len(data)
        for number, line in enumerate(data[: self._size].splitlines(), 1):
            try:
                found = _decoded(line)
            except msgspec.DecodeError as error:
                raise DamagedError(
                    f"{self._path}: line {number} is damaged ({error}): what the sink has voted "
                    "for is not known; bring the file back from a copy",
                    str(self._path), 0, number, number,
                ) from None  # fmt: skip
            self._standings[found.worker] = found.standing
            self._lines += 1
        self._settle()

    def _condense(self) -> None:
        """Write a new file with the last line of each worker, and put it in the place of the old.

        The lock is on the old file: the new one is locked before it is seen. Once it is in its
        place it is the one that is written to, whatever fails afterwards.
        """
        fresh = self._path.with_suffix(".new")
        made = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            fcntl.flock(made, fcntl.LOCK_EX)
            size = _append(made, 0, b"".join(_line(*item) for item in self._standings.items()))
            fresh.replace(self._path)
        except BaseException:
            os.close(made)
            raise
        before, self._file = self._file, made
        self._size, self._lines, self._is_settled = size, len(self._standings), False
        os.close(before)
        self._settle()


def _append(file: int, size: int, data: bytes) -> int:
    """Write it behind the first `size` bytes, and have the disk keep it; where it ends."""
    while data:
        written = os.pwrite(file, data, size)
        data, size = data[written:], size + written
    os.fsync(file)
    return size


def _line(worker: str, standing: Standing) -> bytes:
    return msgspec.json.encode(Line(worker, standing)) + b"\n"


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Lines of earlier versions, whose workers had one stream


class _EarlierVote(msgspec.Struct, frozen=True):
    transaction: str
    start: int
    end: int


class _EarlierStanding(msgspec.Struct, frozen=True):
    committed: int
    pending: _EarlierVote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()


class _EarlierLine(msgspec.Struct, frozen=True):
    worker: str
    standing: _EarlierStanding


def _decoded(line: bytes) -> Line:
    with contextlib.suppress(msgspec.ValidationError):
        before = msgspec.json.decode(line, type=_EarlierLine)
        had, vote = before.standing, before.standing.pending
        pending = None
        if vote is not None:
            pending = Vote(vote.transaction, (Stretch(1, vote.start, vote.end),))
        standing = Standing({1: had.committed}, pending, had.resolved, had.attempt)
        return Line(before.worker, standing)
    return msgspec.json.decode(line, type=Line)
