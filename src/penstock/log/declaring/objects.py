"""Objects of a log (namespaces and streams) and the changes that make them.

A change is data. `Log.apply` carries a list of them out as one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.errors import BadNameError, EvolutionError, LimitError, RecordError, UsageError
from penstock.log.declaring.names import (
    DEFAULT,
    SYSTEM,
    StreamName,
    check_name,
    check_producer,
    parse_stream,
)
from penstock.log.declaring.quantities import format_duration
from penstock.records.event import partition_of
from penstock.records.evolution import check_evolution
from penstock.records.schema import Maybe, Record, Scalar, Schema, Type, schema_of

Acks = Literal["write", "majority", "all"]
Ids = Literal["log", "producer"]
Content = Literal["record", "json", "bytes"]
EntriesKind = Literal["value", "set", "list"]
ACKS_ORDER: dict[Acks, int] = {"write": 0, "majority": 1, "all": 2}


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream gets that does not say: the log's options of the same names.

    Without `replication` it is 1, and on Kafka as many as there are brokers, at most 3.
    """

    partitions: int = 1
    replication: int | None = None


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is declared.

    `record` is the schema of its data; without one it holds JSON, or bytes if `content` says
    so. `key` and `time` name the field that is the event's key and time. `retention_bytes`
    counts per partition. `replication` means something on Kafka only. `entries` says what a
    table's changelog tells: a whole value, or what was done to a set or a list; see
    `penstock.log.reading.collections`. `writer` names the app or group that a table belongs to
    (`app/NAME`, `group/STREAM/NAME`): commits of other producers are refused. `origin` is the
    file that declared it.
    """

    name: str
    record: Schema | None = None
    content: Content = "json"
    key: str | None = None
    time: str | None = None
    partitions: int | None = None
    replication: int | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    ids: Ids = "log"
    acks: Acks = "majority"
    table: bool = False
    entries: EntriesKind = "value"
    writer: str | None = None
    origin: str = ""

    def admits(self, producer: str) -> bool:
        """Whether a producer may write to it."""
        return self.writer is None or f"{producer}/".startswith(f"{self.writer}/")


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as it is: its declaration, and what became of it.

    `grown` lists the numbers of partitions it has had, the present one last; `records` are
    the schema versions, the present one last. `id` is never reused; `version` changes
    whenever the stream does. `is_adopted` is one that others made, and may write to.
    """

    id: int
    name: StreamName
    spec: StreamSpec
    grown: tuple[int, ...]
    records: tuple[Schema, ...]
    created: dt.datetime
    version: int
    is_adopted: bool = False

    @property
    def partitions(self) -> int:
        return self.grown[-1]

    @property
    def keeps_keys_together(self) -> bool:
        """Whether all events of a key are in one partition: others may place them elsewhere."""
        return self.partitions == 1 or (len(self.grown) == 1 and not self.is_adopted)

    def homes(self, key: bytes) -> set[int]:
        """The partitions in which events of a key may be."""
        if self.is_adopted:
            return set(range(self.partitions))
        return {partition_of(key, count) for count in self.grown}

    @property
    def record(self) -> Schema | None:
        return self.records[-1] if self.records else None

    @property
    def type(self) -> str:
        """The type of its events, unless they say another."""
        return self.record.name if self.record else str(self.name)


def declare(
    name: str,
    record: type[Record] | None = None,
    *,
    key: str | None = None,
    time: str | None = None,
    content: Literal["json", "bytes"] | None = None,
    **settings: object,
) -> StreamSpec:
    """A stream's declaration from a record class: `declare("orders", Order, key="user")`.

    Takes every setting of `StreamSpec` by name.
    """
    if record is not None and not (isinstance(record, type) and issubclass(record, Record)):
        raise RecordError(
            f"{record!r} is not a record class: declare one with class Order(penstock.Record)"
        )
    values = {
        "name": name,
        "record": schema_of(record) if record else None,
        "content": "record" if record else content or "json",
        "key": key,
        "time": time,
        **settings,
    }
    try:
        return msgspec.convert(values, type=StreamSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"the stream {name} cannot be declared: {error}") from None


class CreateNamespace(msgspec.Struct, frozen=True, tag="create namespace"):
    """Make a namespace."""

    name: str


class DropNamespace(msgspec.Struct, frozen=True, tag="drop namespace"):
    """Remove a namespace that holds no streams."""

    name: str


class CreateStream(msgspec.Struct, frozen=True, tag="create stream"):
    """Make a stream."""

    spec: StreamSpec


class AlterStream(msgspec.Struct, frozen=True, tag="alter stream"):
    """Make the stream what `spec` says, where that is allowed."""

    spec: StreamSpec


class GrowStream(msgspec.Struct, frozen=True, tag="grow stream"):
    """Give a stream more partitions."""

    name: str
    partitions: int


class DropStream(msgspec.Struct, frozen=True, tag="drop stream"):
    """Remove a stream and all its events."""

    name: str


Change = CreateNamespace | DropNamespace | CreateStream | AlterStream | GrowStream | DropStream


def check_change(change: object) -> None:
    """Raise `UsageError` for something that is not a change, such as a bare declaration."""
    if not isinstance(change, Change):
        raise UsageError(
            f"apply takes a list of changes, such as CreateStream(declare(...)), and got "
            f"{type(change).__name__}"
        )


def check_namespace_name(name: str) -> None:
    check_name(name, "namespace")


def check_not_kept(namespace: str) -> None:
    if namespace in (DEFAULT, SYSTEM):
        raise UsageError(f"the namespace {namespace} always exists and cannot be removed")


def check_writable_by_user(name: StreamName) -> None:
    if name.namespace == SYSTEM:
        raise BadNameError(f"{name} is reserved for the system: choose another namespace")


def check_spec(spec: StreamSpec, partitions_max: int) -> StreamName:
    """Raise the `UsageError` that says what is wrong with a declaration."""
    name = parse_stream(spec.name)
    if (spec.record is not None) != (spec.content == "record"):
        raise UsageError(
            f"stream {name}: content 'record' requires a record, and a record requires it"
        )
    if spec.partitions is not None:
        check_partitions(name, spec.partitions, partitions_max)
    if spec.ids == "producer" and spec.partitions not in (None, 1):
        raise UsageError(
            f"stream {name}: ids='producer' needs one partition, since its ids are compared "
            f"in one place; it asks for {spec.partitions}"
        )
    if spec.record is not None:
        _check_record(spec.record)
    for setting in ("retention_ms", "retention_bytes", "replication"):
        value = getattr(spec, setting)
        if value is not None and value <= 0:
            raise UsageError(f"stream {name}: {setting} is {value}; it must be positive")
    _check_key(spec, name)
    _check_time(spec, name)
    if spec.entries != "value" and not (spec.table and _tells_actions(spec.record)):
        raise UsageError(
            f"stream {name}: entries={spec.entries!r} needs a table whose record has the fields "
            "action, value and values: declare it with penstock.app, or leave entries out"
        )
    _check_writer(spec, name)
    return name


def _check_writer(spec: StreamSpec, name: StreamName) -> None:
    if spec.writer is None:
        return
    if not spec.table:
        raise UsageError(f"stream {name}: only a table has a writer; leave writer out")
    check_producer(spec.writer)


def _tells_actions(record: Schema | None) -> bool:
    names = [] if record is None else [field.name for field in record.fields]
    return names[:3] == ["action", "value", "values"] and names[3:] in ([], ["index"])


def _check_record(record: Schema) -> None:
    if not record.name.isidentifier():
        raise RecordError(f"{record.name!r} is not a valid record name: use an identifier")
    names = [field.name for field in record.fields]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise RecordError(f"{record.name} has the field {double} twice: leave one")


def check_partitions(name: StreamName, partitions: int, partitions_max: int) -> None:
    if not 1 <= partitions <= partitions_max:
        raise LimitError(
            f"stream {name}: {partitions} partitions asked for; 1 to {partitions_max} are allowed "
            "(partitions_max)"
        )


def _check_key(spec: StreamSpec, name: StreamName) -> None:
    if spec.key is None:
        return
    if not spec.key:
        raise UsageError(f"stream {name}: the key's field is empty; leave key out instead")
    if spec.content == "bytes":
        raise UsageError(f"stream {name}: bytes have no fields, so {spec.key!r} cannot be the key")
    type_ = _field_type(spec, name, spec.key, "key")
    if type_ is not None and not (
        isinstance(type_, Scalar) and type_.kind in ("str", "int", "bytes", "uuid")
    ):
        raise RecordError(
            f"stream {name}: the key {spec.key} is {type_}; a key is str, int, bytes or UUID"
        )


def _check_time(spec: StreamSpec, name: StreamName) -> None:
    if spec.time is None:
        return
    if spec.record is None:
        raise UsageError(f"stream {name}: time={spec.time!r} needs a record with that field")
    type_ = _field_type(spec, name, spec.time, "time")
    if not (isinstance(type_, Scalar) and type_.kind == "datetime"):
        raise RecordError(f"stream {name}: the time {spec.time} is {type_}; it must be a datetime")


def _field_type(spec: StreamSpec, name: StreamName, wanted: str, role: str) -> Type | None:
    if spec.record is None:
        return None
    field = spec.record.field(wanted)
    if field is None:
        names = ", ".join(f.name for f in spec.record.fields)
        raise RecordError(
            f"stream {name}: {spec.record.name} has no field {wanted!r} to be the {role}; "
            f"it has {names}"
        )
    return field.type.of if isinstance(field.type, Maybe) else field.type


def check_alter(stream: Stream, spec: StreamSpec) -> None:
    """Raise unless the stream may become what `spec` says; partitions may only grow."""
    fixed = [
        s for s in ("content", "key", "ids", "table", "entries") if _differs(stream.spec, spec, s)
    ]
    if fixed:
        old, new = getattr(stream.spec, fixed[0]), getattr(spec, fixed[0])
        raise EvolutionError(
            f"stream {stream.name}: {fixed[0]} cannot change from {old!r} to {new!r}: the "
            "meaning of stored events would change; create a new stream and copy the events over"
        )
    if spec.partitions is not None and spec.partitions < stream.partitions:
        raise EvolutionError(
            f"stream {stream.name} has {stream.partitions} partitions and cannot have "
            f"{spec.partitions}: partitions only grow"
        )
    if spec.record is not None and stream.record is not None:
        check_evolution(stream.record, spec.record)


def _differs(old: StreamSpec, new: StreamSpec, setting: str) -> bool:
    return bool(getattr(old, setting) != getattr(new, setting))


def is_destructive(change: Change, before: Stream | None) -> bool:
    """Whether a change removes stored events, now or at the next retention."""
    if isinstance(change, DropStream | DropNamespace):
        return True
    if not isinstance(change, AlterStream) or before is None:
        return False
    return any(
        _less(getattr(change.spec, setting), getattr(before.spec, setting))
        for setting in ("retention_ms", "retention_bytes")
    )


def _less(new: int | None, old: int | None) -> bool:
    return new is not None and (old is None or new < old)


def describe_change(change: Change, before: Stream | None = None) -> str:
    """A change in words, as the plan shows it."""
    match change:
        case CreateNamespace(name=name):
            return f"create namespace {name}"
        case DropNamespace(name=name):
            return f"drop namespace {name}"
        case CreateStream(spec=spec):
            return f"create stream {spec.name} ({_about(spec)})"
        case GrowStream(name=name, partitions=partitions):
            had = f" from {before.partitions}" if before else ""
            return f"grow stream {name}{had} to {partitions} partitions"
        case DropStream(name=name):
            return f"drop stream {name} and all its events"
        case AlterStream(spec=spec):
            return f"alter stream {spec.name}: {_differences(spec, before)}"


def _about(spec: StreamSpec) -> str:
    found = [str(spec.record) if spec.record else spec.content]
    found += [f"key {spec.key}"] if spec.key else []
    found += [f"{spec.partitions} partitions"] if spec.partitions not in (None, 1) else []
    found += ["ids from the producer"] if spec.ids == "producer" else []
    found += ["table"] if spec.table else []
    found += [f"written by {spec.writer}"] if spec.writer else []
    return ", ".join(found)


def _differences(spec: StreamSpec, before: Stream | None) -> str:
    if before is None:
        return "as declared"
    old = before.spec
    found = []
    for setting in (
        "acks",
        "retention_ms",
        "retention_bytes",
        "replication",
        "time",
        "writer",
        "origin",
    ):
        if _differs(old, spec, setting):
            found.append(f"{_words(setting, old)} → {_words(setting, spec).partition(' ')[2]}")
    if spec.record != before.record and spec.record and before.record:
        added = [str(f.name) for f in spec.record.fields if before.record.field(f.name) is None]
        found.append(f"record version {len(before.records) + 1} (adds {', '.join(added)})")
    return "; ".join(found) or "nothing"


def _words(setting: str, spec: StreamSpec) -> str:
    """A setting as people write it: retention 7 days."""
    value = getattr(spec, setting)
    if setting == "retention_ms":
        return f"retention {format_duration(value)}"
    return f"{setting} {'none' if value in (None, '') else value}"


class ObjectChanged(Record):
    """The record of `_system.objects`: one change of one object."""

    action: str
    object: str
    description: str
    change: str


def to_event(change: Change, description: str) -> ObjectChanged:
    text = msgspec.json.encode(change).decode()
    name = change.spec.name if isinstance(change, CreateStream | AlterStream) else change.name
    kind = change.__struct_config__.tag
    return ObjectChanged(action=str(kind), object=name, description=description, change=text)


class Metric(Record):
    """The record of `_system.metrics`: one measured value of one thing."""

    name: str
    value: float
    labels: dict[str, str]


def system_streams() -> Sequence[StreamSpec]:
    """The streams that every log has."""
    week_ms = 7 * 24 * 3600 * 1000
    return (
        declare("_system.objects", ObjectChanged, key="object"),
        declare("_system.metrics", Metric, key="name", retention_ms=week_ms, acks="write"),
    )
