"""What runs each kind of definition: one row per kind, the only place to change for a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.app.declaring.definitions import (
    Agent,
    CallableAgent,
    DeadLetters,
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
from penstock.app.declaring.tables import AppTable
from penstock.app.running.feeds import FeedQuery
from penstock.app.running.listeners import ListenQuery
from penstock.app.running.positions import BatchPosition, FeedPosition
from penstock.app.running.query import Query
from penstock.app.running.sinks import SinkQuery, SinkWork
from penstock.app.tasks.agents import AgentWork
from penstock.app.tasks.damage import DamageWork
from penstock.app.tasks.joins import LookupWork, RekeyWork, TableJoinWork
from penstock.app.tasks.task import Work
from penstock.errors import AppError

RunsAs = Literal["tasks", "frames", "process"]


@dataclass(frozen=True)
class Kind:
    """How definitions of one kind run.

    As `tasks`, `work` handles each share of a batch, and `query` chooses batches and commits them.
    As `frames`, Spark analyzes their function first. In the runner's own `process`, `query` is
    made from the log, the run and the definition. Messages call the kind by its `name`, or by its
    `table_name` if it makes a table.
    """

    name: str
    runs_as: RunsAs
    work: Callable[[str, Any], Work] | None = None
    query: type[Any] = Query
    table_name: str | None = None

    @property
    def position(self) -> type[BatchPosition | FeedPosition] | None:
        """The class of the saved position, if there is one."""
        found: type[BatchPosition | FeedPosition] | None = self.query.position_kind
        return found

    def make_work(self, app: str, definition: Definition) -> Work:
        """What a task does with its share of a batch."""
        if self.work is None:
            raise AppError(f"{definition.location}: {definition.name} cannot run as tasks")
        return self.work(app, definition)


KINDS: dict[type[Definition], Kind] = {
    Agent: Kind("an agent", "tasks", AgentWork),
    CallableAgent: Kind("an agent", "tasks", AgentWork),
    Derivation: Kind("a derived stream", "frames", table_name="a derived table"),
    StreamJoin: Kind("a join of streams", "frames"),
    Rekey: Kind("a copy of a stream under another key", "tasks", RekeyWork),
    Lookup: Kind("a lookup", "tasks", LookupWork),
    TableJoin: Kind("a join of tables", "tasks", TableJoinWork),
    DeadLetters: Kind("a stream of dead letters", "tasks", DamageWork),
    Sinking: Kind("a sink", "tasks", SinkWork, SinkQuery),
    Feed: Kind("a feed", "process", query=FeedQuery),
    Listening: Kind("a listener", "process", query=ListenQuery),
}


def kind_of(definition: Definition) -> Kind:
    return KINDS[type(definition)]


def describe_kind(definition: Definition) -> str:
    """What messages call it."""
    kind = kind_of(definition)
    is_table = any(isinstance(place, AppTable) for place in definition.outputs)
    return kind.table_name if is_table and kind.table_name is not None else kind.name


def can_share(one: Definition, other: Definition) -> bool:
    """Whether two definitions may run as one query: they have the same inputs, and nothing of
    their own limits how far a batch may go."""
    return (
        one.can_share
        and other.can_share
        and one.mixes_keys == other.mixes_keys
        and kind_of(one).runs_as == kind_of(other).runs_as == "tasks"
        and [place.name for place in one.inputs] == [place.name for place in other.inputs]
    )
