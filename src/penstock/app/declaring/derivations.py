"""Declaring derived streams and tables: functions of DataFrames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from penstock.app.declaring.checks import check_late, declare_stream, length, place_name
from penstock.app.declaring.definitions import Derivation, StreamOrTable
from penstock.app.declaring.location import Location, of_function
from penstock.app.declaring.streams import AppStream, DerivedStream
from penstock.app.declaring.tables import DerivedTable
from penstock.app.declaring.windows import Duration, Windows
from penstock.errors import AppError
from penstock.records.schema import Record

if TYPE_CHECKING:
    from penstock.app.declaring.app import App

P = ParamSpec("P")
D = TypeVar("D")


class DerivedFrom(NamedTuple):
    """What a function is given: its inputs, their windows if any, and where late events go."""

    inputs: tuple[StreamOrTable, ...]
    window: Windows | None
    late: AppStream[object] | None


class StreamShape(NamedTuple):
    """What is declared about a derived stream; the rest follows from the function."""

    record: type[Record] | None
    key: str | None
    time: str | None
    watermark: Duration | None
    partitions: int | None


def declare_derived_stream(
    app: App, function: Callable[P, D], name: str | None, source: DerivedFrom, shape: StreamShape
) -> DerivedStream[object, P, D]:
    """Check it and register it; `AppError` names the file and line of a mistake."""
    where = of_function(function.__code__)
    called = place_name(where, name or function.__name__)
    settings: dict[str, object] = {}
    if shape.partitions is not None:
        settings["partitions"] = shape.partitions
    spec = None
    if shape.record is not None:
        spec = declare_stream(
            where, called, shape.record, key=shape.key, time=shape.time, **settings
        )
    made: DerivedStream[object, P, D] = DerivedStream(
        app=app,
        name=called,
        record=shape.record,
        spec=spec,
        key=shape.key,
        time=shape.time,
        watermark_us=length(where, shape.watermark, "the watermark"),
        location=where,
        settings=settings,
        function=function,
    )
    _define(app, function, source, made, where)
    app.add_stream(made)
    return made


def declare_derived_table(
    app: App,
    function: Callable[P, D],
    name: str | None,
    source: DerivedFrom,
    keys: tuple[str, ...],
    *,
    public: bool,
) -> DerivedTable[object, P, D]:
    """Check it and register it; `AppError` names the file and line of a mistake."""
    where = of_function(function.__code__)
    called = place_name(where, name or function.__name__)
    if source.window is not None and source.window.kind == "session":
        raise AppError(
            f"{where}: table {called} has session windows, whose bounds move while they are open: "
            "derive a stream instead"
        )
    if not keys or not all(keys):
        raise AppError(f"{where}: table {called} has no key: name its key columns")
    made: DerivedTable[object, P, D] = DerivedTable(
        app=app,
        name=called,
        key_type=str,
        value=None,
        default=None,
        spec=None,
        location=where,
        public=public,
        key=keys[0] if len(keys) == 1 else keys,
        function=function,
    )
    _define(app, function, source, made, where)
    app.add_table(made)
    return made


def _define(
    app: App,
    function: Callable[..., object],
    source: DerivedFrom,
    output: StreamOrTable,
    where: Location,
) -> None:
    name, (inputs, window, late) = output.name, source
    if not inputs:
        raise AppError(f"{where}: {name} has no input: name a stream or a table")
    for given in inputs:
        app.check_input(where, name, given)
    if window is not None and (not isinstance(inputs[0], AppStream) or inputs[0].time is None):
        raise AppError(
            f"{where}: {name} has windows, but {inputs[0].name} has no time field: declare "
            f"{inputs[0].name} with time="
        )
    if late is not None and window is None:
        raise AppError(f"{where}: {name} has late= but no window: add window=")
    if late is not None:
        check_late(where, name, late, inputs[0])
    app.define(
        Derivation(
            name=name,
            inputs=inputs,
            outputs=(output,) if late is None else (output, late),
            location=where,
            function=function,
            windows=window,
            late=late,
        )
    )
