"""Namespaces and streams on Kafka: a compacted topic says what is there, topics hold the events.

The catalogue is the truth, and says in which topic each stream is. A topic holds one stream, from
the time it is made until it is removed: a stream that is dropped and created anew gets another
topic, so what belongs to the one can never be taken for the other's.

Topics are made before a stream is written into the catalogue, and configured and removed after the
catalogue says so. What is still to be done stands in the catalogue too, for whoever comes next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from penstock.errors import (
    LogUnreachableError,
    UnknownObjectError,
    UsageError,
)
from penstock.log.declaring.changes import Resolved, must_exist, resolve, resolve_new
from penstock.log.declaring.names import DEFAULT, SYSTEM, StreamName, guess, parse_stream
from penstock.log.declaring.objects import (
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
from penstock.log.kafka.client import Address, Cluster
from penstock.log.kafka.view import View
from penstock.records.event import from_microseconds, now_us
from penstock.records.schema import Schema

FORMAT = 2
"""What this version writes; a log is raised to it when it has what older versions misread."""
FORMATS = (1, 2)
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


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue says of a stream. `adopted` is a topic that somebody else made.

    Without a `topic`, it is the one that has the stream's name.
    """

    id: int
    spec: StreamSpec
    grown: tuple[int, ...]
    records: tuple[Schema, ...]
    created_us: int
    adopted: bool = False
    topic: str = ""


class KafkaStream(Stream, frozen=True, kw_only=True):
    """A stream, and the topic that its events are in."""

    topic: str


class Removal(msgspec.Struct, frozen=True, tag="remove"):
    """A topic is to be removed: the one that has this id, for the name may be somebody else's."""

    topic_id: str
    since_us: int


class Configuration(msgspec.Struct, frozen=True, tag="configure"):
    """These settings of a topic are to become what its stream says."""

    settings: tuple[str, ...]
    since_us: int


Duty = Removal | Configuration
"""What is to be done to a topic because the catalogue has changed."""
CatalogueLines = dict[str, bytes | None]
"""Lines of the catalogue by key; `None` strikes one out."""


class KafkaCatalogue:
    """What is there, as of a moment ago. For any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.topic = cluster.address.own(TOPIC)
        self._cluster = cluster
        self._view = View(cluster, self.topic, self._apply)
        self._lines: dict[str, tuple[bytes, int]] = {}
        self._streams: dict[StreamName, KafkaStream] = {}
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
                self._streams[name] = _stream(self._cluster.address, name, value, offset)

    def look(self) -> None:
        """See what is there now."""
        self._view.catch_up(0)
        self._looked = time.monotonic()

    def look_again(self, streams: Iterable[KafkaStream]) -> list[KafkaStream]:
        """Which of these streams have changed since they were looked up, or are gone.

        Does not wait for changes that are under way: `apply` returns when they can be seen.
        """
        self._view.catch_up(0, wait=False)
        self._looked = time.monotonic()
        with self._view.lock:
            return [stream for stream in streams if self._streams.get(stream.name) is not stream]

    def check_there(self, *streams: KafkaStream) -> None:
        """Raise `StreamGoneError` unless these very streams are still there."""
        self.look()
        for stream in streams:
            with self._view.lock:
                found = self._streams.get(stream.name)
            if found is None:
                raise StreamGoneError(f"stream {stream.name} was dropped while it was in use")
            if found.id != stream.id:
                raise StreamGoneError(
                    f"stream {stream.name} was dropped and created again while it was in use: read "
                    "the new one from its beginning"
                )

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

    def streams(self) -> list[KafkaStream]:
        self._glance()
        with self._view.lock:
            return [self._streams[name] for name in sorted(self._streams)]

    def stream(self, text: str) -> KafkaStream:
        name = parse_stream(text)
        self._glance()
        with self._view.lock:
            found = self._streams.get(name)
        if found is None:
            self.look()
            with self._view.lock:
                found = self._streams.get(name)
        must_exist(found, name)
        return cast(KafkaStream, found)

    def lines(self) -> dict[str, bytes]:
        with self._view.lock:
            return {key: value for key, (value, _) in self._lines.items()}


class StreamGoneError(UnknownObjectError):
    """A stream that was in use is not there any more, or is another one of its name."""


def _stream(address: Address, name: StreamName, value: bytes, offset: int) -> KafkaStream:
    entry = msgspec.json.decode(value, type=CatalogueEntry)
    return KafkaStream(
        id=entry.id,
        name=name,
        spec=entry.spec,
        grown=entry.grown,
        records=entry.records,
        created=from_microseconds(entry.created_us),
        version=offset,
        is_adopted=entry.adopted,
        topic=entry.topic or address.topic(name),
    )


class Draft:
    """Changes worked out on a copy of the catalogue: what to write, and which topics are touched.

    `there` are the topics of the cluster with their numbers of partitions.
    """

    def __init__(
        self,
        lines: Mapping[str, bytes],
        address: Address,
        defaults: Defaults,
        partitions_max: int,
        there: Mapping[str, int],
    ) -> None:
        self._lines: dict[str, bytes] = dict(lines)
        self._address = address
        self._defaults = defaults
        self._partitions_max = partitions_max
        self.there = there
        self.values: CatalogueLines = {}
        self.new: dict[str, Resolved] = {}
        self.changed: dict[str, Resolved] = {}
        self.gone: list[str] = []

    # What is there, for `resolve`

    def has_namespace(self, name: str) -> bool:
        return f"namespace/{name}" in self._lines

    def find(self, name: StreamName) -> KafkaStream | None:
        packed = self._lines.get(_key(name))
        return None if packed is None else _stream(self._address, name, packed, 0)

    def names_in(self, namespace: str) -> list[str]:
        return [name.stream for name in self._names() if name.namespace == namespace]

    def _names(self) -> list[StreamName]:
        keys = [key for key in sorted(self._lines) if key.startswith("stream/")]
        return [parse_stream(key.removeprefix("stream/")) for key in keys]

    def streams(self) -> list[KafkaStream]:
        return [stream for name in self._names() if (stream := self.find(name)) is not None]

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
        plain = self._address.topic(name)
        about = msgspec.json.decode(self._lines["log"], type=About)
        number, topic = about.next_stream, plain
        if not adopted:
            number, topic = self._free_topic(plain, number, resolved.partitions)
        moved = topic != plain
        self._write(
            "log",
            msgspec.structs.replace(
                about, next_stream=number + 1, format=FORMAT if moved else about.format
            ),
        )
        entry = CatalogueEntry(
            id=number,
            spec=cast(StreamSpec, resolved.spec),
            grown=resolved.grown,
            records=resolved.records,
            created_us=now_us(),
            adopted=adopted,
            topic=topic if moved else "",
        )
        self._write(_key(name), entry)
        if not adopted:
            self.new[topic] = resolved

    def _free_topic(self, plain: str, number: int, partitions: int) -> tuple[int, str]:
        """An id for a stream, and a topic that holds no other: of its own name, if that is free.

        It is not free while a topic of this name is to be removed, and never again if somebody
        else than the one that struck the stream out had to remove it: theirs may be frozen in
        the middle of it, and goes by the name.
        """
        taken = (f"unsettled/{plain}", f"dropped/{plain}", f"spent/{plain}")
        if plain not in self.gone and not any(key in self._lines for key in taken):
            return number, plain
        # One may be left by a process that died before it wrote the stream down.
        while self.there.get(f"{plain}._{number}", partitions) != partitions:
            number += 1
        return number, f"{plain}._{number}"

    def _change(self, resolved: Resolved) -> None:
        name = cast(StreamName, resolved.name)
        before = msgspec.json.decode(self._lines[_key(name)], type=CatalogueEntry)
        after = msgspec.structs.replace(
            before,
            spec=cast(StreamSpec, resolved.spec),
            grown=resolved.grown,
            records=resolved.records,
        )
        self._write(_key(name), after)
        topic = before.topic or self._address.topic(name)
        if topic in self.new:
            self.new[topic] = resolved
        else:
            first = self.changed.get(topic, resolved)  # as it was before all these changes
            self.changed[topic] = msgspec.structs.replace(resolved, before=first.before)

    def _drop(self, resolved: Resolved) -> None:
        name = cast(StreamName, resolved.name)
        entry = msgspec.json.decode(self._lines[_key(name)], type=CatalogueEntry)
        self._strike(_key(name))
        topic = entry.topic or self._address.topic(name)
        self.changed.pop(topic, None)
        if self.new.pop(topic, None) is None and not entry.adopted:
            self.gone.append(topic)

    def adopt(self, spec: StreamSpec) -> ObjectChanged:
        """A topic that somebody else made becomes a stream."""
        name = parse_stream(spec.name)
        check_writable_by_user(name)
        topic = self._address.topic(name)
        if topic not in self.there or isinstance(self.duties().get(topic), Removal):
            ours = [other for other in self.there if other.startswith(self._address.own(""))]
            raise UnknownObjectError(
                f"there is no topic {topic} to be the stream {name}: a stream's topic is called "
                f"NAMESPACE.NAME. {guess(topic, ours)}".rstrip()
            )
        if spec.partitions not in (None, self.there[topic]):
            raise UsageError(
                f"the topic {topic} has {self.there[topic]} partitions, not {spec.partitions}: "
                "leave partitions out"
            )
        asked = msgspec.structs.replace(spec, partitions=self.there[topic])
        resolved = resolve_new(self, asked, self._defaults, self._partitions_max)
        self._make(resolved, adopted=True)
        return to_event(resolved.change, f"adopt topic {topic} as stream {name}")

    # What is to be done to topics

    def duties(self) -> dict[str, Duty]:
        """What is still to be done, by topic."""
        found: dict[str, Duty] = {}
        for key, value in self._lines.items():
            kind, _, topic = key.partition("/")
            if kind == "dropped":  # how it was written once
                found[topic] = Removal(msgspec.json.decode(value, type=str), 0)
            elif kind == "unsettled":
                found[topic] = msgspec.json.decode(value, type=Duty)
        return found

    def note(self, topic: str, duty: Duty) -> None:
        """This is to be done, by this process or by whoever comes next."""
        self._write(f"unsettled/{topic}", duty)

    def discharge(self, topic: str, *, spend: bool) -> None:
        """It is done; `spend` says that the name must not be used again."""
        for key in (f"unsettled/{topic}", f"dropped/{topic}"):
            if key in self._lines:
                self._strike(key)
        if spend:
            self._write(f"spent/{topic}", now_us())

    def stream_in(self, topic: str) -> KafkaStream | None:
        """The stream whose events are in a topic."""
        return next((stream for stream in self.streams() if stream.topic == topic), None)

    def _write(self, key: str, value: object) -> None:
        self._lines[key] = self.values[key] = msgspec.json.encode(value)

    def _strike(self, key: str) -> None:
        del self._lines[key]
        self.values[key] = None


def _key(name: StreamName) -> str:
    return f"stream/{name.namespace}.{name.stream}"
