"""Dead letters of groups: messages that failed too often or were rejected.

A letter that is replayed goes to its group alone: into a stream of the group's own, which it reads
beside the stream that it is a group of.
"""

from __future__ import annotations

import contextlib

import msgspec

from penstock.errors import ObjectExistsError, RecordError, UnknownObjectError, UsageError
from penstock.groups.names import GroupName
from penstock.groups.outcomes import Bury, add_reason
from penstock.groups.slots import Slot
from penstock.log.api import Log
from penstock.log.declaring.objects import AlterStream, CreateStream, Stream, StreamSpec
from penstock.log.letters import (
    DEAD_CHARS_MAX,
    DeadLetter,
    dead_name,
    ensure_letters,
    readable,
)
from penstock.log.writing.compose import EventOptions
from penstock.records.cloudevents import check_header
from penstock.records.event import StoredEvent

GROUP_PREFIX = "group "
"""What the `agent` of a group's dead letters begins with; its name follows."""
ORIGIN = "group "
"""What the `origin` of a stream of replayed letters begins with; the group follows."""


def group_of(letter: DeadLetter, letters: Stream) -> GroupName | None:
    """The group that a letter of this stream comes from; `None` if it comes from elsewhere."""
    if not letter.agent.startswith(GROUP_PREFIX):
        return None
    stream = str(letters.name).removesuffix(dead_name(""))
    return GroupName(stream, letter.agent.removeprefix(GROUP_PREFIX))


def find_replays(log: Log, group: GroupName) -> Stream | None:
    """The stream of letters that were replayed to a group, if there is one."""
    try:
        found = log.stream(group.replays)
    except UnknownObjectError:
        return None
    return found if found.spec.origin == f"{ORIGIN}{group}" else None


def make_replays_stream(log: Log, group: GroupName) -> Stream:
    """The same, made if it is not there; it holds what the group's stream holds."""
    source = log.stream(group.stream)
    spec = StreamSpec(
        name=group.replays,
        record=source.record,
        content=source.spec.content,
        key=source.spec.key,
        time=source.spec.time,
        replication=source.spec.replication,
        retention_ms=source.spec.retention_ms,
        acks=source.spec.acks,
        origin=f"{ORIGIN}{group}",
    )
    with contextlib.suppress(ObjectExistsError):
        log.apply([CreateStream(spec)])
    found = log.stream(spec.name)
    if found.spec.origin != spec.origin:
        raise UsageError(
            f"letters of group {group} are replayed through stream {found.name}, and a stream of "
            "that name exists already: rename it, or replay into a stream of your choice (--into)"
        )
    if found.record != spec.record:
        log.apply([AlterStream(msgspec.structs.replace(found.spec, record=spec.record))])
    return log.stream(spec.name)


def make_letters_stream(log: Log, stream: Stream) -> Stream:
    """The stream for dead letters of a stream, made if it is not there."""
    name = str(stream.name)
    ensure_letters(log, [name])
    return log.stream(dead_name(name))


def letter_of(
    stream: str, group: str, slot: Slot, outcome: Bury, event: StoredEvent[object] | None
) -> tuple[DeadLetter, EventOptions]:
    """A message of a stream as a dead letter, with the headers that it had. Of one that retention
    has removed meanwhile, only the place is left.
    """
    key = None if event is None else event.key
    letter = DeadLetter(
        agent=f"{GROUP_PREFIX}{group}",
        stream=stream,
        partition=slot.place.partition,
        offset=slot.offset,
        id="" if event is None else event.id,
        key=None if key is None else key.decode(errors="backslashreplace"),
        data="" if event is None else _as_text(event.data),
        error=outcome.reason,
        traceback="\n".join(add_reason(slot.reasons, outcome.reason)),
        tries=slot.deliveries,
    )
    return letter, EventOptions(headers=None if event is None else _headers_of(event))


def _headers_of(event: StoredEvent[object]) -> dict[str, str]:
    """Those that an event of ours may have: other programs' messages on Kafka have any."""
    found = {}
    for name, value in event.headers.items():
        with contextlib.suppress(RecordError):
            check_header(name, value)
            found[name] = value
    return found


def _as_text(data: object) -> str:
    if isinstance(data, bytes):
        return readable(data)
    return msgspec.json.encode(data, order="deterministic").decode()[:DEAD_CHARS_MAX]
