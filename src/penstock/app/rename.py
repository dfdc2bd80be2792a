"""Giving a definition another name: it goes on where it was, over the table that it has."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.app.positions import producer_name, progress_key
from penstock.app.saved import saved_key
from penstock.app.takeover import CLAIMS, fenced_positions
from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Entry, Log
from penstock.log.claims import who_has
from penstock.log.commit import next_sequence
from penstock.log.objects import CreateStream
from penstock.log.transaction import Transaction


class Renamed(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    app: str
    old: str
    new: str
    timers: int


def rename_definition(log: Log, app: str, old: str, new: str) -> Renamed:
    """Let a definition of another name go on where one was: its position, and its timers.

    One commit. The app must not run it.
    """
    for claim in who_has(log, f"app/{app}", [old, new]).values():
        raise UsageError(f"{claim} runs app {app}: stop it first")
    _check_names(log, app, old, new)
    made = _timers_stream(log, old, new)
    holder = log.hold(producer_name(app, CLAIMS))
    position = fenced_positions(log, app, [old])[old]
    assert position is not None  # noqa: S101  looked at before, and nobody runs it
    if position.checkpoint:
        raise UsageError(
            f"{old} keeps state in Spark, which knows it by its name: `penstock reset APP {old}` "
            f"and let {new} begin anew"
        )
    timers = 0
    sequence = next_sequence(log, holder.producer)
    with Transaction(log, holder, sequence=sequence) as tx:
        for entry in _entries(log, f"{old}_timers") if made else ():
            due = msgspec.msgpack.decode(entry.value)["value"]
            tx.send(f"{new}_timers", {"value": due}, key=entry.key)
            tx.send(f"{old}_timers", None, key=entry.key)
            timers += 1
        moved = msgspec.structs.replace(position, producer="", run="")
        tx.save(progress_key(app, old), None)
        tx.save(progress_key(app, new), msgspec.json.encode(moved))
        tx.save(saved_key(app, new), log.progress(saved_key(app, old)))
        tx.save(saved_key(app, old), None)
    return Renamed(app=app, old=old, new=new, timers=timers)


def _check_names(log: Log, app: str, old: str, new: str) -> None:
    known = sorted(key.split("/", 2)[2] for key in log.progress_items(f"app/{app}/"))
    if old not in known:
        raise UnknownObjectError(
            f"app {app} has not run a definition {old}: it has run {', '.join(known) or 'none'}"
        )
    if new in known:
        raise UsageError(
            f"app {app} has run {new} already, which is somewhere else than {old}: "
            f"`penstock reset APP {new}` forgets where"
        )


def _timers_stream(log: Log, old: str, new: str) -> bool:
    """Make the table of timers under the new name, where there is one under the old."""
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


def _entries(log: Log, table: str) -> Iterator[Entry]:
    for page in log.snapshot(table):
        yield from page
