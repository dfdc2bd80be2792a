"""Imports into the spool what sinks of earlier versions left in their folder.

They kept `transactions.jsonl`, with a line for each vote and outcome, and the staged messages in
the target itself; the sink that a program reads had a `spool.db` in a different format.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.sink_session import Vote, WorkerStanding
from penstock.errors import DamagedError, UsageError

TRANSACTIONS = "transactions.jsonl"
TAKEN_OVER = "transactions.jsonl.taken-over"
PLACE = "spool.place"
PLACED = struct.Struct(">QQ")
WAY_OUT = (
    "run the earlier version of Penstock with this folder and its app until the app is idle, and "
    "then start this version"
)


class _FirstVote(msgspec.Struct, frozen=True):
    transaction: str
    start: int
    end: int


class _FirstStanding(msgspec.Struct, frozen=True):
    """From the time when workers had one stream."""

    committed: int
    pending: _FirstVote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()


class _EarlierStanding(msgspec.Struct, frozen=True):
    committed: dict[int, int] = {}
    pending: Vote | None = None
    resolved: tuple[str, bool] | None = None
    attempt: tuple[int, ...] = ()


class _FirstLine(msgspec.Struct, frozen=True):
    worker: str
    standing: _FirstStanding


class _LaterLine(msgspec.Struct, frozen=True):
    worker: str
    standing: _EarlierStanding


def read_standings(folder: Path) -> dict[str, WorkerStanding]:
    """Each worker's standing as saved by an earlier version; empty if there was none.

    Raises `UsageError` if a vote is waiting for its outcome, or that version is still running.
    """
    path = folder / TRANSACTIONS
    if not path.exists():
        return {}
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is using the sink folder {folder}: stop it"
            ) from None
        data = file.read()
    found: dict[str, WorkerStanding] = {}
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            worker, standing = _decode(line)
        except msgspec.DecodeError as error:
            raise DamagedError(
                f"{path}: line {number} is damaged ({error}): restore the file from a copy",
                str(path), 0, number, number,
            ) from None  # fmt: skip
        found[worker] = standing
    for worker, standing in found.items():
        if standing.pending is not None:
            raise UsageError(
                f"worker {worker} awaits the outcome of {standing.pending.transaction}, which "
                f"an earlier version has staged in the target: {WAY_OUT}"
            )
    return found


def retire(folder: Path) -> None:
    """Rename the earlier version's file: its contents are in the spool, so it must not be used."""
    if (folder / TRANSACTIONS).exists():
        os.replace(folder / TRANSACTIONS, folder / TAKEN_OVER)


def _decode(line: bytes) -> tuple[str, WorkerStanding]:
    try:
        first = msgspec.json.decode(line, type=_FirstLine)
    except msgspec.ValidationError:
        later = msgspec.json.decode(line, type=_LaterLine)
        had = later.standing
        standing = WorkerStanding(had.committed, had.pending, had.resolved, had.attempt)
        return later.worker, standing
    vote = first.standing.pending
    pending = None if vote is None else Vote(vote.transaction, ())
    ends = {1: first.standing.committed}
    return first.worker, WorkerStanding(
        ends, pending, first.standing.resolved, first.standing.attempt
    )


def has_messages(database: sqlite3.Connection, sql: Mapping[str, str]) -> bool:
    """Whether the spool has the format of an earlier version."""
    return database.execute(sql["earlier tables"]).fetchone() is not None


def read_messages(
    database: sqlite3.Connection, sql: Mapping[str, str], folder: Path
) -> Iterator[tuple[str, list[SinkMessage]]]:
    """The messages that the program has not read yet, in commit order, each with its worker."""
    if database.execute(sql["earlier votes"]).fetchone() is not None:
        raise UsageError(f"a vote of an earlier version awaits its outcome: {WAY_OUT}")
    place = folder / PLACE
    read = place.read_bytes() if place.exists() else b""
    number_read, last_read = PLACED.unpack(read) if len(read) == PLACED.size else (0, 0)
    for number, worker, first, last in database.execute(sql["earlier stretches"]).fetchall():
        start = last_read + 1 if number == number_read else first
        rows = database.execute(sql["earlier messages"], (worker, start, last)).fetchall()
        if rows:
            yield worker, [SinkMessage(*row) for row in rows]


def drop_messages(database: sqlite3.Connection, sql: Mapping[str, str]) -> None:
    """Drop the earlier tables, whose messages are now in the spool."""
    for statement in filter(str.strip, sql["drop earlier"].split(";")):
        database.execute(statement)
