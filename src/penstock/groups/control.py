"""Managing groups: list, create, pause, reset and drop them.

Pausing works while a group is coordinated somewhere: its coordinator looks for it. Whatever changes
what is acknowledged needs the group's claim, so that nobody hands out messages meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import msgspec

from penstock.errors import (
    GroupBusyError,
    ObjectExistsError,
    OffsetGoneError,
    UnknownObjectError,
)
from penstock.groups.letters import find_replays
from penstock.groups.names import GroupName
from penstock.groups.rounds import GroupWriter
from penstock.groups.saved import (
    GroupKeys,
    KnownGroup,
    KnownPartition,
    SavedGroup,
    pack_partition,
    unpack_group,
)
from penstock.groups.slots import GroupPartition, PartitionWindow
from penstock.log.api import Commit, Count, Log, Start
from penstock.log.claims import Claims, who_has
from penstock.log.declaring.objects import DropStream, Stream
from penstock.log.reading.read import start_offsets
from penstock.log.writing.commit import commit_surely, next_sequence
from penstock.records.event import now_us

PREFIX = "group/"
CONTROL = "control/group/"
CLAIM_S = 10.0


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group is in a partition: everything below `floor` is acknowledged."""

    partition: int
    floor: int
    next: int
    lag: Count


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a group is doing, as the log knows. `lag` is the number of messages that are not
    acknowledged, and `lag_s` how long ago the oldest of them was appended. `replayed` are those of
    them that are dead letters, replayed to this group.
    """

    stream: str
    name: str
    created_us: int
    is_paused: bool
    coordinator: str | None
    lag: Count
    lag_s: float | None
    replayed: Count
    partitions: tuple[PartitionReport, ...]


def claims_of(log: Log, group: GroupName, lease_s: float) -> Claims:
    """What a process has to have to coordinate a group."""
    return Claims(
        log,
        f"group/{group.stream}",
        [group.name],
        producer=f"{group.producer}/claim",
        lease_s=lease_s,
    )


# Looking


def list_groups(log: Log, stream: str | None = None) -> list[GroupReport]:
    """Every group, or those of a stream, in order of name."""
    names: dict[GroupName, dict[str, bytes]] = {}
    prefix = PREFIX if stream is None else f"{PREFIX}{stream}/"
    for key, value in log.progress_items(prefix).items():
        _, of, name, _ = key.split("/", 3)
        names.setdefault(GroupName(of, name), {})[key] = value
    found = ((group, unpack_group(GroupKeys(*group), items)) for group, items in names.items())
    return [_report(log, group, known, known.group) for group, known in found if known.group]


def show_group(log: Log, group: GroupName) -> GroupReport:
    """Raises `UnknownObjectError` if there is no such group."""
    known, saved = _load(log, group)
    return _report(log, group, known, saved)


def check_group(log: Log, group: GroupName) -> None:
    """Raises `UnknownObjectError` if there is no such group."""
    _load(log, group)


def _load(log: Log, group: GroupName) -> tuple[KnownGroup, SavedGroup]:
    keys = GroupKeys(*group)
    known = unpack_group(keys, log.progress_items(keys.prefix))
    if known.group is None:
        others = ", ".join(sorted(one.name for one in list_groups(log, group.stream))) or "none"
        raise UnknownObjectError(
            f"stream {group.stream} has no group {group.name}; it has: {others}"
        )
    return known, known.group


def _report(log: Log, group: GroupName, known: KnownGroup, saved: SavedGroup) -> GroupReport:
    streams = {str(stream.name): stream.id for stream in log.streams()}
    is_there = streams.get(group.stream) == saved.inputs[0][1]  # not gone, nor another one
    partitions = tuple(_partitions(log, group.stream, 0, known)) if is_there else ()
    replays = find_replays(log, group)
    replayed = () if replays is None else tuple(_partitions(log, group.replays, replays.id, known))
    claim = who_has(log, f"group/{group.stream}", [group.name]).get(group.name)
    oldest = [
        age
        for name, found in ((group.stream, partitions), (group.replays, replayed))
        for one in found
        if one.lag and (age := _age_s(log, name, one.partition, one.floor)) is not None
    ]
    return GroupReport(
        stream=group.stream,
        name=group.name,
        created_us=saved.created_us,
        is_paused=is_paused(log, group),
        coordinator=None if claim is None else str(claim),
        lag=sum((one.lag for one in (*partitions, *replayed)), Count()),
        lag_s=max(oldest, default=None),
        replayed=sum((one.lag for one in replayed), Count()),
        partitions=partitions,
    )


def _partitions(log: Log, stream: str, number: int, known: KnownGroup) -> Iterator[PartitionReport]:
    """Where a group is in the partitions of an input."""
    for partition, offsets in log.offsets(stream).items():
        found = known.partitions.get(GroupPartition(number, partition), KnownPartition())
        floor = max(found.done.first_gap, offsets.first)
        lag = log.count(stream, partition, floor, offsets.next)
        for start, end in found.done.items():
            if start > floor:
                done = log.count(stream, partition, start, min(end, offsets.next))
                lag = Count(max(0, lag.events - done.events), lag.is_exact and done.is_exact)
        yield PartitionReport(partition=partition, floor=floor, next=offsets.next, lag=lag)


def _age_s(log: Log, stream: str, partition: int, offset: int) -> float | None:
    """How long ago the first event from an offset on was appended."""
    with contextlib.suppress(OffsetGoneError):
        for batch in log.read(stream, partition, offset, log.advance(stream, partition, offset, 1)):
            return max(0.0, (now_us() - batch.runs[0].time_us) / 1e6)
    return None


# Pausing


def is_paused(log: Log, group: GroupName) -> bool:
    """Whether the group is paused."""
    return log.progress(f"{CONTROL}{group}") is not None


def set_paused(log: Log, group: GroupName, paused: bool) -> None:
    """Stop a group from delivering messages, or let it continue; its coordinator notices within
    about a second.
    """
    _load(log, group)
    holder = log.hold(f"{group.producer}/control")
    sequence = next_sequence(log, holder.producer)
    progress = {f"{CONTROL}{group}": b"paused" if paused else None}
    commit_surely(log, holder, sequence, Commit(progress=progress))


# Changing


def create_group(log: Log, group: GroupName, start: Start) -> None:
    """Create a group that starts at a position. Raises `ObjectExistsError` if there is one."""
    stream = log.stream(group.stream)
    with _writing(log, group) as (writer, keys):
        if log.progress(keys.group) is not None:
            raise ObjectExistsError(
                f"stream {group.stream} has a group {group.name} already: to start elsewhere, "
                f"`penstock group reset {group.stream} {group.name} --from WHERE`"
            )
        starts = start_offsets(log, group.stream, range(stream.partitions), start)
        commit = Commit(progress=first_progress(keys, stream, starts))
        writer.commit(commit, _never, _say_nothing)


def reset_group(
    log: Log, group: GroupName, start: Start, *, dry_run: bool = False
) -> dict[int, tuple[int, int]]:
    """Move a group to another position: what lies before it counts as acknowledged, and nothing
    else. Letters that were replayed to the group stay as they are.

    Returns for each partition up to where everything was acknowledged, and up to where it is now.
    Raises `GroupBusyError` while the group is coordinated somewhere.
    """
    known, _ = _load(log, group)
    stream = log.stream(group.stream)
    starts = start_offsets(log, group.stream, range(stream.partitions), start)
    moved = {
        p: (known.partitions.get(GroupPartition(0, p), KnownPartition()).done.first_gap, offset)
        for p, offset in starts.items()
    }
    if not dry_run:
        with _writing(log, group) as (writer, keys):
            known, saved = _load(log, group)  # which nobody can change any more
            replays = find_replays(log, group)
            fresh = msgspec.structs.replace(saved, inputs=((str(stream.name), stream.id),))
            progress = _without_state(log, keys)
            progress[keys.group] = msgspec.json.encode(fresh)
            progress |= start_progress(keys, starts)
            for place, replayed in known.partitions.items():
                if replays is not None and place.input == replays.id:
                    progress |= keys.snapshot(place, replayed.pack(0))
            writer.commit(Commit(progress=progress), _never, _say_nothing)
    return moved


def drop_group(log: Log, group: GroupName) -> None:
    """Drop a group. Raises `GroupBusyError` while it is coordinated somewhere."""
    _load(log, group)
    with _writing(log, group) as (writer, keys):
        if find_replays(log, group) is not None:
            log.apply([DropStream(group.replays)])
        progress: dict[str, bytes | None] = dict.fromkeys(log.progress_items(keys.prefix))
        progress[f"{CONTROL}{group}"] = None
        writer.commit(Commit(progress=progress), _never, _say_nothing)


def first_progress(
    keys: GroupKeys, stream: Stream, starts: Mapping[int, int]
) -> dict[str, bytes | None]:
    """What is saved of a new group that starts at these offsets."""
    saved = SavedGroup(inputs=((str(stream.name), stream.id),), created_us=now_us())
    return {**start_progress(keys, starts), keys.group: msgspec.json.encode(saved)}


def start_progress(keys: GroupKeys, starts: Mapping[int, int]) -> dict[str, bytes | None]:
    """What is saved of a group that has only begun."""
    unread = KnownPartition().after(0)
    progress: dict[str, bytes | None] = {}
    for partition, at in starts.items():
        place = GroupPartition(0, partition)
        packed = pack_partition(0, PartitionWindow(place, at, at), unread)
        progress |= keys.snapshot(place, packed)
    return progress


def _without_state(log: Log, keys: GroupKeys) -> dict[str, bytes | None]:
    return {
        key: None
        for key in log.progress_items(keys.prefix)
        if not key.startswith(keys.client("")) and key != keys.group
    }


@contextlib.contextmanager
def _writing(log: Log, group: GroupName) -> Iterator[tuple[GroupWriter, GroupKeys]]:
    """While nobody coordinates the group."""
    claims = claims_of(log, group, CLAIM_S)
    over = threading.Event()
    timer = threading.Timer(CLAIM_S, over.set)
    timer.daemon = True
    timer.start()
    try:
        if not claims.acquire(over):
            there = who_has(log, f"group/{group.stream}", [group.name])
            who = "somebody" if group.name not in there else str(there[group.name])
            raise GroupBusyError(f"group {group} is coordinated by {who}: stop it first")
        timer.cancel()
        holder = log.hold(group.producer)
        sequence = next_sequence(log, group.producer)
        yield GroupWriter(log, group, holder, sequence), GroupKeys(*group)
    finally:
        timer.cancel()
        claims.release()


def _never(pause_s: float) -> bool:
    threading.Event().wait(pause_s)
    return False


def _say_nothing(line: str) -> None:
    del line
