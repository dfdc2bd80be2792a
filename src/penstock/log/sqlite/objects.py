"""Namespaces and streams in the embedded log: looking them up and changing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import apsw
import msgspec

from penstock.errors import LogError
from penstock.failpoints import failpoint
from penstock.log.batch import checksum
from penstock.log.declaring.changes import Resolved, must_exist, resolve, resolve_new
from penstock.log.declaring.names import DEFAULT, SYSTEM, StreamName, parse_stream
from penstock.log.declaring.objects import (
    Change,
    CreateNamespace,
    CreateStream,
    Defaults,
    DropNamespace,
    DropStream,
    Stream,
    StreamSpec,
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
        return must_exist(self.find(connection, parsed), parsed)

    def all(self, connection: apsw.Connection) -> list[Stream]:
        names = many(connection, "stream_names")
        found = [self.find(connection, StreamName(*name)) for name in names]
        return [stream for stream in found if stream is not None]


def stream_in(write: Write, name: StreamName) -> Stream:
    """A stream as a write transaction sees it."""
    row = write.look("stream_version", *name)
    return must_exist(None if row is None else load_stream(write.connection, row[0]), name)


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

    # What is there, for `resolve`

    def has_namespace(self, name: str) -> bool:
        return self._write.look("has_namespace", name) is not None

    def find(self, name: StreamName) -> Stream | None:
        row = self._write.look("stream_version", *name)
        return None if row is None else load_stream(self._write.connection, row[0])

    def names_in(self, namespace: str) -> list[str]:
        return [str(row[0]) for row in self._write.look_all("streams_in_namespace", namespace)]

    # Changes

    def apply(
        self, changes: Sequence[Change], told: Callable[[Change, Stream | None], None]
    ) -> None:
        """Apply in order; `told` is called with each change and the stream before it."""
        for change in changes:
            resolved = resolve(self, change, self._defaults, self._partitions_max)
            self._carry_out(resolved)
            failpoint("objects.changed")
            told(change, resolved.before)

    def _carry_out(self, resolved: Resolved) -> None:
        match resolved:
            case Resolved(change=CreateNamespace(name=namespace)):
                self._write.run("insert_namespace", namespace, self._write.time_us)
            case Resolved(change=DropNamespace(name=namespace)):
                self._write.run("delete_namespace", namespace)
            case Resolved(change=CreateStream(), name=StreamName() as name):
                self._create_stream(resolved, name)
            case Resolved(change=DropStream(), before=Stream() as before):
                self._drop_stream(before)
            case Resolved(before=Stream() as before):
                self._change_stream(resolved, before)

    def create_system_stream(self, spec: StreamSpec) -> None:
        self._carry_out(resolve_new(self, spec, self._defaults, self._partitions_max))

    def _create_stream(self, resolved: Resolved, name: StreamName) -> None:
        stream_id = self._write.insert(
            "insert_stream",
            *name,
            _json(resolved.spec),
            _json(resolved.grown),
            self._write.time_us,
        )
        for record in resolved.records:
            self._write.run("insert_record", stream_id, 1, _json(record))
        for partition in range(resolved.partitions):
            self._write.run("insert_partition", stream_id, partition)
        self._seal(stream_id)

    def _change_stream(self, resolved: Resolved, before: Stream) -> None:
        for record in resolved.records[len(before.records) :]:
            self._write.run("insert_record", before.id, len(before.records) + 1, _json(record))
        for partition in range(before.partitions, resolved.partitions):
            self._write.run("insert_partition", before.id, partition)
        self._write.run("update_stream", _json(resolved.spec), _json(resolved.grown), before.id)
        self._seal(before.id)

    def _seal(self, stream_id: int) -> None:
        """Seal a stream's declaration as it is now."""
        id_, namespace, name, spec, grown, *_ = self._write.must("stream", stream_id)
        texts = [text for (text,) in self._write.look_all("records_of_stream", stream_id)]
        mark = _seal(id_, StreamName(namespace, name), spec, grown, texts)
        self._write.run("seal_stream", mark, stream_id)

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
        changer.create_system_stream(spec)
