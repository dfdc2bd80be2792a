"""`penstock group`: create, list, show, pause, resume, reset and drop consumer groups."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from penstock.cli.finding import find_stream
from penstock.cli.options import (
    DryRunOption,
    GroupArgument,
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    YesOption,
    examples,
    open_named,
)
from penstock.cli.output import confirm, count, note, say, say_json, table
from penstock.cli.reading import parse_start
from penstock.cli.taking import take_messages
from penstock.groups.control import (
    GroupReport,
    create_group,
    drop_group,
    list_groups,
    reset_group,
    set_paused,
    show_group,
)
from penstock.groups.names import GroupName
from penstock.log.api import Log
from penstock.records.event import JsonValue, from_microseconds

groups = typer.Typer(
    no_args_is_help=True,
    help="Create, list, show and manage consumer groups, and take messages from them.",
)


def register(app: typer.Typer) -> None:
    groups.command(
        "take",
        epilog=examples(
            "penstock group take orders billing -n 10 --json",
            "penstock group take orders billing --peek",
            "penstock group take orders billing --follow --json | ./handle",
        ),
    )(take_messages)
    app.add_typer(groups, name="group")


@groups.command("list", epilog=examples("penstock group list", "penstock group list orders --json"))
def list_all(
    context: typer.Context,
    stream: Annotated[
        str | None,
        typer.Argument(metavar="STREAM", help="Only groups of this stream.", show_default=False),
    ] = None,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List groups: their unacknowledged messages, the age of the oldest, and who coordinates."""
    with open_named(context, log, log_option) as opened:
        of = None if stream is None else str(find_stream(opened, stream).name)
        found = list_groups(opened, of)
    if json:
        for one in found:
            say_json(_as_json(one))
        return
    if not found:
        note("there are no groups: create one with `penstock group create STREAM GROUP`")
        return
    table(
        ["stream", "group", "lag", "oldest", "state"],
        [[one.stream, one.name, str(one.lag), _age(one), _state(one)] for one in found],
    )


@groups.command("show", epilog=examples("penstock group show orders billing"))
def show(
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show how far a group has acknowledged each partition, and how much is left."""
    with open_named(context, log, log_option) as opened:
        found = show_group(opened, _find(opened, stream, group))
    if json:
        say_json(_as_json(found))
        return
    since = from_microseconds(found.created_us).isoformat(sep=" ", timespec="seconds")
    say(f"{found.stream}/{found.name}: {_state(found)}; since {since}")
    oldest = "" if found.lag_s is None else f"; the oldest is {_age(found)} old"
    replayed = f", {found.replayed} of them replayed" if found.replayed else ""
    say(f"{count(found.lag, 'unacknowledged message')}{replayed}{oldest}")
    table(
        ["partition", "acknowledged up to", "end", "lag"],
        [[str(p.partition), str(p.floor), str(p.next), str(p.lag)] for p in found.partitions],
    )


@groups.command(
    "create",
    epilog=examples(
        "penstock group create orders billing",
        "penstock group create orders billing --from latest",
    ),
)
def create(
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where it starts: earliest, latest, an offset, or a time of append.",
        ),
    ] = "earliest",
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Create a group before any program opens it, to fix where it starts."""
    where = parse_start(start)
    with open_named(context, log, log_option) as opened:
        name = _find(opened, stream, group)
        create_group(opened, name, where)
    _say_done("created", name, json)


@groups.command("pause", epilog=examples("penstock group pause orders billing"))
def pause(
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Pause a group: within about a second, it delivers no more messages.

    Messages that it has already delivered stay delivered.
    """
    _set_paused(context, stream, group, True, json, log, log_option)


@groups.command("resume", epilog=examples("penstock group resume orders billing"))
def resume(
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Resume a paused group."""
    _set_paused(context, stream, group, False, json, log, log_option)


def _set_paused(
    context: typer.Context,
    stream: str,
    group: str,
    paused: bool,
    json: bool,
    log: str | None,
    log_option: list[str] | None,
) -> None:
    with open_named(context, log, log_option) as opened:
        name = _find(opened, stream, group)
        set_paused(opened, name, paused)
    _say_done("paused" if paused else "resumed", name, json)


@groups.command(
    "reset",
    epilog=examples(
        "penstock group reset orders billing --from earliest --dry-run",
        "penstock group reset orders billing --from 2026-11-15T10:00:00Z --yes",
    ),
)
def reset(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where to start: earliest, latest, an offset, or a time of append.",
        ),
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Move a group to another position: messages before it count as acknowledged, none after it.

    Moving back delivers acknowledged messages again; moving forward skips messages. Refused while
    a process coordinates the group.
    """
    where = parse_start(start)
    with open_named(context, log, log_option) as opened:
        name = _find(opened, stream, group)
        moved = reset_group(opened, name, where, dry_run=True)
        if not dry_run:
            what = f"group {name} to {start}"
            confirm(f"Reset {what}?", f"this would reset {what}", yes=yes)
            moved = reset_group(opened, name, where)
    for partition, (before, after) in sorted(moved.items()):
        if json:
            say_json({"partition": partition, "from": before, "to": after, "dry_run": dry_run})
        else:
            say(f"{name} partition {partition}: {before} → {after}")


@groups.command("drop", epilog=examples("penstock group drop orders billing --yes"))
def drop(
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Drop a group, including what it has acknowledged. Its dead letters are kept.

    If it is opened again, it starts afresh. Refused while a process coordinates the group.
    """
    with open_named(context, log, log_option) as opened:
        name = GroupName.parse(stream, group)
        show_group(opened, name)
        what = f"group {name}, including what it has acknowledged"
        confirm(f"Drop {what}?", f"this would drop {what}", yes=yes)
        drop_group(opened, name)
    _say_done("dropped", name, json)


def _find(log: Log, stream: str, group: str) -> GroupName:
    return GroupName.parse(str(find_stream(log, stream).name), group)


def _say_done(what: str, group: GroupName, json: bool) -> None:
    if json:
        say_json({what: {"stream": group.stream, "group": group.name}})
    else:
        say(f"{what} {group}")


def _as_json(report: GroupReport) -> JsonValue:
    shown: dict[str, JsonValue] = msgspec.to_builtins(report)
    del shown["created_us"]
    created = from_microseconds(report.created_us).isoformat().replace("+00:00", "Z")
    return {**shown, "created": created}


def _state(report: GroupReport) -> str:
    by = report.coordinator
    who = "not running" if by is None else f"coordinated by {by}"
    return f"paused, {who}" if report.is_paused else who


def _age(report: GroupReport) -> str:
    return "" if report.lag_s is None else f"{report.lag_s:,.0f} s"
