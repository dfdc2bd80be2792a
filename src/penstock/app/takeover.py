"""Taking definitions over: who runs them, said in the log before anything is handled.

A runner may group definitions into queries as it likes, so the name under which a query
commits changes. Each definition's position names the producer that may move it. To take it
over, a runner fences that producer, reads the position again, and commits it under its own
name; all runners of an app do this as one producer, so that two cannot do it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.app.definitions import Definition
from penstock.app.plan import Plan, can_share
from penstock.app.positions import (
    Position,
    Run,
    producer_name,
    progress_key,
    query_name,
    saved_position,
)
from penstock.app.saved import Saved, check_change, form_of, saved_definitions, saved_key
from penstock.errors import FencedError, LogBusyError, PlanChangedError
from penstock.log.api import Commit, Log
from penstock.log.commit import next_sequence

TRIES_MAX = 20
CLAIMS = "+claims"
"""No query is called so: a name begins with a letter or digit."""
Decide = Callable[[Mapping[str, Position | None]], Mapping[str, Position | None]]


def claim(
    log: Log,
    app: str,
    names: Sequence[str],
    decide: Decide,
    forms: Mapping[str, Saved | None],
    check: Callable[[], None] = lambda: None,
) -> dict[str, Position]:
    """Fence whoever runs these definitions, and save the positions that `decide` makes of theirs.

    `decide` is given the saved positions, which nobody can move any more, and may be called
    several times. `forms` are saved with them. `check` says whether this run may still do so.
    """
    for _ in range(TRIES_MAX):
        holder = log.hold(producer_name(app, CLAIMS))
        check()
        found = fenced_positions(log, app, names)
        decided = decide(found)
        sequence = next_sequence(log, holder.producer)
        progress = {
            progress_key(app, name): None if position is None else msgspec.json.encode(position)
            for name, position in decided.items()
        }
        progress |= {
            saved_key(app, name): None if form is None else msgspec.json.encode(form)
            for name, form in forms.items()
        }
        try:
            log.commit(holder, sequence, Commit(progress=progress))
        except FencedError:
            continue  # another runner claims at this moment: look again at what it has done
        return {name: position for name, position in decided.items() if position is not None}
    raise LogBusyError(f"several runners of app {app} take over from each other: stop one of them")


def fenced_positions(log: Log, app: str, names: Sequence[str]) -> dict[str, Position | None]:
    """The positions, after every producer that could move one was fenced."""
    fenced: set[str] = set()
    while True:
        found = {name: saved_position(log, app, name) for name in names}
        others = {p.producer for p in found.values() if p is not None and p.producer} - fenced
        if not others:
            return found
        for producer in others:
            log.hold(producer)
        fenced |= others


def claimed_groups(log: Log, run: Run, definitions: Sequence[Definition]) -> list[list[Definition]]:
    """Definitions in groups that share a query, claimed for this runner."""
    groups: list[list[Definition]] = []

    def decide(found: Mapping[str, Position | None]) -> dict[str, Position | None]:
        groups[:] = _grouped(definitions, found)
        decided: dict[str, Position | None] = {}
        for group in groups:
            producer = producer_name(run.app, query_name(group))
            for definition in group:
                position = taken_over(found[definition.name], definition)
                decided[definition.name] = msgspec.structs.replace(
                    position, producer=producer, run=run.token
                )
        return decided

    if definitions:
        forms = {definition.name: form_of(definition) for definition in definitions}
        claim(log, run.app, list(forms), decide, forms, run.check)
    return groups


def check_plan(log: Log, plan: Plan) -> None:
    """Raise `PlanChangedError` if a definition of the plan is not what it was before."""
    app = plan.app
    begun = {key.split("/", 2)[2] for key in log.progress_items(f"app/{app.name}/")}
    saved = {name: form for name, form in saved_definitions(log, app.name).items() if name in begun}
    gone = {name: form for name, form in saved.items() if name not in app.definitions}
    for definition in plan.definitions:
        is_new = definition.name not in begun
        check_change(definition, saved.get(definition.name), gone if is_new else {})


def taken_over(found: Position | None, definition: Definition) -> Position:
    """Where a definition goes on; raises `PlanChangedError` if it cannot."""
    if found is None:
        return Position(producer="", sequence=0, next={})
    if found.checkpoint:
        raise PlanChangedError(
            f"{definition.location}: {definition.name} kept state in Spark before, and has none "
            f"now: `penstock reset APP {definition.name}` lets it start again"
        )
    return found


def _grouped(
    definitions: Sequence[Definition], found: Mapping[str, Position | None]
) -> list[list[Definition]]:
    """Definitions that can share a query, and are at the same place, together."""
    groups: list[list[Definition]] = []
    for definition in definitions:
        for group in groups:
            there = _place(found[group[0].name]) == _place(found[definition.name])
            if there and can_share(group[0], definition):
                group.append(definition)
                break
        else:
            groups.append([definition])
    return groups


def _place(saved: Position | None) -> object:
    return ({}, {}) if saved is None else (saved.next, saved.again)
