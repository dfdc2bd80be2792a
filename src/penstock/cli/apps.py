"""`penstock run`, `reset`, `prepare` and `agent list`: apps on Spark."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.live import Live
from rich.table import Table

from penstock.app.declaring.app import App
from penstock.app.declaring.definitions import Agent, Definition
from penstock.app.declaring.plan import plan
from penstock.app.declaring.streams import AppStream
from penstock.app.running.loading import load_app
from penstock.app.running.positions import read_position
from penstock.app.running.query import QueryLimits
from penstock.app.running.rename import rename_definition
from penstock.app.running.reports import agent_rows
from penstock.app.running.reset import Output, default_checkpoints, reset_query
from penstock.app.running.runner import QueryStatus, Runner
from penstock.app.running.saved import SavedDefinition, read_saved
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    UntilIdleOption,
    YesOption,
    examples,
    log_url,
    open_named,
    open_to_read,
    parse_options,
    parse_setting,
)
from penstock.cli.output import confirm, note, say, say_json, stderr, stopping, table
from penstock.connect.credentials import BY_NAME
from penstock.errors import PenstockError, UnknownObjectError, UsageError
from penstock.log.api import Count, Log
from penstock.log.declaring.names import guess

REFRESH_S = 0.5
LINES_S = 5.0
IDLE_TIMEOUT_S = 86_400.0

AppArgument = Annotated[
    str, typer.Argument(metavar="APP", help="A file (shop.py) or module, with :NAME if needed.")
]
CheckpointsOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoints",
        metavar="DIR",
        help="Directory for Spark's state. Default: the log's path with the suffix .spark; for "
        "Kafka, penstock.spark in the current directory.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        "run",
        epilog=examples(
            "penstock run shop.py",
            "penstock run shop.py --until-idle",
            "penstock run words.py -- --texts 127.0.0.1:7000",
        ),
    )(run)
    app.command(
        "reset",
        epilog=examples(
            "penstock reset shop.py spend", "penstock reset shop.py spend --output clear --yes"
        ),
    )(reset)
    app.command("rename", epilog=examples("penstock rename shop.py spend spent"))(rename)
    app.command("prepare", epilog=examples("penstock prepare"))(prepare)
    agents = typer.Typer(
        no_args_is_help=True, help="Show where agents are running and how far they have read."
    )
    agents.command("list", epilog=examples("penstock agent list", "penstock agent list --json"))(
        list_agents
    )
    app.add_typer(agents, name="agent")


def run(  # noqa: PLR0913  a parameter for each option
    context: typer.Context,
    app: AppArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENT",
            help="Arguments for the app itself, in sys.argv.",
            show_default=False,
        ),
    ] = None,
    master: Annotated[
        str, typer.Option("--master", metavar="URL", help="Spark's master URL.")
    ] = "local[*]",
    checkpoints: CheckpointsOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Run only this definition; may be repeated."),
    ] = None,
    until_idle: UntilIdleOption = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="If another process runs the app, end it instead of standing by."
        ),
    ] = False,
    batch_rows: Annotated[
        int,
        typer.Option(
            "--batch-rows", metavar="N", min=1, help="Maximum number of events in a batch."
        ),
    ] = QueryLimits().batch_rows_max,
    json: JsonOption = False,
    log: LogOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            "-s",
            metavar="NAME=VALUE",
            help=f"A setting of Spark (spark.…) or of the log; may be repeated. {BY_NAME}",
            rich_help_panel="Log",
        ),
    ] = None,
) -> None:
    """Run an app (derived streams and tables, agents, joins) until it is stopped.

    Creates the streams and tables that the app declares. On Ctrl-C or SIGTERM, every query
    finishes its batch before the command exits. Exits with 1 if a query was given up.
    """
    conf, log_option = split_settings(settings or [])
    folder = _checkpoints(context, log, checkpoints)
    stop = threading.Event()
    finishing = stopping(stop, "waiting for each query to finish its batch")
    with contextlib.ExitStack() as early:
        loaded = load_app(app, arguments or [], lambda: start_early(early, master, conf, folder))
        check_defined(loaded, only or [])
        opened = early.enter_context(open_named(context, log, log_option, create=True))
        early.enter_context(finishing)
        # Spark is loaded only by those who run an app.
        from penstock.spark.running import running

        with running(
            loaded,
            opened,
            master=master,
            checkpoints=folder,
            only=only or [],
            batch_rows=batch_rows,
            settings=conf,
            log_options=parse_options(log_option),
            tell=lambda what: note(f"{loaded.name}: {what} …"),
            stop=stop,
            take_over=take_over,
        ) as runner:
            _watch(runner, stop, until_idle=until_idle, as_json=json)
        if json:
            say_json({"queries": runner.statuses()})
    failure = runner.failure()
    if failure is not None:
        raise failure


def start_early(
    stack: contextlib.ExitStack, master: str, settings: dict[str, str], folder: Path
) -> None:
    """Start Spark before the app is loaded, whose module needs it for that; ended with `stack`."""
    from penstock.spark.session import close_session, open_session

    note(f"the app needs Spark while it is imported: starting Spark ({master}) …")
    folder.mkdir(parents=True, exist_ok=True)
    stack.callback(close_session, open_session(master, "penstock", settings, folder / "spark.log"))


def split_settings(items: list[str]) -> tuple[dict[str, str], list[str]]:
    """Spark's settings, and the others, which are the log's."""
    parsed = {item: parse_setting(item) for item in items}
    spark = dict(found for found in parsed.values() if found[0].startswith("spark."))
    return spark, [item for item, (name, _) in parsed.items() if name not in spark]


def check_defined(loaded: App, names: list[str]) -> None:
    """Raise for a definition that the app does not have; names the nearest."""
    known = [definition.name for definition in plan(loaded).definitions]
    for name in names:
        if name not in known:
            hint = guess(name, known)
            raise UnknownObjectError(
                f"app {loaded.name} has no definition {name}: {f'{hint} ' if hint else ''}"
                f"it defines {', '.join(sorted(known))}"
            )


def _checkpoints(context: typer.Context, log: str | None, given: Path | None) -> Path:
    if given is not None:
        return given.resolve()
    return default_checkpoints(log_url(context, log))


def _watch(runner: Runner, stop: threading.Event, *, until_idle: bool, as_json: bool) -> None:
    shown = stderr.is_terminal and not as_json
    live = Live(view(runner), console=stderr, auto_refresh=False) if shown else None
    next_line = time.monotonic() + LINES_S
    with live or contextlib.nullcontext():
        while not stop.wait(REFRESH_S if not until_idle else 0.05):
            if live is not None:
                live.update(view(runner), refresh=True)
            elif time.monotonic() >= next_line:
                next_line = time.monotonic() + LINES_S
                for status in runner.statuses():
                    _line(status, as_json)
            if runner.is_over() or (until_idle and (runner.failure() or runner.is_idle())):
                break
        if live is not None:
            live.update(view(runner), refresh=True)


def _line(status: QueryStatus, as_json: bool) -> None:
    if as_json:
        say_json(status)
        return
    note(
        f"{status.name}: {status.state}, {status.rate:,.0f} events/s, "
        f"lag {Count(status.lag, status.lag_is_exact)}, "
        f"batch {status.batch_ms:,.0f} ms, hop {status.hop_ms:,.0f} ms"
        + (f"; {status.error.splitlines()[0]}" if status.error else "")
    )


def view(runner: Runner) -> Table:
    """The live view: a line for each query."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("query", "state", "in", "out", "events/s", "lag", "batch", "hop"):
        grid.add_column(name, justify="left" if name in ("query", "state") else "right")
    for status in runner.statuses():
        color = {"running": "green", "failed": "red", "restarting": "yellow"}.get(status.state, "")
        grid.add_row(
            status.name,
            f"[{color}]{status.state}[/]" if color else status.state,
            f"{status.rows_in:,}",
            f"{status.rows_out:,}",
            f"{status.rate:,.0f}",
            str(Count(status.lag, status.lag_is_exact)),
            f"{status.batch_ms:,.0f} ms",
            f"{status.hop_ms:,.0f} ms",
        )
    return grid


def reset(  # noqa: PLR0913  a parameter for each option
    context: typer.Context,
    app: AppArgument,
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help="The definition to reset, or several as a+b."),
    ],
    start: Annotated[
        Literal["earliest", "latest"],
        typer.Option("--from", metavar="WHERE", help="Where to start: earliest or latest."),
    ] = "earliest",
    output: Annotated[
        Literal["keep", "clear"],
        typer.Option("--output", help="Keep the query's output, or empty its streams and tables."),
    ] = "keep",
    checkpoints: CheckpointsOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Reset a query: discard its position and the state that Spark keeps for it.

    With `--output clear`, asks for confirmation; without a terminal, `--yes` is required.
    """
    folder = _checkpoints(context, log, checkpoints)
    with contextlib.ExitStack() as early:
        loaded = load_app(app, (), lambda: start_early(early, "local[1]", {}, folder))
    names = query.split("+")
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(open_named(context, log, log_option))
        except PenstockError:
            check_defined(loaded, names)  # that is the nearer mistake
            raise
        gone = {
            name: form
            for name, form in read_saved(opened, loaded.name).items()
            if name not in loaded.definitions
        }
        check_defined(loaded, [name for name in names if name not in gone])
        made = {
            name: _own_outputs(opened, loaded, gone[name])
            if name in gone
            else _outputs_of(loaded, loaded.definitions[name], output)
            for name in names
        }
        if output == "clear":
            emptied = ", ".join(place for places in made.values() for place in places)
            confirm(f"Empty {emptied}?", f"this would empty {emptied}", yes=yes)
        for name in names:
            inputs = () if name in gone else loaded.definitions[name].triggers
            done = reset_query(
                opened,
                loaded.name,
                name,
                start=start,
                output=output,
                inputs=inputs,
                outputs=made[name],
                checkpoints=folder,
            )
            if json:
                say_json(done)
            else:
                what = f"; emptied {', '.join(done.cleared)}" if done.cleared else ""
                state = f"discarded {name}" if name in gone else f"reset {name} to {start}"
                say(f"{state}{what}")


def _own_outputs(log: Log, loaded: App, form: SavedDefinition) -> tuple[str, ...]:
    """What a definition that is not there any more has made, unless others have made it too."""
    others = {
        place.name
        for definition in loaded.definitions.values()
        if read_position(log, loaded.name, definition.name) is not None
        for place in definition.outputs
    }
    return tuple(name for name in (*form.tables, *form.streams) if name not in others)


def rename(
    context: typer.Context,
    app: AppArgument,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The definition's old name.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Continue a renamed definition from its old position, with the table it already has.

    The app must not be running.
    """
    with contextlib.ExitStack() as early:
        folder = _checkpoints(context, log, None)
        loaded = load_app(app, (), lambda: start_early(early, "local[1]", {}, folder))
    check_defined(loaded, [new])
    if old in loaded.definitions:
        raise UsageError(f"app {loaded.name} still defines {old}: rename it there first")
    with open_named(context, log, log_option) as opened:
        done = rename_definition(opened, loaded.name, old, new)
    if json:
        say_json(done)
    else:
        say(f"renamed {old} to {new}: it continues from the same position")


def _outputs_of(loaded: App, definition: Definition, output: Output) -> tuple[str, ...]:
    """The streams and tables of a definition; raises if one is to be cleared and is not its own."""
    places = [*definition.outputs]
    if isinstance(definition, Agent) and definition.timers and definition.keeps_timers:
        places.append(definition.timers)
    outputs = tuple(place.name for place in places)
    if output == "clear":
        shared = [
            place.name
            for place in definition.outputs
            if isinstance(place, AppStream)
            for other in loaded.definitions.values()
            if other is not definition and place.name in [o.name for o in other.outputs]
        ]
        if shared:
            raise UsageError(f"{shared[0]} cannot be cleared: other definitions write to it too")
    return outputs


def prepare(json: JsonOption = False) -> None:
    """Make Spark start faster: loading classes takes a third of its start time.

    Stores the loaded classes in a file of about 170 MB in the user's cache, for this version of
    Java and Spark. Takes about half a minute, once.
    """
    from penstock.spark.preparing import prepare as make

    with stderr.status("starting Spark once to store the classes that it loads …"):
        made = make()
    size = made.stat().st_size
    if json:
        say_json({"file": str(made), "bytes": size})
    else:
        say(f"prepared Spark ({made}, {size / 1e6:,.0f} MB)")


def list_agents(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show each agent's partitions, offsets, workers and lag, and whether it is running."""
    with open_to_read(context, log, log_option) as opened:
        rows = agent_rows(opened)
    if json:
        for row in rows:
            say_json(row)
        return
    if not rows:
        note("no app has run on this log yet")
        return
    columns = ("app", "agent", "stream", "partition", "offset", "lag", "worker", "state")
    table(columns, [[getattr(row, column) for column in columns] for row in rows])
