"""Connections to the log's SQLite file: how it is opened, and what its errors mean."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import apsw
import pyarrow as pa

from penstock import errors
from penstock.failpoints import failpoint
from penstock.log.engine.ids import ID_SQL
from penstock.records.event import now_us
from penstock.resources import statements

APPLICATION_ID = 0x50454E53  # "PENS"
FORMAT = 1
SQLITE_MIN = (3, 51, 3)
PAGE_BYTES = 8192
WAL_PAGES_MAX = 2048
WAL_BYTES_KEPT = 64 << 20
CACHE_KIB = 16 << 10
READERS_IDLE_MAX = 8
OPEN_BUSY_S = 10.0
OPEN_PAUSE_S = 0.02
WRITE_LOCK = 120
"""The byte of the -shm file that SQLite locks for writing."""


Access = Literal["write", "read", "frozen"]
"""`frozen` is for a file that nobody can write to at present: SQLite then takes no locks."""


def sql(name: str) -> str:
    """The statement of that name, from `queries.sql` or `ids.sql`."""
    return _statements()[name]


@functools.cache
def _statements() -> dict[str, str]:
    return {**statements(__package__, "queries.sql"), **ID_SQL}


#: a row of a result. The tables are STRICT, so users of a row know its types.
SqlRow = tuple[Any, ...]


def many(connection: apsw.Connection, name: str, *values: object) -> list[SqlRow]:
    """All rows of the statement of that name."""
    return connection.execute(sql(name), _bindings(values)).fetchall()


def one(connection: apsw.Connection, name: str, *values: object) -> SqlRow | None:
    """The first row of the statement of that name."""
    return connection.execute(sql(name), _bindings(values)).fetchone()


def read_blob(connection: apsw.Connection, blob_id: int) -> pa.Buffer | None:
    """A stored blob, read into Arrow's own memory; `None` if there is none.

    Faster and more predictable than a SELECT, for which Python allocates and copies a large
    object.
    """
    try:
        blob = connection.blob_open("main", "blobs", "data", blob_id, False)
    except apsw.SQLError:  # no such row
        return None
    with blob:
        buffer = pa.allocate_buffer(blob.length())
        blob.read_into(buffer)
    return buffer


def _bindings(values: tuple[object, ...]) -> Any:
    """Values by position, or one mapping by name."""
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else values


def statement_names() -> list[str]:
    return list(_statements())


def migration(number: int) -> str:
    """The script that turns format `number - 1` into format `number`."""
    folder = importlib.resources.files(__package__).joinpath("migrations")
    return folder.joinpath(f"{number:04}.sql").read_text("utf-8")


def check_sqlite_version() -> None:
    """Refuse an SQLite with the WAL-reset bug, which can corrupt a log."""
    version = apsw.sqlite_lib_version()
    if tuple(map(int, version.split("."))) < SQLITE_MIN:
        wanted = ".".join(map(str, SQLITE_MIN))
        raise errors.LogFormatError(
            f"SQLite {version} is too old: before {wanted} it can corrupt a log in WAL mode; "
            "upgrade the package apsw, which brings its own SQLite"
        )


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours; the message names the file and says what to do."""
    try:
        yield
    except apsw.Error as error:
        raise translate(error, path) from error
    except UnicodeDecodeError as error:
        raise errors.LogError(
            f"{path} is damaged: it contains invalid UTF-8; run `penstock verify` to see what can "
            "still be read, then restore a backup"
        ) from error


def translate(error: apsw.Error, path: Path) -> errors.LogError:
    match error:
        case apsw.FullError():
            return errors.LogFullError(
                f"the disk that holds {path} is full: free some space and try again"
            )
        case apsw.BusyError() | apsw.LockedError():
            return errors.LogBusyError(
                f"{path} was locked by another writer{_writer_of(path)} for too long: try again"
            )
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            return errors.LogReadOnlyError(
                f"{path} cannot be opened for writing: {error}; a log needs write access to its "
                "file and its directory"
            )
        case apsw.NotADBError():
            return errors.LogFormatError(f"{path} is not a Penstock log: {error}")
        case apsw.CorruptError():
            return errors.LogError(
                f"{path} is damaged: {error}; run `penstock verify` to see what can still be "
                "read, then restore a backup"
            )
        case apsw.IOError():
            return errors.LogIOError(f"I/O error on {path}: {error}")
    return errors.LogError(f"{path}: {error}")


def _writer_of(path: Path) -> str:
    """Which process has the write lock, if the system tells; used only in the message."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = path.with_name(path.name + "-shm").stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # 5: POSIX  ADVISORY  WRITE 4711 fe:01:1234 120 120
            kind, pid, place, first, last = line.split()[-5:]
            if (
                kind == "WRITE"
                and place.endswith(f":{inode}")
                and int(first) <= WRITE_LOCK <= int(last)
            ):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                return f" (process {pid}{', which is stopped' if state in 'Tt' else ''})"
    return ""


def connect(path: Path, vfs: str | None = None, access: Access = "write") -> apsw.Connection:
    """A connection with the settings that every user of the file must have."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    name = str(path)
    if access != "write":
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        name = f"file:{quote(str(path.absolute()))}?immutable={int(access == 'frozen')}"
    connection = apsw.Connection(name, flags=flags, vfs=vfs, statementcachesize=200)
    connection.set_busy_timeout(10_000)
    for pragma in (
        "mmap_size = 0",
        f"cache_size = -{CACHE_KIB}",
        "foreign_keys = ON",
        f"journal_size_limit = {WAL_BYTES_KEPT}",
        f"wal_autocheckpoint = {WAL_PAGES_MAX}",
        "synchronous = FULL",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def prepare_file(path: Path, vfs: str | None, create: bool) -> None:
    """Make the file a log of the current format, or raise the reason why it cannot be one."""
    if not path.exists() or (not create and path.is_file() and not path.stat().st_size):
        _check_creatable(path, create)
    elif path.is_dir():
        raise errors.LogFormatError(f"{path} is a directory: a log is a file, such as penstock.db")
    deadline = time.monotonic() + OPEN_BUSY_S
    with translate_errors(path):
        while True:
            try:
                _bring_up_to_date(path, vfs)
                return
            except apsw.BusyError:
                # Two processes creating the file at once may conflict where SQLite does not wait.
                if time.monotonic() > deadline:
                    raise
                time.sleep(OPEN_PAUSE_S)


def reading_access(path: Path, vfs: str | None) -> Access:
    """How to read a log without permission or intention to write to it."""
    if not path.is_file():
        _check_creatable(path, create=False)
    with translate_errors(path):
        try:
            access: Access = "read"
            _check_format(path, vfs, access)
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            if wal_of(path).exists():
                raise errors.LogReadOnlyError(
                    f"{path} is in use, or was not closed: the latest events are in "
                    f"{wal_of(path).name}, which can be read only with write access to the "
                    "directory; copy both files to a directory of your own"
                ) from None
            # Nobody has it open, and no helper file can be created next to it.
            access = "frozen"
            _check_format(path, vfs, access)
    return access


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _check_format(path: Path, vfs: str | None, access: Access) -> None:
    with contextlib.closing(connect(path, vfs, access)) as connection:
        found = _format(connection)
        _check_application(connection, path)
        if found != FORMAT:
            raise errors.LogFormatError(
                f"{path} has format {found}, but this version of Penstock reads {FORMAT}: open it "
                "once for writing to bring it up to date, or upgrade Penstock"
            )


def _bring_up_to_date(path: Path, vfs: str | None) -> None:
    """Upgrade the file through SQLite only: opening and closing it directly would drop locks."""
    with contextlib.closing(connect(path, vfs)) as connection:
        if _format(connection) == FORMAT:
            _check_application(connection, path)
        else:
            _migrate(connection, path)


def _check_creatable(path: Path, create: bool) -> None:
    if not create:
        raise errors.UnknownObjectError(
            f"there is no log at {path}: create a stream there first (penstock stream create), "
            "or name another with --log or PENSTOCK_LOG"
        )
    if not path.parent.is_dir():
        raise errors.LogReadOnlyError(f"directory {path.parent} does not exist: create it first")
    if not os.access(path.parent, os.W_OK):
        raise errors.LogReadOnlyError(
            f"directory {path.parent} is read-only: a log needs write access to its directory"
        )


def _format(connection: apsw.Connection) -> int:
    return int(connection.pragma("user_version"))


def _check_application(connection: apsw.Connection, path: Path) -> None:
    if connection.pragma("application_id") != APPLICATION_ID:
        raise errors.LogFormatError(
            f"{path} is an SQLite database of another program, not a Penstock log"
        )


def _migrate(connection: apsw.Connection, path: Path) -> None:
    found = _format(connection)
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if found == 0 and tables != (0,):
        _check_application(connection, path)
    if found == 0:
        # EXTRA syncs the directory too: the journal of these first steps must not reappear
        # after a power failure and undo what was committed since.
        connection.execute("PRAGMA synchronous = EXTRA").fetchall()
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}").fetchall()
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()
    if found > FORMAT:
        _check_application(connection, path)
        raise errors.LogFormatError(
            f"{path} has format {found}, but this version of Penstock knows only up to {FORMAT}: "
            "upgrade Penstock to open it"
        )
    if connection.execute("PRAGMA journal_mode = WAL").fetchall() != [("wal",)]:
        raise errors.LogReadOnlyError(
            f"{path} cannot be put into WAL mode: its file system must support shared memory "
            "(network file systems do not)"
        )
    failpoint("open.created")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in range(_format(connection) + 1, FORMAT + 1):
            upgrade(connection, number)
        failpoint("open.migrated")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def upgrade(connection: apsw.Connection, number: int) -> None:
    """Upgrade from format `number - 1` to `number`, in an open transaction."""
    connection.execute(migration(number))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {number}")
    if number == 1:
        now = now_us()
        connection.execute(
            "INSERT INTO state VALUES (1, ?, 0, 0, ?, 0)", (secrets.token_hex(16), now)
        )


def check_process(opened_in: int, path: Path) -> None:
    """Refuse connections inherited through a fork, which SQLite's locks do not survive."""
    if os.getpid() != opened_in:
        raise errors.ClosedError(
            f"log {path} was opened before this process was forked: "
            "open it in the process that uses it"
        )


def _version_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


class ReaderPool:
    """Reader connections, lent to one user at a time; a few stay open between uses."""

    def __init__(self, path: Path, vfs: str | None) -> None:
        self.path = path
        self._vfs = vfs
        self._access: Access = "write"
        self._frozen: tuple[int, int] | None = None
        self._idle: list[apsw.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    def restrict(self, access: Access) -> None:
        """Only allow reading from now on."""
        self._access = access
        self._frozen = _version_of(self.path) if access == "frozen" else None

    def _check_frozen(self) -> None:
        """Raise if a frozen file has changed: SQLite takes no locks on it to prevent that."""
        if self._frozen and (wal_of(self.path).exists() or _version_of(self.path) != self._frozen):
            raise errors.LogBusyError(
                f"{self.path} was opened read-only and is now being written to: open it again"
            )

    @contextlib.contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """A connection in autocommit mode. Raises `LogError` kinds for SQLite's errors."""
        check_process(self._process, self.path)
        self._check_frozen()
        with self._lock:
            if self._closed:
                raise errors.ClosedError(f"log {self.path} is closed")
            connection = self._idle.pop() if self._idle else None
        with translate_errors(self.path):
            connection = connection or connect(self.path, self._vfs, self._access)
            try:
                yield connection
            finally:
                self._give_back(connection)

    def _give_back(self, connection: apsw.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        with self._lock:
            if not self._closed and len(self._idle) < READERS_IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
