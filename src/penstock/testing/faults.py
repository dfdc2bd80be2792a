"""A disk that fails: an SQLite VFS that raises, kills or loses data at a chosen operation.

The underlying file system is the real one; only the chosen call behaves differently.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import apsw
import msgspec

Operation = Literal["read", "write", "sync"]
DiskFailure = Literal["full", "io", "kill"]


class Fault(msgspec.Struct):
    """Fail the `at`-th such operation on a file whose name ends with `suffix`.

    `lasting` faults keep failing. `late` ones perform the operation first and then fail, like a
    disk that wrote the data but lost the answer.
    """

    operation: Operation
    failure: DiskFailure
    suffix: str = "-wal"
    at: int = 1
    lasting: bool = False
    late: bool = False
    seen: int = 0

    def strikes(self, operation: Operation, name: str) -> bool:
        if operation != self.operation or not name.endswith(self.suffix):
            return False
        self.seen += 1
        return self.seen == self.at or (self.lasting and self.seen > self.at)

    def fail(self) -> None:
        if self.failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.failure == "full":
            raise apsw.FullError("the disk is full (injected)")
        code = {
            "read": apsw.SQLITE_IOERR_READ,
            "write": apsw.SQLITE_IOERR_WRITE,
            "sync": apsw.SQLITE_IOERR_FSYNC,
        }[self.operation]
        raise apsw.exception_for(code)


class FaultyVfs(apsw.VFS):
    """A VFS of the given name. Creating it registers it; keep it as long as it is used."""

    def __init__(self, name: str) -> None:
        self.faults: list[Fault] = []
        self.syncs: list[str] = []
        self.durable: Path | None = None
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}
        self._deleted: set[str] = set()
        super().__init__(name, "")

    def xOpen(  # noqa: N802  SQLite's name
        self, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802  SQLite's name
        super().xDelete(name, sync)
        self._unsynced.pop(Path(name).name, None)
        self._deleted.add(Path(name).name)
        if self.durable is not None and sync:
            (self.durable / Path(name).name).unlink(missing_ok=True)

    def happen(self, operation: Operation, name: str) -> Fault | None:
        return next((f for f in self.faults if f.strikes(operation, name)), None)

    def wrote(self, name: str, data: bytes, offset: int) -> None:
        """Record a write that may or may not reach the disk until the file is synced."""
        if self.durable is not None and not name.endswith("-shm"):
            self._unsynced.setdefault(Path(name).name, []).append((offset, data))

    def lose_power(self, target: Path, chance: random.Random) -> None:
        """Write to a folder what a disk may hold after a power loss: everything that was synced,
        and any part of the rest."""
        assert self.durable is not None, "set durable first"
        shutil.copytree(self.durable, target)
        for name in self._deleted:
            if chance.random() < 0.5:
                (target / name).unlink(missing_ok=True)
        for name, writes in self._unsynced.items():
            with os.fdopen(os.open(target / name, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                for offset, data in writes:
                    if chance.random() < 0.5:
                        file.seek(offset)
                        file.write(data)

    def note_sync(self, name: str) -> None:
        """Record the whole content of a file that was just synced as durable."""
        self.syncs.append(name)
        self._unsynced.pop(Path(name).name, None)
        self._deleted.discard(Path(name).name)
        if self.durable is not None:
            shutil.copyfile(name, self.durable / Path(name).name)


class _FaultyFile(apsw.VFSFile):
    def __init__(
        self, vfs: FaultyVfs, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        self._vfs = vfs
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802  SQLite's name
        fault = self._vfs.happen("read", self._name)
        if fault:
            fault.fail()
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  SQLite's name
        fault = self._vfs.happen("write", self._name)
        if fault and not fault.late:
            fault.fail()
        super().xWrite(data, offset)
        self._vfs.wrote(self._name, data, offset)
        if fault:
            fault.fail()

    def xSync(self, flags: int) -> None:  # noqa: N802  SQLite's name
        fault = self._vfs.happen("sync", self._name)
        if fault and not fault.late:
            fault.fail()
        super().xSync(flags)
        self._vfs.note_sync(self._name)
        if fault:
            fault.fail()


@contextmanager
def faulty_disk(name: str = "faulty") -> Iterator[FaultyVfs]:
    """A faulty VFS for the length of a block; pass `vfs=name` as a log option."""
    vfs = FaultyVfs(name)
    try:
        yield vfs
    finally:
        vfs.unregister()
