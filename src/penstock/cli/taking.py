"""`penstock group take`: print messages of a group, and acknowledge them once they are printed."""

from __future__ import annotations

import threading
import time
from typing import Annotated

import typer

from penstock.cli.finding import find_stream
from penstock.cli.formats import event_text
from penstock.cli.options import (
    GroupArgument,
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    open_named,
    parse_duration,
)
from penstock.cli.output import flush, note, say, say_json, stopping
from penstock.errors import GroupBusyError, UsageError
from penstock.groups.control import show_group
from penstock.groups.group import DELIVERIES_MAX, Group
from penstock.groups.messages import GroupMessage
from penstock.groups.names import GroupName
from penstock.groups.outcomes import GroupRules
from penstock.log.batch import json_row

TOGETHER = 100
"""How many messages are printed and then acknowledged together."""
TURN_S = 0.5
RULES = GroupRules(deliveries_max=DELIVERIES_MAX, lease_s=24 * 3600)
"""Whoever looks at messages makes no dead letters of them."""
COORDINATED_S = 15.0
"""How long it waits for a process that coordinated the group and was killed just now."""


def take_messages(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    group: GroupArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Maximum number of messages.")
    ] = 1,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print all messages and wait for more; ignores --limit."
        ),
    ] = False,
    peek: Annotated[
        bool,
        typer.Option("--peek", help="Do not acknowledge: give the messages back afterwards."),
    ] = False,
    wait: Annotated[
        str,
        typer.Option("--wait", metavar="DURATION", help="Exit after this long without a message."),
    ] = "1s",
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Take messages of a group, print them, and acknowledge them.

    A message is acknowledged once it is written to standard output; killed before that, the command
    has taken nothing. A group that another process coordinates is refused. With `--json` one
    object per line: that of `penstock read`, with the number of deliveries.
    """
    if peek and follow:
        raise UsageError(
            "--peek and --follow cannot be combined: --peek gives messages back at the end"
        )
    wait_s = parse_duration(wait, "--wait") / 1000
    stop = threading.Event()
    with (
        open_named(context, log, log_option) as opened,
        stopping(stop, "what was printed is acknowledged"),
    ):
        name = GroupName.parse(str(find_stream(opened, stream).name), group)
        show_group(opened, name)
        with Group[object](opened, *name, rules=RULES) as members:
            deadline = time.monotonic() + COORDINATED_S
            while not members.is_coordinating and not stop.is_set():
                if time.monotonic() > deadline:
                    who = show_group(opened, name).coordinator or "another process"
                    raise GroupBusyError(
                        f"group {name} is coordinated by {who}: take its messages there, or stop it"
                    )
                stop.wait(0.05)
            found = _print(members, None if follow else limit, wait_s, stop, peek=peek, json=json)
    if not found and not follow:
        note(f"group {name} has no message to hand out now")


def _print(
    members: Group[object],
    limit: int | None,
    wait_s: float,
    stop: threading.Event,
    *,
    peek: bool,
    json: bool,
) -> int:
    """Print messages until there are enough, or no more come; how many there were."""
    found = 0
    last = time.monotonic()
    while not stop.is_set() and (limit is None or found < limit):
        most = TOGETHER if limit is None else min(TOGETHER, limit - found)
        messages = members.take_many(most, min(TURN_S, wait_s))
        if messages:
            last = time.monotonic()
        elif limit is not None and time.monotonic() - last >= wait_s:
            break
        for message in messages:
            _show(message, json)
        flush()
        if messages and not peek:
            members.ack(messages).result()
        found += len(messages)
    return found


def _show(message: GroupMessage[object], json: bool) -> None:
    if json:
        first = message.first_delivered.isoformat().replace("+00:00", "Z")
        more = {"deliveries": message.deliveries, "first_delivered": first}
        say_json({**json_row(message.event), **more})
    else:
        say(event_text(message.event))
