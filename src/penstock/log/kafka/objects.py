"""Namespaces and streams on Kafka: a compacted topic says what is there, topics hold the events.

The catalogue is the truth. Topics are made before a stream is written into it and removed after
it is struck out, so a process that dies in between leaves at most a topic that nobody reads;
what is still to be removed stands in the catalogue too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from penstock.errors import (
    LogUnreachableError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.changes import Resolved, must_exist, resolve, resolve_new
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.view import View
from penstock.log.names import DEFAULT, SYSTEM, StreamName, guess, parse_stream
from penstock.log.objects import (
    Change,
    CreateNamespace,
    CreateStream,
    Defaults,
    DropNamespace,
    DropStream,
    ObjectChanged,
    Stream,
    StreamSpec,
    check_writable_by_user,
    to_event,
)
from penstock.records.event import from_microseconds, now_us
from penstock.records.schema import Schema

TOPIC = "_penstock.catalogue"
SESSION = "catalogue"
FRESH_S = 0.25
"""How long a look at the catalogue lasts; changes made here are seen at once."""
GLANCE_S = 2.0
"""How long to look, and to leave it then, while nobody answers."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue says of the log itself."""

    id: str
    next_stream: int = 1
    format: int = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue says of a stream. `adopted` is a topic that somebody else made."""

    id: int
    spec: StreamSpec
    grown: tuple[int, ...]
    records: tuple[Schema, ...]
    created_us: int
    adopted: bool = False


Values = dict[str, bytes | None]
"""Lines of the catalogue by key; `None` strikes one out."""


class Catalogue:
    """What is there, as of a moment ago. For any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.topic = cluster.address.own(TOPIC)
        self._cluster = cluster
        self._view = View(cluster, self.topic, self._apply)
        self._lines: dict[str, tuple[bytes, int]] = {}
        self._streams: dict[StreamName, Stream] = {}
        self._looked = 0.0
        self.close = self._view.close

    def _apply(self, key: str, value: bytes | None, offset: int) -> None:
        if value is None:
            self._lines.pop(key, None)
        else:
            self._lines[key] = (value, offset)
        if key.startswith("stream/"):
            name = parse_stream(key.removeprefix("stream/"))
            self._streams.pop(name, None)
            if value is not None:
                self._streams[name] = _stream(name, value, offset)

    def look(self) -> None:
        """See what is there now."""
        self._view.catch_up(0)
        self._looked = time.monotonic()

    def _glance(self) -> None:
        """Look, unless that was just now. While nobody answers, what was seen last must do."""
        now = time.monotonic()
        if now - self._looked > FRESH_S:
            try:
                with self._cluster.within(now + GLANCE_S):
                    self.look()
            except LogUnreachableError:
                if self._looked == 0.0:
                    raise
                self._looked = time.monotonic() + GLANCE_S

    def about(self) -> About | None:
        with self._view.lock:
            found = self._lines.get("log")
        return None if found is None else msgspec.json.decode(found[0], type=About)

    def namespaces(self) -> list[str]:
        self._glance()
        with self._view.lock:
            return sorted(k.partition("/")[2] for k in self._lines if k.startswith("namespace/"))

    def streams(self) -> list[Stream]:
        self._glance()
        with self._view.lock:
            return [self._streams[name] for name in sorted(self._streams)]

    def stream(self, text: str) -> Stream:
        name = parse_stream(text)
        self._glance()
        with self._view.lock:
            found = self._streams.get(name)
        if found is None:
            self.look()
            with self._view.lock:
                found = self._streams.get(name)
        return must_exist(found, name)

    def lines(self) -> dict[str, bytes]:
        with self._view.lock:
            return {key: value for key, (value, _) in self._lines.items()}


def _stream(name: StreamName, value: bytes, offset: int) -> Stream:
    entry = msgspec.json.decode(value, type=Entry)
    return Stream(
        id=entry.id,
        name=name,
        spec=entry.spec,
        grown=entry.grown,
        records=entry.records,
        created=from_microseconds(entry.created_us),
        version=offset,
        is_adopted=entry.adopted,
    )


class Draft:
    """Changes worked out on a copy of the catalogue: what to write, make and remove."""

    def __init__(
        self, lines: Mapping[str, bytes], cluster: Cluster, defaults: Defaults, partitions_max: int
    ) -> None:
        self._lines: dict[str, bytes] = dict(lines)
        self._cluster = cluster
        self._defaults = defaults
        self._partitions_max = partitions_max
        self.values: Values = {}
        self.new: dict[str, Resolved] = {}
        self.changed: dict[str, Resolved] = {}
        self.gone: list[str] = []

    # What is there, for `resolve`

    def has_namespace(self, name: str) -> bool:
        return f"namespace/{name}" in self._lines

    def find(self, name: StreamName) -> Stream | None:
        packed = self._lines.get(_key(name))
        return None if packed is None else _stream(name, packed, 0)

    def names_in(self, namespace: str) -> list[str]:
        return [name.stream for name in self._names() if name.namespace == namespace]

    def _names(self) -> list[StreamName]:
        keys = [key for key in sorted(self._lines) if key.startswith("stream/")]
        return [parse_stream(key.removeprefix("stream/")) for key in keys]

    # Changes

    @property
    def is_empty(self) -> bool:
        return "log" not in self._lines

    def populate(self, specs: Sequence[StreamSpec]) -> None:
        """What every log has from its first moment on."""
        self._write("log", About(id=secrets.token_hex(8)))
        for namespace in (DEFAULT, SYSTEM):
            self._write(f"namespace/{namespace}", {"created_us": now_us()})
        for spec in specs:
            self._make(resolve_new(self, spec, self._defaults, self._partitions_max))

    def change(self, change: Change) -> Stream | None:
        """Take a change in; returns the stream before it. Raises what is wrong with it."""
        resolved = resolve(self, change, self._defaults, self._partitions_max)
        match change:
            case CreateNamespace(name=name):
                self._write(f"namespace/{name}", {"created_us": now_us()})
            case DropNamespace(name=name):
                self._strike(f"namespace/{name}")
            case CreateStream():
                self._make(resolved)
            case DropStream():
                self._drop(resolved)
            case _:
                self._change(resolved)
        return resolved.before

    def _make(self, resolved: Resolved, *, adopted: bool = False) -> None:
        name = cast(StreamName, resolved.name)
        about = msgspec.json.decode(self._lines["log"], type=About)
        number = about.next_stream
        self._write("log", msgspec.structs.replace(about, next_stream=number + 1))
        entry = Entry(
            id=number,
            spec=cast(StreamSpec, resolved.spec),
            grown=resolved.grown,
            records=resolved.records,
            created_us=now_us(),
            adopted=adopted,
        )
        self._write(_key(name), entry)
        if not adopted:
            self.new[self._cluster.address.topic(name)] = resolved

    def _change(self, resolved: Resolved) -> None:
        name = cast(StreamName, resolved.name)
        before = msgspec.json.decode(self._lines[_key(name)], type=Entry)
        after = msgspec.structs.replace(
            before,
            spec=cast(StreamSpec, resolved.spec),
            grown=resolved.grown,
            records=resolved.records,
        )
        self._write(_key(name), after)
        topic = self._cluster.address.topic(name)
        if topic in self.new:
            self.new[topic] = resolved
        else:
            self.changed[topic] = resolved

    def _drop(self, resolved: Resolved) -> None:
        name = cast(StreamName, resolved.name)
        entry = msgspec.json.decode(self._lines[_key(name)], type=Entry)
        self._strike(_key(name))
        topic = self._cluster.address.topic(name)
        self.changed.pop(topic, None)
        if self.new.pop(topic, None) is None and not entry.adopted:
            self.gone.append(topic)

    def adopt(self, spec: StreamSpec, there: Mapping[str, int]) -> ObjectChanged:
        """A topic that somebody else made becomes a stream."""
        name = parse_stream(spec.name)
        check_writable_by_user(name)
        topic = self._cluster.address.topic(name)
        if topic not in there:
            raise UnknownObjectError(
                f"there is no topic {topic} to be the stream {name}: a stream's topic is called "
                f"NAMESPACE.NAME. {guess(topic, there)}".rstrip()
            )
        if spec.partitions not in (None, there[topic]):
            raise UsageError(
                f"the topic {topic} has {there[topic]} partitions, not {spec.partitions}: leave "
                "partitions out"
            )
        asked = msgspec.structs.replace(spec, partitions=there[topic])
        resolved = resolve_new(self, asked, self._defaults, self._partitions_max)
        self._make(resolved, adopted=True)
        return to_event(resolved.change, f"adopt topic {topic} as stream {name}")

    def note_dropped(self, topic: str, number: str) -> None:
        """This very topic is to be removed, by whoever comes to it."""
        self._write(f"dropped/{topic}", number)

    def forget(self, topic: str) -> None:
        """The topic of a stream that was dropped has been removed."""
        self._strike(f"dropped/{topic}")

    def dropped(self) -> dict[str, str]:
        """Topics that are to be removed, each with Kafka's own id of it."""
        return {
            key.partition("/")[2]: msgspec.json.decode(value, type=str)
            for key, value in self._lines.items()
            if key.startswith("dropped/")
        }

    def stream_of(self, topic: str) -> Stream | None:
        """The stream whose events are in a topic of this name."""
        own = (name for name in self._names() if self._cluster.address.topic(name) == topic)
        name = next(own, None)
        return None if name is None else self.find(name)

    def _write(self, key: str, value: object) -> None:
        self._lines[key] = self.values[key] = msgspec.json.encode(value)

    def _strike(self, key: str) -> None:
        del self._lines[key]
        self.values[key] = None


def _key(name: StreamName) -> str:
    return f"stream/{name.namespace}.{name.stream}"
