"""Who owns which connector stream, and up to where the log has it.

Both are one record in the log's progress. An owner commits what it receives under the stream's
own producer name, together with the record; so whoever takes the stream over fences it, in
whatever process or machine it runs, and no message is ever stored twice.

A record counts as owned until its time is over, which every commit moves on; a process of this
machine that is gone owns nothing any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from penstock.connect import wire
from penstock.errors import FencedError
from penstock.log.api import Commit, Holder, Log, Part
from penstock.log.commit import commit_surely, next_sequence
from penstock.records.event import now_us

Policy = Literal["oldest", "takeover"]
PREFIX = "source/"
LEASE_S = 15.0
LOST_MAX = 100


class Owner(msgspec.Struct, frozen=True):
    """A connector on a listener. `process` tells one start of a process from another."""

    host: str
    process: str
    connection: int
    program: str
    instance: str

    def is_gone(self) -> bool:
        """Whether it is surely no more: its process was on this machine, and is not there."""
        return self.host == _host() and self.process not in ("", _started(_pid(self.process)))


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the log knows of a connector stream. `owner` is `None` once it was given back."""

    name: str
    stream: str
    point_of_ref: int = wire.NEVER
    owner: Owner | None = None
    until_us: int = 0
    lost: tuple[str, ...] = ()
    """Instances that it was taken from, and that do not get it back while its owner lives."""
    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    opened: int = 0
    """How often a connector was given it: more than once means that it came again."""
    damaged: int = 0
    """Messages that the stream could not hold, and that were left out or told as dead letters."""
    credits: int = 0
    """How many frames the connector might still send, when it last sent something."""
    lag_ms: int | None = None
    """How old the last message was when it was stored, if it said its time."""

    def is_owned(self) -> bool:
        return self.owner is not None and self.until_us > now_us() and not self.owner.is_gone()


class Claim:
    """A stream that was given to a connector: commits what it sends.

    Used by one thread at a time. Raises `FencedError` once somebody else has the stream.
    """

    def __init__(self, log: Log, stream_id: int, holder: Holder, record: SourceRecord) -> None:
        self._log = log
        self._key = progress_key(stream_id)
        self._holder = holder
        self._sequence = next_sequence(log, holder.producer)
        self.stream_id = stream_id
        self.record = record

    def save(self, record: SourceRecord, parts: list[Part]) -> None:
        """Store events and what is known now of the stream, as one."""
        leased = msgspec.structs.replace(record, until_us=_until_us())
        commit = Commit(parts=parts, progress={self._key: msgspec.json.encode(leased)})
        commit_surely(self._log, self._holder, self._sequence, commit)
        self._sequence += 1
        self.record = leased

    def renew(self) -> None:
        """Keep the stream though nothing comes, where its time would be over soon."""
        if self.record.until_us < now_us() + int(LEASE_S * 1e6) // 2:
            self.save(self.record, [])

    def release(self) -> None:
        """Give the stream back; does nothing if it was taken."""
        with contextlib.suppress(FencedError):
            self.save(msgspec.structs.replace(self.record, owner=None, lost=()), [])


class Registry:
    """Gives streams to connectors, one owner at a time. For any thread."""

    def __init__(self, log: Log, policy: Policy = "oldest") -> None:
        self._log = log
        self._policy = policy
        self._lock = threading.Lock()
        self._lost: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        """Whom to tell; a connection that is gone is not held on to."""

    def take(
        self, stream_id: int, name: str, stream: str, owner: Owner, on_lost: Callable[[], None]
    ) -> Claim | SourceRecord:
        """The stream for this owner; or its record, if another one keeps it.

        `on_lost`, a method, is called when another connection of this process takes it over;
        where it is another process, the next commit is fenced.

        1. Look whether it is free, or may be taken.
        2. Hold its producer: from here on, whoever had it can commit no more.
        3. Read the record again, since it may have been moved on before that.
        4. Save it with the new owner; who is fenced here was not the last to try.
        """
        found = self.record(stream_id)
        if found is not None and not self._may_take(found, owner):
            return found
        holder = self._log.hold(progress_key(stream_id))
        before = self.record(stream_id) or SourceRecord(name=name, stream=stream)
        taken_from = before.owner if before.is_owned() else None
        lost: tuple[str, ...] = ()
        if taken_from is not None:
            others = {*before.lost, taken_from.instance} - {owner.instance}
            lost = tuple(sorted(others))[:LOST_MAX]
        record = msgspec.structs.replace(
            before, name=name, stream=stream, owner=owner, opened=before.opened + 1, lost=lost
        )
        claim = Claim(self._log, stream_id, holder, record)
        try:
            claim.save(record, [])
        except FencedError:
            return self.record(stream_id) or record
        with self._lock:
            earlier = self._lost.get(stream_id)
            self._lost[stream_id] = weakref.WeakMethod(on_lost)
        tell = None if earlier is None else earlier()
        if taken_from is not None and tell is not None:
            tell()
        return claim

    def _may_take(self, record: SourceRecord, owner: Owner) -> bool:
        if not record.is_owned():
            return True
        if record.owner is not None and record.owner.instance == owner.instance:
            return self._policy == "takeover"  # its own, which it has not yet noticed to be broken
        return self._policy == "takeover" and owner.instance not in record.lost

    def record(self, stream_id: int) -> SourceRecord | None:
        packed = self._log.progress(progress_key(stream_id))
        return None if packed is None else msgspec.json.decode(packed, type=SourceRecord)


def records(log: Log) -> Iterator[SourceRecord]:
    """Every connector stream that the log knows."""
    for packed in log.progress_items(PREFIX).values():
        yield msgspec.json.decode(packed, type=SourceRecord)


def progress_key(stream_id: int) -> str:
    """Under which key a stream's record is saved, and the name of the producer who saves it."""
    return f"{PREFIX}{stream_id:016x}"


def this_owner(connection: int, program: str, instance: str) -> Owner:
    """The owner that a connection of this process is."""
    return Owner(_host(), _started(os.getpid()), connection, program, instance)


def _until_us() -> int:
    return now_us() + int(LEASE_S * 1e6)


def _host() -> str:
    return socket.gethostname()


def _pid(process: str) -> int:
    return int(process.partition(".")[0] or 0)


def _started(pid: int) -> str:
    """Tells a process from others that had, or will have, its number; empty if it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid}.{fields[19]}"
