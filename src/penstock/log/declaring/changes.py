"""Whether a change of objects is allowed, and its result: the same for every engine.

An engine looks things up and stores the result; it makes none of the decisions.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.errors import ObjectExistsError, UnknownObjectError, UsageError
from penstock.log.declaring.names import SYSTEM, StreamName, parse_stream
from penstock.log.declaring.objects import (
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
from penstock.records.schema import Schema


class Objects(Protocol):
    """The objects that exist before the change, including earlier changes of the same list."""

    def has_namespace(self, name: str) -> bool: ...

    def find(self, name: StreamName) -> Stream | None: ...

    def names_in(self, namespace: str) -> list[str]: ...


class Resolved(msgspec.Struct, frozen=True):
    """A change that is allowed: the stream before it, and its declaration after it."""

    change: Change
    name: StreamName | None = None
    before: Stream | None = None
    spec: StreamSpec | None = None
    grown: tuple[int, ...] = ()
    records: tuple[Schema, ...] = ()

    @property
    def partitions(self) -> int:
        return self.grown[-1]


def resolve(objects: Objects, change: Change, defaults: Defaults, partitions_max: int) -> Resolved:
    """Check a change. Raises a `UsageError` if it is not allowed."""
    check_change(change)
    match change:
        case CreateNamespace(name=namespace):
            check_namespace_name(namespace)
            if objects.has_namespace(namespace):
                raise ObjectExistsError(f"namespace {namespace} already exists")
            return Resolved(change)
        case DropNamespace(name=namespace):
            _check_droppable(objects, namespace)
            return Resolved(change)
        case CreateStream(spec=spec):
            check_writable_by_user(parse_stream(spec.name))
            return resolve_new(objects, spec, defaults, partitions_max)
        case AlterStream(spec=spec):
            return _resolve_alter(change, _existing(objects, spec.name), spec, partitions_max)
        case GrowStream(name=name, partitions=partitions):
            return _grown(change, _existing(objects, name), partitions, partitions_max)
        case DropStream(name=name):
            before = _existing(objects, name)
            return Resolved(change, before.name, before)


def _check_droppable(objects: Objects, namespace: str) -> None:
    check_not_kept(namespace)
    if not objects.has_namespace(namespace):
        raise UnknownObjectError(f"there is no namespace {namespace}")
    if names := objects.names_in(namespace):
        raise UsageError(
            f"namespace {namespace} still contains {', '.join(names)}: drop these streams first"
        )


def _existing(objects: Objects, text: str) -> Stream:
    name = parse_stream(text)
    check_writable_by_user(name)
    return must_exist(objects.find(name), name)


def must_exist(stream: Stream | None, name: StreamName) -> Stream:
    if stream is None:
        raise UnknownObjectError(
            f"there is no stream {name}: see `penstock stream list`, or create it with "
            f"`penstock stream create {name}`"
        )
    return stream


def resolve_new(
    objects: Objects, spec: StreamSpec, defaults: Defaults, partitions_max: int
) -> Resolved:
    """Check the creation of a stream, including one of the system's own."""
    name = parse_stream(spec.name)
    if name.namespace != SYSTEM:
        check_spec(spec, partitions_max)
    if not objects.has_namespace(name.namespace):
        raise UnknownObjectError(
            f"there is no namespace {name.namespace}: create it first "
            f"(`penstock namespace create {name.namespace}`)"
        )
    if objects.find(name) is not None:
        raise ObjectExistsError(f"stream {name} already exists")
    partitions = spec.partitions or (1 if spec.ids == "producer" else defaults.partitions)
    check_partitions(name, partitions, partitions_max)
    made = msgspec.structs.replace(
        spec,
        name=str(name),
        partitions=partitions,
        replication=spec.replication or defaults.replication or 1,
    )
    records = () if spec.record is None else (spec.record,)
    return Resolved(CreateStream(spec), name, None, made, (partitions,), records)


def _resolve_alter(
    change: Change, before: Stream, spec: StreamSpec, partitions_max: int
) -> Resolved:
    check_spec(spec, partitions_max)
    check_alter(before, spec)
    wanted = spec.partitions or before.partitions
    made = msgspec.structs.replace(
        spec,
        name=str(before.name),
        partitions=wanted,
        replication=spec.replication or before.spec.replication,
    )
    records = before.records
    if spec.record is not None and spec.record != before.record:
        records = (*records, spec.record)
    return Resolved(change, before.name, before, made, _with(before, wanted), records)


def _grown(change: Change, before: Stream, partitions: int, partitions_max: int) -> Resolved:
    check_partitions(before.name, partitions, partitions_max)
    spec = msgspec.structs.replace(before.spec, partitions=partitions)
    check_spec(spec, partitions_max)
    if partitions <= before.partitions:
        raise UsageError(
            f"stream {before.name} has {before.partitions} partitions and cannot have "
            f"{partitions}: the number of partitions can only grow"
        )
    return Resolved(change, before.name, before, spec, _with(before, partitions), before.records)


def _with(before: Stream, partitions: int) -> tuple[int, ...]:
    return before.grown if partitions == before.partitions else (*before.grown, partitions)
