"""The signature of an agent's function: what it takes, and whether that matches the agent."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union

from penstock.app.declaring.context import Context, TableView
from penstock.app.declaring.entry import Entry, WindowedEntry
from penstock.app.declaring.location import Location
from penstock.app.declaring.streams import AppStream
from penstock.app.declaring.tables import AppTable
from penstock.errors import AppError, RecordError
from penstock.records.event import Event, StoredEvent
from penstock.records.schema import Choice, Maybe, Record, Scalar, Type, schema_of, type_of

Argument = Literal["data", "event", "datas", "events", "entry", "view", "context"]


class Signature(NamedTuple):
    """The arguments of an agent's function in order, and the class of each stream's events."""

    arguments: tuple[Argument, ...]
    records: Mapping[str, type[Record] | None]

    @property
    def is_batch(self) -> bool:
        return self.arguments[0] in ("datas", "events")


class AgentParts(NamedTuple):
    """What an agent is declared with, which its function has to match."""

    name: str
    streams: tuple[AppStream[object], ...]
    state: AppTable[object] | None
    reads: tuple[AppTable[object], ...]
    outputs: tuple[AppStream[object], ...]
    location: Location


def read_signature(function: Callable[..., object], agent: AgentParts) -> Signature:
    """How to call the function; `AppError` if it cannot take what the agent will be given."""
    hints = _hints(function)
    names = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    what = f"{agent.location}: agent {agent.name}"
    if not names:
        raise AppError(f"{what} takes no parameters: its first parameter must be the event")
    first, wanted = _first(hints.get(names[0]))
    records = {stream.name: _record_of(stream, wanted, what) for stream in agent.streams}
    arguments: list[Argument] = [first]
    expected: list[tuple[Argument, AppTable[object]]] = []
    expected += [("entry", agent.state)] if agent.state is not None else []
    expected += [("view", table) for table in agent.reads]
    for parameter in names[1:]:
        hint = hints.get(parameter)
        if _origin(hint) is Context:
            arguments.append("context")
            continue
        if not expected:
            raise AppError(
                f"{what} has a parameter {parameter!r} that nothing is passed to: name a table "
                "with state= or reads=, or annotate the parameter as penstock.Context"
            )
        role, table = expected.pop(0)
        _check_role(hint, role, table, f"{what}, parameter {parameter!r}")
        arguments.append(role)
    if expected:
        raise AppError(f"{what} has no parameter for its table {expected[0][1].name}: add one")
    if agent.state is not None:
        for stream in agent.streams:
            _check_key(agent.state, stream, what)
    _check_outputs(hints.get("return"), agent.outputs, what)
    return Signature(tuple(arguments), records)


def _hints(function: Callable[..., object]) -> dict[str, object]:
    """The annotations, evaluated where the function was defined; those that fail are omitted."""
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


def _first(hint: object) -> tuple[Argument, list[type[Record]]]:
    """How the function takes events, and the record classes it names for their data."""
    plural = False
    if _origin(hint) is list:
        plural, hint = True, (typing.get_args(hint) or (None,))[0]
    whole = _origin(hint) in (Event, StoredEvent)
    if whole:
        hint = (typing.get_args(hint) or (None,))[0]
    wanted = [
        option
        for option in _options(hint)
        if isinstance(option, type) and issubclass(option, Record) and option is not Record
    ]
    match plural, whole:
        case True, True:
            return "events", wanted
        case True, False:
            return "datas", wanted
        case False, True:
            return "event", wanted
    return "data", wanted


def _record_of(
    stream: AppStream[object], wanted: Sequence[type[Record]], what: str
) -> type[Record] | None:
    """The class of a stream's data as the function wants it: one that it names, or the stream's."""
    if not wanted or stream.record in wanted:
        return stream.record
    held = None if stream.spec is None else stream.spec.record
    if held is None:
        return wanted[0] if len(wanted) == 1 else None
    for option in wanted:
        if schema_of(option).fields == held.fields:
            return option
    names = " | ".join(option.__name__ for option in wanted)
    raise AppError(f"{what} takes {names}, but {stream.name} holds {held.name} ({stream.location})")


def _check_role(hint: object, role: Argument, table: AppTable[object], what: str) -> None:
    if hint is None:
        return
    wanted: tuple[type, ...] = (TableView,)
    if role == "entry":
        wanted = (WindowedEntry,) if table.windows else (Entry,)
    if _origin(hint) not in wanted:
        raise AppError(
            f"{what} is annotated as {_show_hint(hint)}, but is given the table {table.name}: "
            f"annotate it as {wanted[0].__name__}[…]"
        )
    arguments = typing.get_args(hint)
    if not arguments:
        return
    if not _same_value(arguments[0], table, optional=role == "entry" and not table.has_default):
        raise AppError(
            f"{what} is annotated as {_show_hint(hint)}, but table {table.name} holds "
            f"{_show_hint(table.value)}"
            f"{'' if table.has_default or role == 'view' else ', or None until a value is set'}"
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
    """A table has the keys of the stream; int keys require an int field."""
    record = None if stream.spec is None else stream.spec.record
    field = None if record is None or not stream.key else record.field(stream.key)
    if field is None or table.key_type is not int:
        return  # keys are given by the sender, or follow from a DataFrame
    held = field.type.of if isinstance(field.type, Maybe) else field.type
    if held != Scalar("int") and not (isinstance(held, Choice) and not held.of_text):
        raise AppError(
            f"{what} has the state {table.name}, whose keys are int ({table.location}), but the "
            f"key of {stream.name}, {stream.key}, is {held}: declare the table with key=str"
        )


def _check_outputs(hint: object, outputs: tuple[AppStream[object], ...], what: str) -> None:
    records = [stream.record for stream in outputs if stream.record is not None]
    twice = next((record for record in records if records.count(record) > 1), None)
    if hint is None and twice is not None:
        raise AppError(
            f"{what} has no return annotation, but several of its streams hold {twice.__name__}: "
            "yield stream.new(…), and annotate the function as returning Iterator[Emit]"
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
                f"{what} yields {option.__name__}, which several of its streams hold: choose one "
                "with stream.new(…)"
            )
        if option in held or any(s.record is None for s in outputs):
            continue
        known = ", ".join(f"{s.name} ({_show_hint(s.record)})" for s in outputs) or "none"
        raise AppError(
            f"{what} yields {option.__name__}, which none of its output streams holds ({known}): "
            "add the stream to to="
        )


def _is_iterator(hint: object) -> bool:
    origin = _origin(hint)
    return isinstance(origin, type) and hasattr(origin, "__iter__")


def _show_hint(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
