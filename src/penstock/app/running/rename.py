"""Renaming a definition: it keeps its position, its table and its timers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.app.running.positions import (
    CheckpointPosition,
    pack_position,
    producer_name,
    progress_key,
)
from penstock.app.running.saved import saved_key
from penstock.app.running.takeover import CLAIMS, fence_positions
from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Log, TableEntry
from penstock.log.claims import who_has
from penstock.log.declaring.objects import CreateStream
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.transaction import Transaction


class Renamed(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    app: str
    old: str
    new: str
    timers: int


def rename_definition(log: Log, app: str, old: str, new: str) -> Renamed:
    """Rename a definition: the new name takes over its position and its timers, in one commit.

    Raises `UsageError` if a process is running the app's definition, under either name.
    """
    for claim in who_has(log, f"app/{app}", [old, new]).values():
        raise UsageError(f"app {app} is running ({claim}): stop it first")
    _check_names(log, app, old, new)
    made = _timers_stream(log, old, new)
    holder = log.hold(producer_name(app, CLAIMS))
    position = fence_positions(log, app, [old])[old]
    if position is None:
        raise UnknownObjectError(f"{old} has just been reset: nothing was changed")
    if isinstance(position, CheckpointPosition):
        raise UsageError(
            f"{old} keeps state in Spark, which is stored under its name: run `penstock reset APP "
            f"{old}` and let {new} start from the beginning"
        )
    timers = 0
    sequence = next_sequence(log, holder.producer)
    with Transaction(log, holder, sequence=sequence) as tx:
        for entry in _entries(log, f"{old}_timers") if made else ():
            due = msgspec.msgpack.decode(entry.value)["value"]
            tx.send(f"{new}_timers", {"value": due}, key=entry.key)
            tx.send(f"{old}_timers", None, key=entry.key)
            timers += 1
        moved = msgspec.structs.replace(position, mover=None)
        tx.save(progress_key(app, old), None)
        tx.save(progress_key(app, new), pack_position(moved))
        tx.save(saved_key(app, new), log.progress(saved_key(app, old)))
        tx.save(saved_key(app, old), None)
    return Renamed(app=app, old=old, new=new, timers=timers)


def _check_names(log: Log, app: str, old: str, new: str) -> None:
    known = sorted(key.split("/", 2)[2] for key in log.progress_items(f"app/{app}/"))
    if old not in known:
        raise UnknownObjectError(
            f"app {app} has never run a definition {old}: it has run {', '.join(known) or 'none'}"
        )
    if new in known:
        raise UsageError(
            f"app {app} has already run {new}, which has a position of its own: to discard that, "
            f"run `penstock reset APP {new}`"
        )


def _timers_stream(log: Log, old: str, new: str) -> bool:
    """Create the table of timers under the new name, if there is one under the old name."""
    names = {str(stream.name): stream for stream in log.streams()}
    found = names.get(f"{old}_timers")
    if found is None:
        return False
    if f"{new}_timers" not in names:
        spec = msgspec.structs.replace(
            found.spec, name=f"{new}_timers", partitions=found.partitions, record=found.record
        )
        log.apply([CreateStream(spec)])
    return True


def _entries(log: Log, table: str) -> Iterator[TableEntry]:
    for page in log.snapshot(table):
        yield from page
