"""Namespaces and streams on Kafka: a compacted topic says what is there, topics hold the events.

The catalogue is the truth. Topics are made before a stream is written into it and removed after
it is struck out, so a process that dies in between leaves at most a topic that nobody reads;
what is still to be removed stands in the catalogue too.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from penstock.errors import (
    LogUnreachableError,
    ObjectExistsError,
    UnknownObjectError,
    UsageError,
)
from penstock.failpoints import failpoint
from penstock.log.changes import Resolved, must_exist, resolve, resolve_new
from penstock.log.kafka.client import Cluster, code_of
from penstock.log.kafka.session import TakenError
from penstock.log.kafka.topics import topic_settings
from penstock.log.kafka.view import View
from penstock.log.names import DEFAULT, SYSTEM, StreamName, parse_stream
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
from penstock.records.event import from_microseconds
from penstock.records.schema import Schema

TOPIC = "_penstock.catalogue"
SESSION = "catalogue"
FRESH_S = 0.25
GLANCE_S = 2.0
"""How long a look at the catalogue lasts; changes made here are seen at once."""


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
        self._lock = threading.Lock()
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
        names = [parse_stream(k[7:]) for k in sorted(self._lines) if k.startswith("stream/")]
        return [name.stream for name in names if name.namespace == namespace]

    # Changes

    @property
    def is_empty(self) -> bool:
        return "log" not in self._lines

    def populate(self, specs: Sequence[StreamSpec]) -> None:
        """What every log has from its first moment on."""
        self._write("log", About(id=secrets.token_hex(8)))
        for namespace in (DEFAULT, SYSTEM):
            self._write(f"namespace/{namespace}", {"created_us": time.time_ns() // 1000})
        for spec in specs:
            self._make(resolve_new(self, spec, self._defaults, self._partitions_max))

    def change(self, change: Change) -> Stream | None:
        """Take a change in; returns the stream before it. Raises what is wrong with it."""
        resolved = resolve(self, change, self._defaults, self._partitions_max)
        match change:
            case CreateNamespace(name=name):
                self._write(f"namespace/{name}", {"created_us": time.time_ns() // 1000})
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
            created_us=time.time_ns() // 1000,
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
                "NAMESPACE.NAME"
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
        names = [parse_stream(k[7:]) for k in self._lines if k.startswith("stream/")]
        own = (name for name in names if self._cluster.address.topic(name) == topic)
        name = next(own, None)
        return None if name is None else self.find(name)

    def _write(self, key: str, value: object) -> None:
        self._lines[key] = self.values[key] = msgspec.json.encode(value)

    def _strike(self, key: str) -> None:
        del self._lines[key]
        self.values[key] = None


def _key(name: StreamName) -> str:
    return f"stream/{name.namespace}.{name.stream}"


class Topics:
    """Makes, changes and removes the topics of streams."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def make_own(self, settings: Mapping[str, tuple[int, Mapping[str, str]]], brokers: int) -> None:
        """The log's own topics, where they are not there yet."""
        copies = min(3, brokers)
        new = [
            NewTopic(
                name, partitions, copies,
                config={"min.insync.replicas": str(copies // 2 + 1), **config},
            )
            for name, (partitions, config) in settings.items()
        ]  # fmt: skip
        for name, future in self._cluster.admin.create_topics(new).items():
            try:
                future.result(self._cluster.timeout_s)
            except KafkaException as error:
                if code_of(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self._cluster.translated(error, f"making the topic {name}") from error

    def make(self, wanted: Mapping[str, Resolved]) -> None:
        """Topics of new streams. One that is there already must be empty and as wanted."""
        if not wanted:
            return
        there = self._cluster.topics()
        new = []
        for topic, resolved in wanted.items():
            spec = cast(StreamSpec, resolved.spec)
            if topic in there:
                self._check_unused(topic, there[topic], resolved)
                self._configure(topic, topic_settings(spec))
                continue
            new.append(
                NewTopic(
                    topic, resolved.partitions, spec.replication or 1, config=topic_settings(spec)
                )
            )
        if new:
            self._create(new, validate_only=True)
            self._create(new, validate_only=False)
            failpoint("objects.changed")

    def _create(self, new: list[NewTopic], *, validate_only: bool) -> None:
        asked = self._cluster.admin.create_topics(new, validate_only=validate_only)
        for topic, future in asked.items():
            try:
                future.result(self._cluster.timeout_s)
            except KafkaException as error:
                if code_of(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                    raise TakenError from error  # somebody else was faster: look again
                raise self._cluster.translated(error, f"making the topic {topic}") from error

    def _check_unused(self, topic: str, partitions: int, resolved: Resolved) -> None:
        """Whether a topic of this name is what a process left that died while it made one."""
        if partitions != resolved.partitions:
            raise ObjectExistsError(
                f"the topic {topic} exists already, with {partitions} partitions instead of "
                f"{resolved.partitions}: adopt it (`penstock stream adopt {resolved.name}`), or "
                "choose another name"
            )
        places = [(topic, p) for p in range(partitions)]
        if any(self._cluster.ends(places, committed=False).values()):
            raise ObjectExistsError(
                f"the topic {topic} exists already and holds messages: adopt it "
                f"(`penstock stream adopt {resolved.name}`), or choose another name"
            )

    def change(self, wanted: Mapping[str, Resolved]) -> None:
        """Bring topics to what their streams are now; refuses before it changes anything."""
        for resolved in wanted.values():
            spec, before = cast(StreamSpec, resolved.spec), cast(Stream, resolved.before)
            if spec.replication != before.spec.replication:
                raise UsageError(
                    f"stream {before.name}: replication cannot change from "
                    f"{before.spec.replication} to {spec.replication} here: move its replicas with "
                    "Kafka's own tools (kafka-reassign-partitions)"
                )
        for topic, resolved in wanted.items():
            spec, before = cast(StreamSpec, resolved.spec), cast(Stream, resolved.before)
            there = self._cluster.topics().get(topic, 0)
            if resolved.partitions > there:
                self._grow(topic, resolved.partitions)
            if topic_settings(spec) != topic_settings(before.spec):
                self._configure(topic, topic_settings(spec))

    def _grow(self, topic: str, partitions: int) -> None:
        new = [NewPartitions(topic, partitions)]
        self._cluster.done(
            f"adding partitions to {topic}", self._cluster.admin.create_partitions(new)
        )

    def _configure(self, topic: str, settings: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self._cluster.done(
            f"changing the topic {topic}", self._cluster.admin.incremental_alter_configs([resource])
        )

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Kafka's own ids of topics: another one after a topic was removed and made again."""
        found: dict[str, str] = {}
        if not topics:
            return found
        for topic, future in self._cluster.admin.describe_topics(
            TopicCollection(list(topics))
        ).items():
            try:
                found[topic] = str(future.result(self._cluster.timeout_s).topic_id)
            except KafkaException as error:
                if code_of(error) != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise self._cluster.translated(error, f"looking at {topic}") from error
        return found

    def settle(self, draft: Draft) -> None:
        """Remove what was dropped, and make anew what was dropped and created as one change."""
        dropped = draft.dropped()
        there = self.ids(list(dropped))
        for topic, number in dropped.items():
            if there.get(topic) == number:
                self._remove(topic)
            stream = draft.stream_of(topic)
            if stream is not None:
                change = CreateStream(stream.spec)
                wanted = Resolved(change, stream.name, None, stream.spec, stream.grown)
                self.make({topic: wanted})
            draft.forget(topic)

    def _remove(self, topic: str) -> None:
        try:
            self._cluster.admin.delete_topics([topic])[topic].result(self._cluster.timeout_s)
        except KafkaException as error:
            if code_of(error) != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._cluster.translated(error, f"removing the topic {topic}") from error
