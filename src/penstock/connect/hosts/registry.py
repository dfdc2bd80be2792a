"""Who owns which connector stream, and up to which message the log has it.

Both are kept in one record in the log's progress. An owner commits what it receives under the
stream's own producer name, together with the record. So whoever takes the stream over fences the
previous owner, on whatever machine it runs, and no message is ever stored twice.

A stream is owned while its connection has a lease, which the connection renews for all of its
streams at once; a process of this machine that has ended owns nothing any more.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from penstock.connect.protocol import wire
from penstock.errors import ConnectorError, FencedError, UnknownObjectError
from penstock.log.api import Commit, Holder, Log, Part
from penstock.log.writing.commit import commit_surely, next_sequence
from penstock.processes import Process, this_process
from penstock.records.event import now_us

Policy = Literal["oldest", "takeover"]
PREFIX = "source/"
LEASES = "source-lease/"
LEASE_S = 15.0
FORGET_S = 86_400.0
"""A lease that was not released is forgotten this long after it has expired."""
LOST_MAX = 100
LOCKS = 64


class Owner(msgspec.Struct, frozen=True):
    """A connector connected to a listener.

    `process` distinguishes one start of a process from another. `space` says where process numbers
    are comparable: containers may share a host name, but not their processes.
    """

    host: str
    process: str
    connection: int
    program: str
    instance: str
    space: str = ""

    def is_gone(self) -> bool:
        """Whether it has certainly ended: its process ran on this machine, and no longer exists."""
        pid, _, started = self.process.partition(".")
        return Process(
            host=self.host, pid=int(pid or 0), started=started, space=self.space
        ).is_gone()


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the log knows about a connector stream. `owner` is `None` after a release."""

    name: str
    stream: str
    point_of_ref: int = wire.NEVER
    owner: Owner | None = None
    lease: str = ""
    """The lease of the owner's connection. Records of earlier versions have none."""
    until_us: int = 0
    """How long the owner has it at least; if there is a lease, that decides."""
    lost: tuple[str, ...] = ()
    """Instances it was taken from, which do not get it back while its owner is alive."""
    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    opened: int = 0
    """How often it was granted to a connector; more than once means that one reconnected."""
    damaged: int = 0
    """Messages that the stream could not hold, and that were skipped or became dead letters."""
    credits: int = 0
    """How many more frames the connector could send, when it last sent something."""
    lag_ms: int | None = None
    """How old the last message was when it was stored, if it had a time."""
    error: str = ""
    """The latest error in a message, and when it occurred."""
    error_us: int = 0

    def is_owned(self) -> bool:
        return self.owner is not None and self.until_us > now_us() and not self.owner.is_gone()


class Lease:
    """How long a connection owns its streams: one record for all of them.

    Used by one thread at a time.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.token = secrets.token_hex(8)
        self._key = f"{LEASES}{self.token}"
        self._holder: Holder | None = None
        self._sequence = 0
        self._until_us = 0

    def renew(self) -> None:
        """Extend the lease if it expires soon."""
        if self._until_us < now_us() + int(LEASE_S * 1e6) // 2:
            until_us = _until_us()
            self._save(msgspec.json.encode(until_us))
            self._until_us = until_us

    def release(self) -> None:
        """Release every stream that is still owned."""
        if self._holder is not None:
            self._save(None)
            self._until_us = 0

    def _save(self, value: bytes | None) -> None:
        if self._holder is None:
            self._holder = self._log.hold(self._key, ephemeral=True)
        commit_surely(self._log, self._holder, self._sequence, Commit(progress={self._key: value}))
        self._sequence += 1


class StreamClaim:
    """A stream that was granted to a connector; commits what the connector sends.

    Used by one thread at a time. Raises `FencedError` once someone else has the stream.
    """

    def __init__(self, log: Log, stream_id: int, holder: Holder, record: SourceRecord) -> None:
        self._log = log
        self._key = progress_key(stream_id)
        self._holder = holder
        self._sequence = next_sequence(log, holder.producer)
        self.stream_id = stream_id
        self.record = record

    def save(self, record: SourceRecord, parts: list[Part]) -> None:
        """Store events and the stream's new record, in one commit."""
        leased = msgspec.structs.replace(record, until_us=_until_us())
        commit = Commit(parts=parts, progress={self._key: msgspec.json.encode(leased)})
        commit_surely(self._log, self._holder, self._sequence, commit)
        self._sequence += 1
        self.record = leased

    def release(self) -> None:
        """Release the stream; does nothing if someone else has taken it."""
        with contextlib.suppress(FencedError):
            self.save(msgspec.structs.replace(self.record, owner=None, lease="", lost=()), [])


class Asked(msgspec.Struct, frozen=True):
    """A connector stream, and the stream of the log that it goes to."""

    stream_id: int
    name: str
    stream: str


class Registry:
    """Grants streams to connectors, one owner at a time. Safe to use from any thread."""

    def __init__(self, log: Log, policy: Policy = "oldest") -> None:
        self._log = log
        self._policy = policy
        self._lock = threading.Lock()
        self._one_by_one = [threading.Lock() for _ in range(LOCKS)]
        """Serialises simultaneous requests for one stream to this registry."""
        self._lost: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        """Whom to notify; held weakly, so that closed connections are not kept alive."""

    def take(
        self, asked: Asked, owner: Owner, lease: str, on_lost: Callable[[], None]
    ) -> StreamClaim | SourceRecord:
        """Claim the stream for this owner; return its record instead if another owner keeps it.

        `on_lost`, a method, is called when another connection of this process takes it over;
        if another process does, the next commit is fenced.

        1. Check whether it is free, or may be taken.
        2. Hold its producer: from here on, the previous owner can no longer commit.
        3. Read the record again, since it may have changed before that. If it was granted to
           someone else in the meantime, leave it to them: they ask again, and get it.
        4. Save it with the new owner; if this is fenced, someone else was the last to try.
        """
        with self._one_by_one[asked.stream_id % LOCKS]:
            return self._take(asked, owner, lease, on_lost)

    def _take(
        self, asked: Asked, owner: Owner, lease: str, on_lost: Callable[[], None]
    ) -> StreamClaim | SourceRecord:
        found = self.record(asked.stream_id)
        if found is not None and not self._may_take(found, owner):
            return found
        holder = self._log.hold(progress_key(asked.stream_id))
        new = SourceRecord(name=asked.name, stream=asked.stream)
        before = self.record(asked.stream_id) or new
        if not self._may_take(before, owner):
            return before
        taken_from = before.owner if before.is_owned() else None
        record = msgspec.structs.replace(
            before, name=asked.name, stream=asked.stream, owner=owner, lease=lease,
            opened=before.opened + 1, lost=_list_losers(before, taken_from, owner),
        )  # fmt: skip
        claim = StreamClaim(self._log, asked.stream_id, holder, record)
        try:
            claim.save(record, [])
        except FencedError:
            return self.record(asked.stream_id) or record
        with self._lock:
            earlier = self._lost.get(asked.stream_id)
            self._lost[asked.stream_id] = weakref.WeakMethod(on_lost)
        tell = None if earlier is None else earlier()
        if taken_from is not None and tell is not None:
            tell()
        return claim

    def _may_take(self, record: SourceRecord, owner: Owner) -> bool:
        if not record.is_owned():
            return True
        if record.owner is not None and record.owner.instance == owner.instance:
            return self._policy == "takeover"  # its own: the old connection is broken, unnoticed
        return self._policy == "takeover" and owner.instance not in record.lost

    def record(self, stream_id: int) -> SourceRecord | None:
        packed = self._log.progress(progress_key(stream_id))
        if packed is None:
            return None
        found = msgspec.json.decode(packed, type=SourceRecord)
        if found.owner is None or not found.lease:
            return found
        until = self._log.progress(f"{LEASES}{found.lease}")
        return _with_lease(found, until)

    def forget_leases(self) -> None:
        """Remove the leases of connections whose process was killed."""
        long_ago = now_us() - int(FORGET_S * 1e6)
        leases = self._log.progress_items(LEASES).items()
        ended = {key: None for key, until in leases if msgspec.json.decode(until) < long_ago}
        if ended:
            name = f"{LEASES}sweep/{secrets.token_hex(8)}"
            holder = self._log.hold(name, ephemeral=True)
            commit_surely(self._log, holder, 0, Commit(progress=ended))


def _list_losers(before: SourceRecord, taken_from: Owner | None, owner: Owner) -> tuple[str, ...]:
    if taken_from is None:
        return ()
    return tuple(sorted({*before.lost, taken_from.instance} - {owner.instance}))[:LOST_MAX]


def _with_lease(record: SourceRecord, until: bytes | None) -> SourceRecord:
    """The record with the expiry of its lease, which has expired if there is none."""
    until_us = 0 if until is None else msgspec.json.decode(until, type=int)
    return msgspec.structs.replace(record, until_us=until_us)


def records(log: Log) -> Iterator[SourceRecord]:
    """The records of all connector streams in the log."""
    return (record for _, record in numbered_records(log))


def numbered_records(log: Log) -> Iterator[tuple[int, SourceRecord]]:
    """The records with their stream ids: names are for people, and need not be unique."""
    leases = log.progress_items(LEASES)
    for key, packed in log.progress_items(PREFIX).items():
        found = msgspec.json.decode(packed, type=SourceRecord)
        if found.lease:
            found = _with_lease(found, leases.get(f"{LEASES}{found.lease}"))
        yield int(key.removeprefix(PREFIX), 16), found


def amend(
    log: Log, stream_id: int, change: Callable[[SourceRecord], SourceRecord | None]
) -> SourceRecord:
    """Change a stream's record, or delete it; return the previous record.

    Nobody else has the stream meanwhile. Raises `ConnectorError` if a connector has it now.
    """
    registry, key = Registry(log), progress_key(stream_id)
    _check_free(registry.record(stream_id))
    holder = log.hold(key)
    before = _check_free(registry.record(stream_id))
    after = change(before)
    packed = None if after is None else msgspec.json.encode(after)
    try:
        sequence = next_sequence(log, key)
        commit_surely(log, holder, sequence, Commit(progress={key: packed}))
    except FencedError:
        raise ConnectorError(
            f"a connector has just taken stream {before.name}: stop it first"
        ) from None
    return before


def _check_free(record: SourceRecord | None) -> SourceRecord:
    if record is None:
        raise UnknownObjectError("the log has no record of this connector stream any more")
    if record.is_owned() and record.owner is not None:
        who = f"{record.owner.program} {record.owner.instance}".strip()
        raise ConnectorError(f"connector {who} has stream {record.name}: stop it first")
    return record


def progress_key(stream_id: int) -> str:
    """The key of a stream's record, and the name of the producer that saves it."""
    return f"{PREFIX}{stream_id:016x}"


def this_owner(connection: int, program: str, instance: str) -> Owner:
    """The owner that represents a connection of this process."""
    here = this_process()
    process = f"{here.pid}.{here.started}"
    return Owner(here.host, process, connection, program, instance, here.space)


def _until_us() -> int:
    return now_us() + int(LEASE_S * 1e6)
