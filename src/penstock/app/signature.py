"""Looks at an agent's function: what it takes, and whether that fits what it will get."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union

from penstock.app.context import Context, TableView
from penstock.app.entry import Entry, WindowedEntry
from penstock.app.location import Location
from penstock.app.streams import AppStream
from penstock.app.tables import AppTable
from penstock.errors import AppError, RecordError
from penstock.records.event import Event
from penstock.records.schema import Choice, Maybe, Record, Scalar, Type, schema_of, type_of

Argument = Literal["data", "event", "datas", "events", "entry", "view", "context"]


class Signature(NamedTuple):
    """In which order an agent's function takes what."""

    arguments: tuple[Argument, ...]
    record: type[Record] | None

    @property
    def is_batch(self) -> bool:
        return self.arguments[0] in ("datas", "events")


def read_signature(
    name: str,
    function: Callable[..., object],
    stream: AppStream[object],
    state: AppTable[object] | None,
    reads: tuple[AppTable[object], ...],
    outputs: tuple[AppStream[object], ...],
    where: Location,
) -> Signature:
    """How to call the function; `AppError` where it cannot take what the agent will get."""
    hints = _hints(function)
    names = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    what = f"{where}: agent {name}"
    if not names:
        raise AppError(f"{what} takes nothing: its first parameter is the event")
    first, record = _first(hints.get(names[0]), stream, what)
    arguments: list[Argument] = [first]
    expected: list[tuple[Argument, AppTable[object] | None]] = []
    expected += [("entry", state)] if state is not None else []
    expected += [("view", table) for table in reads]
    for parameter in names[1:]:
        hint = hints.get(parameter)
        if _origin(hint) is Context:
            arguments.append("context")
            continue
        if not expected:
            raise AppError(
                f"{what} takes a parameter {parameter!r} and there is nothing to give it: name a "
                "table with state= or reads=, or annotate it as penstock.Context"
            )
        role, table = expected.pop(0)
        assert table is not None  # noqa: S101  expected pairs a role with its table
        _check_role(hint, role, table, f"{what}, parameter {parameter!r}")
        arguments.append(role)
    if expected and expected[0][1] is not None:
        raise AppError(f"{what} does not take its table {expected[0][1].name}: add a parameter")
    if state is not None:
        _check_key(state, stream, what)
    _check_outputs(hints.get("return"), outputs, what)
    return Signature(tuple(arguments), record)


def _hints(function: Callable[..., object]) -> dict[str, object]:
    """The annotations, evaluated where the function was defined; those that cannot be are left."""
    frame = inspect.currentframe()
    scope: dict[str, object] = {}
    while frame is not None:
        if frame.f_code.co_filename == function.__code__.co_filename:
            scope = {**frame.f_locals, **scope}
        frame = frame.f_back
    found: dict[str, object] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            single = typing.cast(typing.Any, type("hint", (), {"__annotations__": {name: hint}}))
            found.update(
                typing.get_type_hints(single, function.__globals__, scope, include_extras=True)
            )
        except (NameError, AttributeError):
            continue
    return found


def _origin(hint: object) -> object:
    return typing.get_origin(hint) or hint


def _first(
    hint: object, stream: AppStream[object], what: str
) -> tuple[Argument, type[Record] | None]:
    plural = False
    if _origin(hint) is list:
        plural, hint = True, (typing.get_args(hint) or (None,))[0]
    whole = _origin(hint) is Event
    if whole:
        hint = (typing.get_args(hint) or (None,))[0]
    record = stream.record
    options = [o for o in _options(hint) if o is not NoneType]
    wanted = options[0] if options else None
    if isinstance(wanted, type) and issubclass(wanted, Record) and wanted is not Record:
        _check_record(wanted, stream, what)
        record = wanted
    match plural, whole:
        case True, True:
            return "events", record
        case True, False:
            return "datas", record
        case False, True:
            return "event", record
    return "data", record


def _check_record(wanted: type[Record], stream: AppStream[object], what: str) -> None:
    held = None if stream.spec is None else stream.spec.record
    if held is None or wanted is stream.record:
        return
    if schema_of(wanted).fields != held.fields:
        raise AppError(
            f"{what} takes {wanted.__name__}, and {stream.name} holds {held.name} "
            f"({stream.location})"
        )


def _check_role(hint: object, role: Argument, table: AppTable[object], what: str) -> None:
    if hint is None:
        return
    wanted: tuple[type, ...] = (TableView,)
    if role == "entry":
        wanted = (WindowedEntry,) if table.windows else (Entry,)
    if _origin(hint) not in wanted:
        raise AppError(
            f"{what} is {_shown(hint)}, and gets the table {table.name}: annotate it as "
            f"{wanted[0].__name__}[…]"
        )
    arguments = typing.get_args(hint)
    if not arguments:
        return
    if not _same_value(arguments[0], table, optional=role == "entry" and not table.has_default):
        raise AppError(
            f"{what} is {_shown(hint)}, and table {table.name} holds {_shown(table.value)}"
            f"{'' if table.has_default or role == 'view' else ' or None, until it is set'}"
            f" ({table.location})"
        )


def _same_value(hint: object, table: AppTable[object], optional: bool) -> bool:
    if hint is typing.Any or table.value is None:
        return True
    given = _type(hint)
    held = _type(table.value)
    if optional:
        return given == Maybe(held) if held is not None else True
    return given == held


def _type(hint: object) -> Type | None:
    options = _options(hint)
    kept = [o for o in options if o is not NoneType]
    if len(kept) == 1 and isinstance(kept[0], type) and issubclass(kept[0], Record):
        found: Type = schema_of(kept[0])
        return Maybe(found) if len(options) > 1 else found
    try:
        return type_of(hint, "")
    except RecordError:
        return None


def _options(hint: object) -> list[object]:
    if _origin(hint) in (Union, UnionType):
        return list(typing.get_args(hint))
    return [hint]


def _check_key(table: AppTable[object], stream: AppStream[object], what: str) -> None:
    """A table's keys are those of the stream; numbers can be made of numbers only."""
    record = None if stream.spec is None else stream.spec.record
    field = None if record is None or not stream.key else record.field(stream.key)
    if field is None or table.key_type is not int:
        return  # keys are given by whoever sends, or follow from a DataFrame
    held = field.type.of if isinstance(field.type, Maybe) else field.type
    if held != Scalar("int") and not (isinstance(held, Choice) and not held.of_text):
        raise AppError(
            f"{what} keeps table {table.name}, whose keys are int ({table.location}), and the key "
            f"of {stream.name}, {stream.key}, is {held}: declare the table with key=str"
        )


def _check_outputs(hint: object, outputs: tuple[AppStream[object], ...], what: str) -> None:
    records = [stream.record for stream in outputs if stream.record is not None]
    twice = next((record for record in records if records.count(record) > 1), None)
    if hint is None and twice is not None:
        raise AppError(
            f"{what} says nothing of what it yields, and several of its streams hold "
            f"{twice.__name__}: yield stream.new(…), and annotate it as Iterator[Emit]"
        )
    if hint is None or hint is NoneType:
        return
    held = set(records)
    inner = typing.get_args(hint)[0] if typing.get_args(hint) and _is_iterator(hint) else hint
    for option in _options(inner):
        if not (isinstance(option, type) and issubclass(option, Record)):
            continue
        if records.count(option) > 1:
            raise AppError(
                f"{what} yields {option.__name__}, which several of its streams hold: say which, "
                "with stream.new(…)"
            )
        if option in held or any(s.record is None for s in outputs):
            continue
        known = ", ".join(f"{s.name} ({_shown(s.record)})" for s in outputs) or "no stream"
        raise AppError(f"{what} yields {option.__name__}, and writes to {known}: see its to=")


def _is_iterator(hint: object) -> bool:
    origin = _origin(hint)
    return isinstance(origin, type) and hasattr(origin, "__iter__")


def _shown(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
