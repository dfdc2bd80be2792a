"""Catalogue files: namespaces, records and streams declared in TOML, and plans to apply them.

    [namespaces.shop]

    [records.Order]
    user = "str"
    amount = "Decimal(10, 2)"
    note = "str | None"

    [streams."shop.orders"]
    record = "Order"            # or a class: "shop.models:Order"
    key = "user"
    partitions = 4
    retention = "30 days"

Errors name the file and the line. A file owns the streams it created: a stream that is no longer
in it is dropped, which counts as destructive.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import CatalogueError, PenstockError, RecordError, UsageError
from penstock.log.api import Log
from penstock.log.declaring.names import StreamName, parse_stream
from penstock.log.declaring.objects import (
    AlterStream,
    Change,
    CreateNamespace,
    CreateStream,
    DropStream,
    GrowStream,
    Stream,
    StreamSpec,
    check_alter,
    check_namespace_name,
    check_spec,
    check_writable_by_user,
    describe_change,
    is_destructive,
)
from penstock.log.declaring.quantities import parse_bytes, parse_duration_ms
from penstock.records.schema import (
    Field,
    Record,
    Schema,
    check_field_name,
    parse_type,
    schema_of,
)

T = TypeVar("T")
Path_ = tuple[str, ...]
PARTITIONS_ANY = 2**31
"""The log's own limit is checked when the plan is made."""
_SECTIONS = ("catalogue", "defaults", "namespaces", "records", "streams")
_SETTINGS = (
    "record",
    "content",
    "key",
    "time",
    "partitions",
    "replication",
    "retention",
    "retention_bytes",
    "ids",
    "acks",
    "table",
    "writer",
)
_DEFAULTS = ("partitions", "replication", "retention", "retention_bytes", "acks")


class Catalogue(msgspec.Struct, frozen=True):
    """What a file declares."""

    file: str
    name: str
    namespaces: tuple[str, ...]
    streams: tuple[StreamSpec, ...]
    lines: Mapping[str, int]


class PlanStep(msgspec.Struct, frozen=True):
    """One change of a plan, in words, and whether it destroys data."""

    change: Change
    description: str
    destructive: bool


def load(path: Path) -> Catalogue:
    """Read a catalogue file. Raises `CatalogueError` that names the file and the line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path} cannot be read: {error}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{_with_line(path, str(error))}") from None
    return _Loader(path, text, tree).load()


def _with_line(path: Path, message: str) -> str:
    """tomllib says "… (at line 3, column 7)"; put the line where editors look for it."""
    match = re.search(r" \(at line (\d+), column \d+\)", message)
    if match is None:
        return f"{path}: not valid TOML: {message}"
    return f"{path}:{match[1]}: not valid TOML: {message.replace(match[0], '')}"


class _Loader:
    """Turns the TOML tree into declarations; every error gets the line of its path."""

    def __init__(self, path: Path, text: str, tree: Mapping[str, object]) -> None:
        self._path = path
        self._lines = dict(_lines(text))
        self._tree = tree
        self._records: dict[str, Schema] = {}

    def load(self) -> Catalogue:
        self._check_names((), self._tree, _SECTIONS)
        name = self._tree.get("catalogue", self._path.stem)
        if not isinstance(name, str) or not name:
            raise self._wrong(("catalogue",), "the catalogue's name must be a string")
        namespaces = tuple(self._section("namespaces"))
        for namespace in namespaces:
            where = ("namespaces", namespace)
            self._run_at(where, lambda n=namespace: check_namespace_name(n))  # type: ignore[misc]
            self._check_names(where, self._table(where, self._section("namespaces")[namespace]), ())
        self._load_records()
        self._check_defaults()
        streams = tuple(self._stream(n, body, name) for n, body in self._section("streams").items())
        self._check_different(streams)
        lines = {
            spec.name: self._line(("streams", key))
            for spec, key in zip(streams, self._section("streams"), strict=True)
        }
        return Catalogue(str(self._path), name, namespaces, streams, lines)

    def _check_different(self, streams: Sequence[StreamSpec]) -> None:
        seen: set[str] = set()
        for spec, key in zip(streams, self._section("streams"), strict=True):
            if spec.name in seen:
                raise self._wrong(("streams", key), f"stream {spec.name} is declared twice")
            seen.add(spec.name)

    def _section(self, name: str) -> Mapping[str, object]:
        return self._table((name,), self._tree.get(name, {}))

    def _table(self, where: Path_, value: object) -> Mapping[str, object]:
        if not isinstance(value, Mapping):
            raise self._wrong(where, f"{'.'.join(where)} must be a table")
        return value

    def _load_records(self) -> None:
        for name in self._section("records"):
            self._load_record(name, ())

    def _load_record(self, name: str, outer: Path_) -> Schema:
        """Load a record, after the records that its fields name, whatever their order."""
        where = ("records", name)
        if name in outer:
            raise self._wrong(where, f"record {name} contains itself")
        if name in self._records:
            return self._records[name]
        body = self._table(where, self._section("records")[name])
        fields = []
        for field, text in body.items():
            at = (*where, field)
            if not isinstance(text, str):
                raise self._wrong(at, f"the type of {name}.{field} must be a string, such as 'str'")
            for other in set(re.findall(r"\w+", text)) & set(self._section("records")):
                self._load_record(other, (*outer, name))
            self._run_at(at, lambda f=field: check_field_name(f, name))  # type: ignore[misc]
            made = self._run_at(at, lambda t=text: parse_type(t, self._records))  # type: ignore[misc]
            fields.append(Field(field, made))
        if not fields:
            raise self._wrong(where, f"record {name} has no fields")
        self._records[name] = Schema(name, tuple(fields))
        return self._records[name]

    def _check_defaults(self) -> None:
        defaults = self._section("defaults")
        self._check_names(("defaults",), defaults, _DEFAULTS)
        for name, value in defaults.items():
            self._run_at(("defaults", name), lambda n=name, v=value: self._setting(n, v))  # type: ignore[misc]

    def _stream(self, name: str, body: object, origin: str) -> StreamSpec:
        where = ("streams", name)
        settings = dict(self._table(where, body))
        self._check_names(where, settings, _SETTINGS)
        given = {**self._section("defaults"), **settings}
        if settings.get("ids") == "producer" and "partitions" not in settings:
            given.pop("partitions", None)
        values: dict[str, object] = {"name": name, "origin": origin}
        for setting, value in given.items():
            at = (*where, setting) if setting in settings else ("defaults", setting)
            values.update(self._run_at(at, lambda s=setting, v=value: self._setting(s, v)))  # type: ignore[misc]
        spec = self._run_at(where, lambda: msgspec.convert(values, StreamSpec))
        self._run_at(where, lambda: check_writable_by_user(check_spec(spec, PARTITIONS_ANY)))
        return msgspec.structs.replace(spec, name=str(parse_stream(name)))

    def _setting(self, name: str, value: object) -> dict[str, object]:
        if name == "record":
            return {"record": self._record(value), "content": "record"}
        if name == "retention":
            return {"retention_ms": parse_duration_ms(value)}  # type: ignore[arg-type]
        if name == "retention_bytes":
            return {"retention_bytes": parse_bytes(value)}  # type: ignore[arg-type]
        # One field at a time, so that the error has that field's line.
        msgspec.convert({"name": "x", name: value}, StreamSpec)
        return {name: value}

    def _record(self, name: object) -> Schema:
        if not isinstance(name, str):
            raise UsageError("record must be a string: a name from [records], or module:Class")
        if ":" in name:
            return schema_of(import_record(name, self._path.parent))
        if name not in self._records:
            known = ", ".join(self._records) or "none"
            raise UsageError(
                f"this file has no [records.{name}] (its records: {known}); to use a class, write "
                "module:Class"
            )
        return self._records[name]

    def _check_names(self, where: Path_, found: Mapping[str, object], known: Sequence[str]) -> None:
        for name in found:
            if name not in known:
                allowed = f"; known settings: {', '.join(known)}" if known else ""
                if where[:1] == ("streams",) and isinstance(found[name], Mapping):
                    allowed = f'; write the stream as [streams."{where[-1]}.{name}"]'
                raise self._wrong((*where, name), f"{name!r} is not a known setting{allowed}")

    def _run_at(self, where: Path_, work: Callable[[], T]) -> T:
        try:
            return work()
        except CatalogueError:
            raise
        except (PenstockError, msgspec.ValidationError) as error:
            raise self._wrong(where, str(error)) from None

    def _wrong(self, where: Path_, message: str) -> CatalogueError:
        return CatalogueError(f"{self._path}:{self._line(where)}: {message}")

    def _line(self, where: Path_) -> int:
        while where and where not in self._lines:
            where = where[:-1]
        return self._lines.get(where, 1)


def _lines(text: str) -> Iterator[tuple[Path_, int]]:
    """The line of every table and key that is on a line of its own."""
    table: Path_ = ()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.split("#")[0].strip() if '"' not in line else line.strip()
        if stripped.startswith("["):
            table = _path_of(stripped[: stripped.rindex("]") + 1] if "]" in stripped else "")
            yield table, number
        elif "=" in stripped:
            key = _path_of(stripped.split("=")[0].strip() + " = 0")
            if key:
                yield (*table, *key), number


def _path_of(line: str) -> Path_:
    try:
        tree: object = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(tree, dict) and tree:
        name, tree = next(iter(tree.items()))
        path.append(name)
    return tuple(path)


def import_record(name: str, folder: Path) -> type[Record]:
    """Import the record class `module:Class`; modules next to the file are found too."""
    module_name, _, class_name = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise RecordError(
            f"{name!r} does not name a class: use MODULE:CLASS, such as shop.models:Order"
        )
    sys.path.insert(0, str(folder.resolve()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise RecordError(
            f"{name}: {error}; looked in {folder.resolve()} and on PYTHONPATH"
        ) from None
    except AttributeError:
        raise RecordError(f"{name}: the module has no {class_name}") from None
    except Exception as error:  # importing a module may raise anything
        raise RecordError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not (isinstance(found, type) and issubclass(found, Record)):
        raise RecordError(f"{name} is not a penstock.Record class")
    return found


def make_plan(log: Log, catalogue: Catalogue) -> list[PlanStep]:
    """The changes that make the log match the catalogue; empty if it does already.

    Raises `CatalogueError` for a change that is not possible, with the line of its stream.
    """
    before = {stream.name: stream for stream in log.streams()}
    namespaces = set(log.namespaces())
    changes: list[tuple[Change, Stream | None]] = [
        (CreateNamespace(name), None) for name in catalogue.namespaces if name not in namespaces
    ]
    for spec in catalogue.streams:
        name = parse_stream(spec.name)
        try:
            check_spec(spec, log.limits.partitions_max)
            _check_namespace(name, namespaces, catalogue)
            found = _stream_changes(spec, before.get(name), catalogue.name)
        except PenstockError as error:
            line = catalogue.lines[spec.name]
            raise CatalogueError(f"{catalogue.file}:{line}: {error}") from None
        changes += [(change, before.get(name)) for change in found]
    declared = {parse_stream(spec.name) for spec in catalogue.streams}
    for stream_name, stream in before.items():
        if stream.spec.origin == catalogue.name and stream_name not in declared:
            changes.append((DropStream(str(stream_name)), stream))
    return [
        PlanStep(change, describe_change(change, stream), is_destructive(change, stream))
        for change, stream in changes
    ]


def _check_namespace(name: StreamName, present: set[str], catalogue: Catalogue) -> None:
    if name.namespace not in present and name.namespace not in catalogue.namespaces:
        raise UsageError(
            f"there is no namespace {name.namespace}: add [namespaces.{name.namespace}]"
        )


def _stream_changes(spec: StreamSpec, before: Stream | None, origin: str) -> list[Change]:
    if before is None:
        return [CreateStream(spec)]
    if before.spec.origin not in ("", origin):
        raise UsageError(
            f"stream {before.name} belongs to catalogue {before.spec.origin!r}: "
            "change it there, or set `catalogue` to that name here"
        )
    check_alter(before, spec)
    changes: list[Change] = []
    wanted = msgspec.structs.replace(
        spec,
        partitions=before.spec.partitions,
        replication=spec.replication or before.spec.replication,
        writer=spec.writer or before.spec.writer,
    )
    if wanted != before.spec:
        changes.append(AlterStream(wanted))
    if spec.partitions is not None and spec.partitions > before.partitions:
        changes.append(GrowStream(str(before.name), spec.partitions))
    return changes
