"""What a definition was when it last ran, and whether it may go on as what it is now.

A record of each is kept beside its position, also of those that an app does not define any more.
One comparison answers for both directions: a newer version of an app, or an older one again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from penstock.app.definitions import (
    Agent,
    Definition,
    Derivation,
    Feed,
    Listening,
    Lookup,
    Rekey,
    Sinking,
    StreamJoin,
    TableJoin,
)
from penstock.app.tables import AppTable
from penstock.errors import PlanChangedError
from penstock.log.api import Log
from penstock.log.quantities import format_duration

PREFIX = "definition/"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A definition as it last ran.

    `facts` are what must stay as it is while there is a position, by what they are called.
    """

    kind: str
    inputs: tuple[str, ...]
    streams: tuple[str, ...]
    """Those that it writes."""
    tables: tuple[str, ...]
    facts: dict[str, str] = {}


def saved_key(app: str, definition: str) -> str:
    return f"{PREFIX}{app}/{definition}"


def saved_definitions(log: Log, app: str) -> dict[str, Saved]:
    """Every definition of an app that has ever run and was not reset."""
    prefix = f"{PREFIX}{app}/"
    return {
        key.removeprefix(prefix): msgspec.json.decode(packed, type=Saved)
        for key, packed in log.progress_items(prefix).items()
    }


def form_of(definition: Definition) -> Saved:
    """What is kept of a definition."""
    tables = [place for place in definition.outputs if isinstance(place, AppTable)]
    dead = definition.dead if isinstance(definition, Agent) else None  # it is named after the agent
    return Saved(
        kind=_kind(definition),
        inputs=tuple(place.name for place in definition.inputs),
        streams=tuple(
            place.name
            for place in definition.outputs
            if not isinstance(place, AppTable) and place is not dead
        ),
        tables=tuple(table.name for table in tables),
        facts=dict(_facts(definition, tables)),
    )


def _kind(definition: Definition) -> str:
    match definition:
        case Agent():
            return "an agent"
        case Derivation():
            is_table = any(isinstance(place, AppTable) for place in definition.outputs)
            return "a derived table" if is_table else "a derived stream"
        case Rekey():
            return "a copy of a stream under another key"
        case Lookup():
            return "a lookup"
        case StreamJoin():
            return "a join of streams"
        case TableJoin():
            return "a join of tables"
        case Sinking():
            return "a sink"
        case Feed():
            return "a feed"
        case Listening():
            return "a listener"
    return "a stream of dead letters"


def _facts(definition: Definition, tables: Iterable[AppTable[object]]) -> Iterable[tuple[str, str]]:
    for table in tables:
        yield f"the keys of table {table.name}", table.key_type.__name__
        if table.windows is not None and isinstance(definition, Agent):
            yield f"the windows of table {table.name}", str(table.windows)
            yield f"what the windows of table {table.name} go by", table.relative_to
    if isinstance(definition, Agent) and definition.state is not None:
        yield "its state", f"table {definition.state.name}"
    if isinstance(definition, TableJoin):
        names = " and ".join(place.name for place in definition.inputs)
        yield "what it joins", f"{names} ({definition.how})"
    if isinstance(definition, StreamJoin):
        within = format_duration(definition.within_us // 1000)
        yield "how it joins", f"{definition.how}, on {definition.on}, within {within}"


def check_change(definition: Definition, before: Saved | None, gone: Mapping[str, Saved]) -> None:
    """Raise `PlanChangedError` if a definition cannot go on as what it is now.

    `before` is what it was when it last ran, or `None` if it is new; `gone` are those that the
    app does not define any more.
    """
    name, now = definition.name, form_of(definition)
    if before is not None:
        why = _why_not(before, now)
        if why:
            raise PlanChangedError(
                f"{definition.location}: {name}: {why}: change it back, or let it make "
                f"everything anew: `penstock reset APP {name} --output clear`"
            )
    elif (old := _renamed(now, gone)) is not None:
        raise PlanChangedError(
            f"{definition.location}: {name} writes {_written(now)}, as {old} did, which the app "
            f"does not define any more: to go on where {old} was, `penstock rename APP {old} "
            f"{name}`; to begin anew, `penstock reset APP {old}`, with `--output clear` if what "
            "it made is to go"
        )


def _why_not(before: Saved, now: Saved) -> str:
    if before.kind != now.kind:
        return f"it was {before.kind}, and is {now.kind} now"
    for what, value in before.facts.items():
        if now.facts.get(what, value) != value:
            return f"{what} changed from {value} to {now.facts[what]}"
    return ""


def _renamed(now: Saved, gone: Mapping[str, Saved]) -> str | None:
    """Which one that is not defined any more this one may have been."""
    for name, before in gone.items():
        if set(now.tables) & set(before.tables):
            return name
        same = (now.kind, now.inputs, now.streams) == (before.kind, before.inputs, before.streams)
        if same and now.streams:
            return name
    return None


def _written(form: Saved) -> str:
    return " and ".join([*(f"table {name}" for name in form.tables), *form.streams])
