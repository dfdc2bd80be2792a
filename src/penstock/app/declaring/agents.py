"""Declaring agents: their options, and the checks made on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, ParamSpec, TypeVar

from penstock.app.declaring.checks import check_between, check_word, length
from penstock.app.declaring.definitions import CallableAgent
from penstock.app.declaring.location import Location, of_function
from penstock.app.declaring.signature import AgentParts, read_signature
from penstock.app.declaring.streams import AppStream, OnError
from penstock.app.declaring.tables import AppTable, timers_table
from penstock.app.declaring.windows import Duration
from penstock.errors import AppError

if TYPE_CHECKING:
    from penstock.app.declaring.app import App

P = ParamSpec("P")
D = TypeVar("D")
AckMode = Literal["auto", "manual"]
RETRIES_MAX = 100
BATCH_ROWS_MAX = 1_000_000


class AgentOptions(NamedTuple):
    """The arguments of `App.agent`."""

    streams: tuple[AppStream[object], ...]
    state: AppTable[object] | None
    reads: tuple[AppTable[object], ...]
    to: tuple[AppStream[object], ...]
    name: str | None
    on_error: OnError
    retries: int
    backoff: Duration
    batch_rows: int
    ack: AckMode


def declare_agent(app: App, function: Callable[P, D], asked: AgentOptions) -> CallableAgent[P, D]:
    """Check the agent and register it; `AppError` names the file and line of a mistake."""
    where = of_function(function.__code__)
    name = asked.name or function.__name__
    _check_options(app, name, asked, where)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise AppError(f"{where}: agent {name} is async: write it as a plain function")
    parts = AgentParts(name, asked.streams, asked.state, asked.reads, asked.to, where)
    signature = read_signature(function, parts)
    if asked.ack == "manual" and "context" not in signature.arguments:
        raise AppError(
            f"{where}: agent {name} has ack='manual' but no parameter annotated as "
            "penstock.Context: add one, to acknowledge events with"
        )
    dead = app.dead_letters(name, where) if asked.on_error == "dead-letter" else None
    has_keys = all(stream.key is not None for stream in asked.streams)
    extra = [place for place in (asked.state, dead) if place is not None]
    made: CallableAgent[P, D] = CallableAgent(
        name=name,
        inputs=asked.streams,
        outputs=(*asked.to, *extra),
        location=where,
        reads=asked.reads,
        function=function,
        signature=signature,
        state=asked.state,
        on_error=asked.on_error,
        retries=asked.retries,
        backoff_ms=(length(where, asked.backoff, "the backoff") or 0) // 1000,
        batch_rows=asked.batch_rows,
        manual_ack=asked.ack == "manual",
        dead=dead,
        timers=timers_table(app, name, where) if has_keys else None,
    )
    app.define(made)
    return made


def _check_options(app: App, name: str, asked: AgentOptions, where: Location) -> None:
    if not asked.streams:
        raise AppError(f"{where}: agent {name} has no input stream: name at least one")
    own = [] if asked.state is None else [asked.state]
    for given in (*asked.streams, *asked.reads, *asked.to, *own):
        app.check_input(where, name, given)
    if len({stream.name for stream in asked.streams}) < len(asked.streams):
        raise AppError(f"{where}: agent {name} names the same stream twice")
    check_word(where, f"agent {name}: on_error", asked.on_error, OnError)
    check_word(where, f"agent {name}: ack", asked.ack, AckMode)
    keyless = [stream.name for stream in asked.streams if stream.key is None]
    if asked.state is not None and keyless:
        raise AppError(
            f"{where}: agent {name} has a state, but {keyless[0]} has no key: declare the "
            f"stream with key=, or use {keyless[0]}.group_by(…)"
        )
    check_between(where, f"agent {name}: retries", asked.retries, 0, RETRIES_MAX)
    check_between(where, f"agent {name}: batch_rows", asked.batch_rows, 1, BATCH_ROWS_MAX)
