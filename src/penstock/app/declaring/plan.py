"""The plan of an app: its definitions, checked as a whole and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.app.declaring.app import App
from penstock.app.declaring.definitions import Agent, Definition
from penstock.app.declaring.tables import AppTable
from penstock.errors import AppError, UnknownObjectError


@dataclass(frozen=True, eq=False)
class Plan:
    """Definitions in an order in which each comes after those that write its inputs, unless they
    form a cycle.
    """

    app: App
    definitions: tuple[Definition, ...]

    def only(self, names: Sequence[str]) -> Plan:
        """The plan with only these definitions (no names: all of them); `UnknownObjectError` for an
        unknown name."""
        known = {definition.name for definition in self.definitions}
        for name in names:
            if name not in known:
                raise UnknownObjectError(
                    f"app {self.app.name} has no definition {name}: it has "
                    f"{', '.join(sorted(known))}"
                )
        chosen = tuple(d for d in self.definitions if not names or d.name in names)
        return Plan(self.app, chosen)


def plan(app: App) -> Plan:
    """Check the app as a whole. Raises `AppError` with the file and line of a mistake."""
    definitions = list(app.definitions.values())
    _check_writers(definitions)
    _check_timers(app, definitions)
    return Plan(app, tuple(_in_order(definitions)))


def _check_writers(definitions: Sequence[Definition]) -> None:
    writers: dict[str, Definition] = {}
    for definition in definitions:
        for output in definition.outputs:
            other = writers.get(output.name)
            if isinstance(output, AppTable) and other is not None:
                raise AppError(
                    f"{definition.location}: {definition.name} writes table {output.name}, which "
                    f"{other.name} ({other.location}) already writes: a table can have only one "
                    "writer"
                )
            writers[output.name] = definition


def _check_timers(app: App, definitions: Sequence[Definition]) -> None:
    """No stream or table may have the name of an agent's table of timers."""
    for definition in definitions:
        if not (isinstance(definition, Agent) and definition.timers and definition.keeps_timers):
            continue
        name = definition.timers.name
        other = app.streams.get(name) or app.tables.get(name)
        if other is not None:
            raise AppError(
                f"{other.location}: the name {name} is taken by the timers of agent "
                f"{definition.name} ({definition.location}): choose another name"
            )


def _in_order(definitions: Sequence[Definition]) -> list[Definition]:
    """Sort writers before readers. A cycle of streams is allowed, for example for retries: each
    event goes round on its own. A cycle in which a definition would wait for itself is an error.
    """
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
            _check_circle(trail[trail.index(definition) :])
            return
        trail.append(definition)
        for source in definition.inputs:
            for maker in made_by.get(source.name, ()):
                visit(maker)
        trail.pop()
        done.append(definition)

    for definition in definitions:
        visit(definition)
    return done


def _check_circle(circle: Sequence[Definition]) -> None:
    """Raise if a definition of the cycle waits for the time of its events: fed by its own output,
    it would never close its last window."""
    for definition in circle:
        if definition.waits_for_time:
            names = " → ".join(item.name for item in (*circle, circle[0]))
            raise AppError(
                f"{definition.location}: {names} is a cycle in which {definition.name} would wait "
                "for itself: feed it from a stream that does not depend on it"
            )
