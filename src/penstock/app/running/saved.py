"""A definition as it was when it last ran, and whether it may continue as it is now.

A record of each definition is kept beside its position, even after the app no longer defines it.
One comparison serves both directions: going to a newer version of an app, or back to an older one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.app.declaring.context import DEFAULT_TIMER
from penstock.app.declaring.definitions import (
    Agent,
    Definition,
    Derivation,
)
from penstock.app.declaring.tables import AppTable
from penstock.errors import PlanChangedError
from penstock.log.api import Log
from penstock.log.declaring.quantities import format_duration
from penstock.records.schema import Record, Schema, type_of

PREFIX = "definition/"
VERSION = 2
"""The version of the format in which definitions are saved; newer ones are refused."""

NONE = "none"
"""What a fact is called that there is no longer."""


class SavedDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A definition as it last ran.

    `inputs` are streams with the ids that they had. `facts` must not change while there is a
    position, `details` may; both map a description to a value. `plan` is the plan of the state
    that Spark keeps, if any.
    """

    version: int = VERSION
    kind: str
    inputs: dict[str, int | None] = {}
    streams: tuple[str, ...] = ()
    """The streams that it writes."""
    tables: tuple[str, ...] = ()
    timers: tuple[str, ...] = ()
    plan: str | None = None
    facts: dict[str, str] = {}
    details: dict[str, str] = {}


class World(NamedTuple):
    """What else the comparison needs to know: definitions that the app no longer has, and the
    names of timers that are set."""

    gone: Mapping[str, SavedDefinition] = {}
    timers_set: Collection[str] = ()


class Objection(NamedTuple):
    """Why a definition cannot continue, and what can be done about it."""

    reason: str
    way_out: str


def saved_key(app: str, definition: str) -> str:
    return f"{PREFIX}{app}/{definition}"


def read_saved(log: Log, app: str) -> dict[str, SavedDefinition]:
    """All definitions of an app that have ever run and were not reset since."""
    prefix = f"{PREFIX}{app}/"
    return {
        key.removeprefix(prefix): _unpack(packed, key.removeprefix(prefix))
        for key, packed in log.progress_items(prefix).items()
    }


def _unpack(packed: bytes, name: str) -> SavedDefinition:
    fields = msgspec.json.decode(packed, type=dict[str, Any])
    version = fields.get("version", 1)
    if version > VERSION:
        raise PlanChangedError(
            f"{name} was last run by a newer version of Penstock, which saved it in format "
            f"{version}; this version supports formats up to {VERSION}: use the newer version"
        )
    if version == 1:  # inputs had no ids, and timers were not saved
        fields |= {"version": 1, "inputs": dict.fromkeys(fields["inputs"])}
    return msgspec.convert(fields, SavedDefinition)


def describe_definition(
    definition: Definition, kind: str, inputs: Mapping[str, int | None], plan: str | None = None
) -> SavedDefinition:
    """A definition in its saved form; `kind` is what messages call it, `inputs` have their ids."""
    tables = [place for place in definition.outputs if isinstance(place, AppTable)]
    dead = definition.dead if isinstance(definition, Agent) else None  # named after the agent
    streams = [
        place
        for place in definition.outputs
        if not isinstance(place, AppTable) and place is not dead
    ]
    return SavedDefinition(
        kind=kind,
        inputs=dict(inputs),
        streams=tuple(place.name for place in streams),
        tables=tuple(table.name for table in tables),
        timers=tuple(definition.on_timer) if isinstance(definition, Agent) else (),
        plan=plan,
        facts=dict(_facts(definition, tables)),
        details=dict(_details(definition)),
    )


def _facts(definition: Definition, tables: Iterable[AppTable[object]]) -> Iterable[tuple[str, str]]:
    if isinstance(definition, Agent) and isinstance(definition.state, AppTable):
        yield "its state", f"table {definition.state.name}"
    for table in tables:
        yield f"the keys of table {table.name}", table.key_type.__name__
        if isinstance(definition, Agent):
            yield from _facts_of_own(table)
    yield from definition.facts.items()


def _facts_of_own(table: AppTable[object]) -> Iterable[tuple[str, str]]:
    # Whether the change of a record is allowed is decided by its stream.
    if not (isinstance(table.value, type) and issubclass(table.value, Record)):
        yield f"the values of table {table.name}", str(type_of(table.value, table.name))
    yield f"the windows of table {table.name}", str(table.windows or NONE)
    if table.windows is not None:
        yield f"what the windows of table {table.name} go by", table.relative_to


def _details(definition: Definition) -> Iterable[tuple[str, str]]:
    for place in definition.outputs:
        record = place.spec.record if place.spec is not None else None
        if record is not None:
            yield f"the record of {place.name}", _show_schema(record)
    if isinstance(definition, Agent) and definition.state is not None and definition.state.windows:
        expires_us = definition.state.windows.expires_us
        kept = "for ever" if expires_us is None else format_duration(expires_us // 1000)
        yield f"how long windows of table {definition.state.name} are kept", kept
    if isinstance(definition, Derivation) and definition.windows is not None:
        yield "its windows", str(definition.windows)


def _show_schema(schema: Schema) -> str:
    return f"{schema.name}({', '.join(f'{field.name}: {field.type}' for field in schema.fields)})"


def find_objection(
    name: str, before: SavedDefinition | None, now: SavedDefinition, world: World = World()
) -> Objection | None:
    """Why a definition cannot continue as it is now; `None` if it can.

    `before` is the definition as it last ran, or `None` if it is new.
    """
    if before is None:
        return _object_to_new(name, now, world.gone)
    anew = f"restart it from the beginning: `penstock reset APP {name}`"
    if now.streams or now.tables:
        anew = f"rebuild its output from scratch: `penstock reset APP {name} --output clear`"
    if before.kind != now.kind:
        reason = f"it was {before.kind} and is now {now.kind}"
        return Objection(reason, f"change it back, or {anew}")
    for what, value in before.facts.items():
        if now.facts.get(what, NONE) != value:
            reason = f"{what} changed from {value} to {now.facts.get(what, NONE)}"
            return Objection(reason, f"change it back, or {anew}")
    for timer in sorted(world.timers_set):
        if timer not in now.timers:
            shown = "timer" if timer == DEFAULT_TIMER else f'timer("{timer}")'
            return Objection(
                "it has timers that are set but no longer a function for them",
                f"restore the function (@{name}.{shown}); it may do nothing, to discard them",
            )
    return _object_to_state(name, before, now)


def _object_to_new(
    name: str, now: SavedDefinition, gone: Mapping[str, SavedDefinition]
) -> Objection | None:
    old = _find_earlier_name(now, gone)
    if old is None:
        return None
    written = " and ".join([*(f"table {table}" for table in now.tables), *now.streams])
    return Objection(
        f"it writes {written}, as did {old}, which the app no longer defines",
        f"to continue from the position of {old}, run `penstock rename APP {old} {name}`; to start "
        f"from the beginning, run `penstock reset APP {old}`, with `--output clear` to discard its "
        "output",
    )


def _find_earlier_name(now: SavedDefinition, gone: Mapping[str, SavedDefinition]) -> str | None:
    """The definition, no longer in the app, that this one may have been before."""
    for name, before in gone.items():
        if set(now.tables) & set(before.tables):
            return name
        same = (now.kind, set(now.inputs), now.streams) == (
            before.kind,
            set(before.inputs),
            before.streams,
        )
        if same and now.streams:
            return name
    return None


def _object_to_state(name: str, before: SavedDefinition, now: SavedDefinition) -> Objection | None:
    """Object if the state that Spark keeps was made by another plan or from other streams."""
    again = f"`penstock reset APP {name}` restarts it from the beginning"
    if before.plan is None or now.plan is None:
        return None  # the position tells whether there is state
    if before.plan != now.plan:
        return Objection(
            "the plan of its state has changed, and the saved state no longer fits.\n"
            f"before:\n{before.plan}\nnow:\n{now.plan}\n",
            again,
        )
    for stream, id_ in before.inputs.items():
        if id_ is not None and now.inputs.get(stream, id_) != id_:
            return Objection(
                f"{stream} has been emptied or created again since, and the saved state is from "
                "before that",
                again,
            )
    return None


def raise_objection(definition: Definition, objection: Objection | None) -> None:
    """Raise `PlanChangedError` for an objection, if there is one; it names the file and line."""
    if objection is not None:
        raise PlanChangedError(
            f"{definition.location}: {definition.name}: {objection.reason}: {objection.way_out}"
        )
