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
from typing import IO, Self

import msgspec

from penstock.connect.sinking import Standing
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
        self._file: IO[bytes] | None = None
        self._lines = 0

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._locked()
        try:
            sync_folder(self._path.parent)
            self._load()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _locked(self) -> IO[bytes]:
        """The file, once nobody else has it; another may have put a new one in its place."""
        while True:
            file = self._path.open("a+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UsageError(
                    f"another process keeps the transactions of {self._path.parent}: stop it, or "
                    "choose another folder"
                ) from None
            if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                return file
            file.close()

    def standing(self, worker: str) -> Standing:
        with self._lock:
            return self._standings.get(worker, Standing())

    def workers(self) -> dict[str, Standing]:
        with self._lock:
            return dict(self._standings)

    def save(self, worker: str, standing: Standing) -> None:
        """Durable when this returns; raises `OSError` if it cannot be."""
        with self._lock:
            assert self._file is not None  # noqa: S101  within the block
            size = self._file.seek(0, os.SEEK_END)
            try:
                self._file.write(_line(worker, standing))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)
                raise
            self._standings[worker] = standing
            self._lines += 1
            if self._lines > LINES_MAX + len(self._standings):
                with contextlib.suppress(OSError):  # it is saved; the file is only longer
                    self._condense()

    def _load(self) -> None:
        assert self._file is not None  # noqa: S101  within the block
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found = msgspec.json.decode(line, type=Line)
            except msgspec.DecodeError as error:
                raise DamagedError(
                    f"{self._path}: line {number} is damaged ({error}): what the sink has voted "
                    "for is not known; bring the file back from a copy",
                    str(self._path), 0, number, number,
                ) from None  # fmt: skip
            self._standings[found.worker] = found.standing
            self._lines += 1

    def _condense(self) -> None:
        """Write a new file with the last line of each worker, and put it in the place of the old.

        The lock is on the old file: the new one is locked before it is seen.
        """
        fresh = self._path.with_suffix(".new")
        made = fresh.open("w+b")
        fcntl.flock(made, fcntl.LOCK_EX)
        for worker, standing in self._standings.items():
            made.write(_line(worker, standing))
        made.flush()
        os.fsync(made.fileno())
        fresh.replace(self._path)
        sync_folder(self._path.parent)
        assert self._file is not None  # noqa: S101  within the block
        self._file.close()
        self._file, self._lines = made, len(self._standings)


def _line(worker: str, standing: Standing) -> bytes:
    return msgspec.json.encode(Line(worker, standing)) + b"\n"


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
