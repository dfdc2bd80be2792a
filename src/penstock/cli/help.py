"""What `--help` shows: names of values in capitals, and nothing beside a flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

_VALUES = {"int": "N", "float": "N", "str": "TEXT"}
PANELS = {
    "Events": ("pub", "read", "group", "dead"),
    "Streams and tables": ("stream", "table", "namespace", "apply"),
    "Apps": ("run", "reset", "rename", "prepare", "agent"),
    "Connectors": ("listen", "connect", "connector", "outbox"),
    "Maintenance": ("verify", "backup", "doctor", "cluster"),
}
"""How `penstock --help` groups the commands."""
Command = Any
"""Typer's commands and parameters have no public types."""


def build(app: typer.Typer) -> Command:
    """The program's commands, with a help that reads like a manual and not like a signature."""
    command: Command = typer.main.get_command(app)
    commands = command.commands
    command.commands = {
        name: commands.pop(name) for names in PANELS.values() for name in names if name in commands
    } | commands
    for panel, names in PANELS.items():
        for name in names:
            command.commands[name].rich_help_panel = panel
    for _, one in walk(command, "penstock"):
        _arrange(one)
    return command


def walk(command: Command, path: str) -> Iterator[tuple[str, Command]]:
    """A command and all below it, each with what one types to get there."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{path} {name}")


def _arrange(command: Command) -> None:
    """Do it when parameters are asked for: `--help` itself is only made then."""
    original = command.get_params

    def get_params(context: typer.Context) -> list[Command]:
        found: list[Command] = original(context)
        for parameter in found:
            if parameter.param_type_name == "argument":
                _arrange_argument(parameter)
            elif parameter.metavar is None:
                parameter.metavar = _value(parameter, context)
        return found

    command.get_params = get_params


def _value(option: Command, context: typer.Context) -> str:
    if option.is_flag:
        return ""
    shown: str = option.display_type(context).strip("<>")
    return _VALUES.get(shown, shown if "|" in shown else shown.upper())


def _arrange_argument(argument: Command) -> None:
    name = argument.display_name_raw.strip("[]")
    usage = name if argument.required else f"[{name}]"
    argument.display_type_rich = lambda ctx: None
    argument.get_usage_pieces = lambda ctx: [f"{usage}{'' if argument.nargs == 1 else '…'}"]
