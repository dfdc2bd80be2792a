"""The plan of an app: everything checked together, put in order and into queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.app.app import App
from penstock.app.definitions import (
    Agent,
    Definition,
    Derivation,
    Feed,
    Listening,
    Place,
    Sinking,
    StreamJoin,
    keeps_timers,
    mixes_keys,
)
from penstock.app.tables import AppTable
from penstock.errors import AppError, UnknownObjectError


@dataclass(frozen=True, eq=False)
class QueryPlan:
    """Definitions that run as one query: the same inputs, read once; one commit for all."""

    name: str
    definitions: tuple[Definition, ...]

    @property
    def inputs(self) -> tuple[Place, ...]:
        return self.definitions[0].inputs

    @property
    def kind(self) -> str:
        return kind_of(self.definitions[0])


@dataclass(frozen=True, eq=False)
class Plan:
    """Definitions in an order in which each comes after those that make its inputs."""

    app: App
    definitions: tuple[Definition, ...]

    def only(self, names: Sequence[str]) -> Plan:
        """The plan with only these definitions; `UnknownObjectError` for a name it lacks."""
        known = {definition.name for definition in self.definitions}
        for name in names:
            if name not in known:
                raise UnknownObjectError(
                    f"app {self.app.name} defines no {name}: it defines {', '.join(sorted(known))}"
                )
        chosen = tuple(d for d in self.definitions if not names or d.name in names)
        return Plan(self.app, chosen)


def plan(app: App) -> Plan:
    """Check the app as a whole. Raises `AppError` naming file and line of what is wrong."""
    definitions = list(app.definitions.values())
    _check_writers(definitions)
    _check_timers(app, definitions)
    return Plan(app, tuple(_in_order(definitions)))


def kind_of(definition: Definition) -> str:
    """How a definition runs: in Python tasks, as DataFrames, or in this process."""
    if isinstance(definition, Derivation | StreamJoin):
        return "frames"
    return "here" if isinstance(definition, Feed | Listening) else "tasks"


def can_share(one: Definition, other: Definition) -> bool:
    """Whether two definitions may run as one query: the same inputs, and nothing of their own
    that decides how far a batch may go."""
    alone = (one, other)
    if any(isinstance(d, Agent) and (d.manual_ack or keeps_timers(d)) for d in alone):
        return False
    if any(isinstance(d, Sinking) for d in alone) or mixes_keys(one) != mixes_keys(other):
        return False
    return kind_of(one) == kind_of(other) == "tasks" and [p.name for p in one.inputs] == [
        p.name for p in other.inputs
    ]


def _check_writers(definitions: Sequence[Definition]) -> None:
    writers: dict[str, Definition] = {}
    for definition in definitions:
        for output in definition.outputs:
            other = writers.get(output.name)
            if isinstance(output, AppTable) and other is not None:
                raise AppError(
                    f"{definition.location}: {definition.name} writes table {output.name}, which "
                    f"{other.name} ({other.location}) writes already: a table has one writer"
                )
            writers[output.name] = definition


def _check_timers(app: App, definitions: Sequence[Definition]) -> None:
    """An agent's own table of timers must be nobody else's."""
    for definition in definitions:
        if not (isinstance(definition, Agent) and definition.timers and keeps_timers(definition)):
            continue
        name = definition.timers.name
        other = app.streams.get(name) or app.tables.get(name)
        if other is not None:
            raise AppError(
                f"{other.location}: {name} is where agent {definition.name} "
                f"({definition.location}) keeps its timers: choose another name"
            )


def _in_order(definitions: Sequence[Definition]) -> list[Definition]:
    made_by: dict[str, list[Definition]] = {}
    for definition in definitions:
        for output in definition.outputs:
            made_by.setdefault(output.name, []).append(definition)
    done: list[Definition] = []
    trail: list[Definition] = []

    def visit(definition: Definition) -> None:
        if definition in done:
            return
        if definition in trail:
            cycle = [*trail[trail.index(definition) :], definition]
            names = " → ".join(item.name for item in cycle)
            raise AppError(
                f"{definition.location}: {names} is a cycle: each would wait for the other"
            )
        trail.append(definition)
        for source in definition.inputs:
            for maker in made_by.get(source.name, ()):
                visit(maker)
        trail.pop()
        done.append(definition)

    for definition in definitions:
        visit(definition)
    return done


def named(app: App, name: str) -> Any:
    """The stream or table of that name."""
    found = app.streams.get(name) or app.tables.get(name)
    if found is None:
        raise UnknownObjectError(f"app {app.name} has no stream or table {name}")
    return found
