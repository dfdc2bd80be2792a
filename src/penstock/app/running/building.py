"""From a plan to a runner: what is checked, created and taken over before anything runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from penstock.app.declaring.definitions import Agent, Definition
from penstock.app.declaring.plan import Plan
from penstock.app.running.backends import Backend, Runnable
from penstock.app.running.kinds import can_share, describe_kind, kind_of
from penstock.app.running.positions import (
    AppRun,
    BatchPosition,
    CheckpointPosition,
    FeedPosition,
    Mover,
    Position,
    SinkPosition,
    StartPosition,
    producer_name,
    query_name,
)
from penstock.app.running.query import Clock, QueryLimits
from penstock.app.running.runner import Runner, RunnerOptions
from penstock.app.running.saved import (
    SavedDefinition,
    World,
    describe_definition,
    find_objection,
    raise_objection,
    read_saved,
)
from penstock.app.running.streams import make_streams
from penstock.app.running.takeover import claim
from penstock.app.tasks.timers import unpack_timer
from penstock.errors import PlanChangedError
from penstock.log.api import Log


def build(
    log: Log,
    plan: Plan,
    backend: Backend,
    *,
    limits: QueryLimits = QueryLimits(),
    options: RunnerOptions = RunnerOptions(),
    clock: Clock | None = None,
    run: AppRun | None = None,
) -> Runner:
    """A runner for the plan: creates the streams it needs, and groups definitions into queries.

    Takes the definitions over from any other run.
    """
    check_plan(log, plan)
    make_streams(log, plan)
    run = run or AppRun(plan.app.name, secrets.token_hex(8))
    queries: list[Runnable] = []
    tasks: list[Definition] = []
    for definition in plan.definitions:
        kind = kind_of(definition)
        match kind.runs_as:
            case "frames":
                queries.append(backend.frames(log, run, definition))
            case "process":
                if kind.position is not None:
                    claim_groups(log, run, [definition])
                queries.append(kind.query(log, run, definition))
            case "tasks":
                tasks.append(definition)
    for group in claim_groups(log, run, tasks):
        works = [kind_of(definition).make_work(run.app, definition) for definition in group]
        executor = backend.executor(log, works)
        query = kind_of(group[0]).query
        queries.append(query(log, run, group, executor, limits=limits, clock=clock))
    return Runner(log, plan, queries, options, backend.is_alive, run.check)


def check_plan(log: Log, plan: Plan) -> None:
    """Raise `PlanChangedError` if a definition has changed so that it cannot continue."""
    app = plan.app
    begun = {key.split("/", 2)[2] for key in log.progress_items(f"app/{app.name}/")}
    saved = {name: was for name, was in read_saved(log, app.name).items() if name in begun}
    gone = {name: was for name, was in saved.items() if name not in app.definitions}
    ids = stream_ids(log)
    for definition in plan.definitions:
        before, now = saved.get(definition.name), describe(definition, ids)
        is_new = definition.name not in begun
        if is_new or before is not None:
            timers = _timers_set(log, definition, before, now)
            world = World(gone if is_new else {}, timers)
            raise_objection(definition, find_objection(definition.name, before, now, world))


def stream_ids(log: Log) -> dict[str, int]:
    return {str(stream.name): stream.id for stream in log.streams()}


def describe(
    definition: Definition, ids: Mapping[str, int], plan: str | None = None
) -> SavedDefinition:
    """A definition in the form that is saved, with the current ids of its inputs."""
    inputs = {place.name: ids.get(place.name) for place in definition.inputs}
    return describe_definition(definition, describe_kind(definition), inputs, plan)


def _timers_set(
    log: Log, definition: Definition, before: SavedDefinition | None, now: SavedDefinition
) -> set[str]:
    """The names of timers that are set; read only if the function of one may be missing."""
    if not isinstance(definition, Agent) or definition.timers is None or before is None:
        return set()
    if before.version > 1 and not set(before.timers) - set(now.timers):
        return set()
    if definition.timers.name not in stream_ids(log):
        return set()
    entries = (entry for page in log.snapshot(definition.timers.name) for entry in page)
    names = (unpack_timer(entry.key).name for entry in entries)
    return {name for name in names if name is not None}


def claim_groups(
    log: Log, run: AppRun, definitions: Sequence[Definition]
) -> list[list[Definition]]:
    """The definitions in groups that share a query, taken over by this run."""
    groups: list[list[Definition]] = []

    def decide(found: Mapping[str, Position | None]) -> dict[str, Position | None]:
        groups[:] = _group(definitions, found)
        decided: dict[str, Position | None] = {}
        for group in groups:
            mover = Mover(producer_name(run.app, query_name(group)), run.token)
            for definition in group:
                position = take_over(found[definition.name], definition)
                decided[definition.name] = msgspec.structs.replace(position, mover=mover)
        return decided

    if definitions:
        ids = stream_ids(log)
        saved = {definition.name: describe(definition, ids) for definition in definitions}
        claim(log, run.app, list(saved), decide, saved, run.check)
    return groups


def take_over(found: Position | None, definition: Definition) -> Position:
    """The position from which a definition continues; raises `PlanChangedError` if it cannot."""
    kind = kind_of(definition).position
    assert kind is not None  # noqa: S101  only those that have a position are taken over
    match found:
        case None:
            return kind()
        case CheckpointPosition():
            raise PlanChangedError(
                f"{definition.location}: {definition.name} used to keep state in Spark and no "
                f"longer does: `penstock reset APP {definition.name}` restarts it from the "
                "beginning"
            )
        case FeedPosition():
            return found
        case _ if kind is FeedPosition:  # earlier versions saved offsets of its stream
            return FeedPosition(taken=sum(n for ends in found.next.values() for n in ends.values()))
        case _ if isinstance(found, kind):
            return found
    # It was reset, or an earlier version saved it before its sink had decided anything.
    return (SinkPosition if kind is SinkPosition else BatchPosition)(next=found.next, ids=found.ids)


def _group(
    definitions: Sequence[Definition], found: Mapping[str, Position | None]
) -> list[list[Definition]]:
    """Group the definitions that can share a query and are at the same position."""
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


def _place(position: Position | None) -> object:
    match position:
        case BatchPosition():
            return position.next, position.again
        case StartPosition():
            return position.next, {}
    return {}, {}
