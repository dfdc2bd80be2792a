"""Namespaces and streams in the embedded log: looking them up and changing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import apsw
import msgspec

from penstock.errors import LogError, ObjectExistsError, UnknownObjectError, UsageError
from penstock.failpoints import failpoint
from penstock.log.batch import checksum
from penstock.log.names import DEFAULT, SYSTEM, StreamName, parse_stream
from penstock.log.objects import (
    AlterStream,
    Change,
    CreateNamespace,
    CreateStream,
    Defaults,
    DropNamespace,
    DropStream,
    GrowStream,
    Stream,
    StreamSpec,
    check_alter,
    check_change,
    check_namespace_name,
    check_not_kept,
    check_partitions,
    check_spec,
    check_writable_by_user,
)
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import many, one
from penstock.records import schema as schemas
from penstock.records.event import from_microseconds

_SPEC = msgspec.json.Decoder(StreamSpec)


class Directory:
    """Streams by name, read from the file and kept while they do not change.

    For connections that only see what is committed: never inside a write transaction, whose
    streams may turn out never to have been.
    """

    def __init__(self) -> None:
        self._known: dict[int, Stream] = {}

    def find(self, connection: apsw.Connection, name: StreamName) -> Stream | None:
        row = one(connection, "stream_version", *name)
        if row is None:
            return None
        id_, version = row
        known = self._known.get(id_)
        if known is None or known.version != version:
            known = load_stream(connection, id_)
            if known is not None:
                self._known[id_] = known
        return known

    def get(self, connection: apsw.Connection, name: str) -> Stream:
        parsed = parse_stream(name)
        return _must_exist(self.find(connection, parsed), parsed)

    def all(self, connection: apsw.Connection) -> list[Stream]:
        names = many(connection, "stream_names")
        found = [self.find(connection, StreamName(*name)) for name in names]
        return [stream for stream in found if stream is not None]


def _must_exist(stream: Stream | None, name: StreamName) -> Stream:
    if stream is None:
        raise UnknownObjectError(
            f"there is no stream {name}: see `penstock stream list`, or create it with "
            f"`penstock stream create {name}`"
        )
    return stream


def stream_in(write: Write, name: StreamName) -> Stream:
    """A stream as a write transaction sees it."""
    row = write.look("stream_version", *name)
    return _must_exist(None if row is None else load_stream(write.connection, row[0]), name)


def load_stream(connection: apsw.Connection, stream_id: int) -> Stream | None:
    """The stream of an id; `None` where it has been dropped."""
    row = one(connection, "stream", stream_id)
    if row is None:
        return None
    id_, namespace, name, spec, grown, created_us, version, mark = row
    texts = [text for (text,) in many(connection, "records_of_stream", stream_id)]
    named = StreamName(namespace, name)
    if mark != _seal(id_, named, spec, grown, texts):
        raise LogError(
            f"the declaration of stream {named} is damaged: its events cannot be read safely; "
            "restore a backup"
        )
    return Stream(
        id=id_,
        name=named,
        spec=_SPEC.decode(spec),
        grown=tuple(msgspec.json.decode(grown)),
        records=tuple(schemas.decode(text) for text in texts),
        created=from_microseconds(created_us),
        version=version,
    )


def _seal(stream_id: int, name: StreamName, spec: str, grown: str, records: list[str]) -> int:
    return checksum(msgspec.json.encode([stream_id, name, spec, grown, records]))


class Changer:
    """Carries changes out in one write transaction; the first that is wrong undoes all."""

    def __init__(self, write: Write, defaults: Defaults, partitions_max: int) -> None:
        self._write = write
        self._defaults = defaults
        self._partitions_max = partitions_max

    def apply(
        self, changes: Sequence[Change], told: Callable[[Change, Stream | None], None]
    ) -> None:
        """Apply in order; `told` is called with each change and the stream before it."""
        for change in changes:
            check_change(change)
            before = self._before(change)
            self._one(change, before)
            failpoint("objects.changed")
            told(change, before)

    def _before(self, change: Change) -> Stream | None:
        match change:
            case CreateNamespace() | DropNamespace():
                return None
            case CreateStream(spec=spec):
                check_writable_by_user(parse_stream(spec.name))
                return None
            case AlterStream(spec=spec):
                name = spec.name
            case GrowStream(name=name) | DropStream(name=name):
                pass
        parsed = parse_stream(name)
        check_writable_by_user(parsed)
        return stream_in(self._write, parsed)

    def _one(self, change: Change, before: Stream | None) -> None:
        match change:
            case CreateNamespace(name=name):
                self._create_namespace(name)
            case DropNamespace(name=name):
                self._drop_namespace(name)
            case CreateStream(spec=spec):
                self.create_stream(spec)
            case AlterStream(spec=spec):
                assert before is not None  # noqa: S101  looked up above
                self._alter_stream(before, spec)
            case GrowStream(partitions=partitions):
                assert before is not None  # noqa: S101  looked up above
                self._grow_stream(before, partitions)
            case DropStream():
                assert before is not None  # noqa: S101  looked up above
                self._drop_stream(before)

    def _create_namespace(self, name: str) -> None:
        check_namespace_name(name)
        if self._write.look("has_namespace", name):
            raise ObjectExistsError(f"the namespace {name} exists already")
        self._write.run("insert_namespace", name, self._write.time_us)

    def _drop_namespace(self, name: str) -> None:
        check_not_kept(name)
        if not self._write.look("has_namespace", name):
            raise UnknownObjectError(f"there is no namespace {name}")
        streams = [row[0] for row in self._write.look_all("streams_in_namespace", name)]
        if streams:
            raise UsageError(
                f"the namespace {name} still holds {', '.join(map(str, streams))}: "
                "drop these streams first"
            )
        self._write.run("delete_namespace", name)

    def create_stream(self, spec: StreamSpec) -> None:
        if parse_stream(spec.name).namespace == SYSTEM:
            name = parse_stream(spec.name)
        else:
            name = check_spec(spec, self._partitions_max)
        if not self._write.look("has_namespace", name.namespace):
            raise UnknownObjectError(
                f"there is no namespace {name.namespace}: create it first "
                f"(`penstock namespace create {name.namespace}`)"
            )
        if self._write.look("stream_version", *name):
            raise ObjectExistsError(f"the stream {name} exists already")
        partitions = spec.partitions or (1 if spec.ids == "producer" else self._defaults.partitions)
        check_partitions(name, partitions, self._partitions_max)
        spec = msgspec.structs.replace(
            spec,
            name=str(name),
            partitions=partitions,
            replication=spec.replication or self._defaults.replication,
        )
        stream_id = self._write.insert(
            "insert_stream", *name, _json(spec), _json([partitions]), self._write.time_us
        )
        if spec.record is not None:
            self._write.run("insert_record", stream_id, 1, _json(spec.record))
        for partition in range(partitions):
            self._write.run("insert_partition", stream_id, partition)
        self._seal(stream_id)

    def _seal(self, stream_id: int) -> None:
        """Seal a stream's declaration as it is now."""
        id_, namespace, name, spec, grown, *_ = self._write.must("stream", stream_id)
        texts = [text for (text,) in self._write.look_all("records_of_stream", stream_id)]
        mark = _seal(id_, StreamName(namespace, name), spec, grown, texts)
        self._write.run("seal_stream", mark, stream_id)

    def _alter_stream(self, stream: Stream, spec: StreamSpec) -> None:
        check_spec(spec, self._partitions_max)
        check_alter(stream, spec)
        wanted = spec.partitions or stream.partitions
        spec = msgspec.structs.replace(
            spec,
            name=str(stream.name),
            partitions=wanted,
            replication=spec.replication or stream.spec.replication,
        )
        if spec.record is not None and spec.record != stream.record:
            version = len(stream.records) + 1
            self._write.run("insert_record", stream.id, version, _json(spec.record))
        grown = self._add_partitions(stream, wanted)
        self._write.run("update_stream", _json(spec), _json(grown), stream.id)
        self._seal(stream.id)

    def _grow_stream(self, stream: Stream, partitions: int) -> None:
        check_partitions(stream.name, partitions, self._partitions_max)
        spec = msgspec.structs.replace(stream.spec, partitions=partitions)
        check_spec(spec, self._partitions_max)
        if partitions <= stream.partitions:
            raise UsageError(
                f"stream {stream.name} has {stream.partitions} partitions and cannot have "
                f"{partitions}: partitions only grow"
            )
        grown = self._add_partitions(stream, partitions)
        self._write.run("update_stream", _json(spec), _json(grown), stream.id)
        self._seal(stream.id)

    def _add_partitions(self, stream: Stream, wanted: int) -> tuple[int, ...]:
        if wanted == stream.partitions:
            return stream.grown
        for partition in range(stream.partitions, wanted):
            self._write.run("insert_partition", stream.id, partition)
        return (*stream.grown, wanted)

    def _drop_stream(self, stream: Stream) -> None:
        for (blob_id,) in self._write.look_all("blobs_of_stream", stream.id):
            self._write.run("delete_blob", blob_id)
        self._write.run("delete_stream", stream.id)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def create_system_objects(write: Write, changer: Changer, specs: Sequence[StreamSpec]) -> None:
    """What every log has from its first moment on."""
    for namespace in (DEFAULT, SYSTEM):
        write.run("insert_namespace", namespace, write.time_us)
    for spec in specs:
        changer.create_stream(spec)
