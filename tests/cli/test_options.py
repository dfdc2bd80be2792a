"""The command line is made by one hand: one name for one thing, and all of it in the docs."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.cli.help import PANELS, walk
from penstock.cli.main import command
from tests.cli.conftest import Run

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")


class Option(NamedTuple):
    """An option of a command."""

    command: str
    name: str
    short: str
    is_flag: bool
    value: str

    @property
    def is_foreign(self) -> bool:
        """One that a connector has for the system that it talks to."""
        return self.command.startswith("penstock connect ") and f"`{self.name}`" in FOREIGN


def commands() -> dict[str, Any]:
    """Every command that can be run."""
    return {
        path: found for path, found in walk(command(), "penstock")
        if not hasattr(found, "commands") or path == "penstock"
    }  # fmt: skip


def options() -> list[Option]:
    found = []
    for path, one in commands().items():
        for option in one.params:
            if option.param_type_name == "option":
                long = next(name for name in option.opts if name.startswith("--"))
                short = next((name for name in option.opts if not name.startswith("--")), "")
                value = option.metavar or ""
                found.append(Option(path, long, short, bool(option.is_flag), value))
    return found


def listed() -> dict[str, tuple[str, str]]:
    """The one list of options: name, short form and value, from the docs."""
    rows = re.findall(r"^\| `(--[\w-]+)`(?:, `(-\w)`)? \|([^|]*)\|", PAGE, re.M)
    return {name: (short, value.strip()) for name, short, value in rows}


FOREIGN = PAGE.partition("Only in `connect`")[2].partition("\n\n")[0]


@pytest.mark.parametrize("path", commands())
def test_a_command_is_in_the_docs_and_its_help_has_examples(path: str) -> None:
    if path == "penstock":
        return
    assert f"`{path} " in PAGE or f"`{path}`" in PAGE, "docs/cli.md does not name it"
    shown = commands()[path]
    assert "**Examples**" in (shown.epilog or ""), "its help has no examples"
    assert path in shown.epilog, "its examples show something else"
    assert inspect.getdoc(shown.callback), "it does not say what it does"


@pytest.mark.parametrize("path", sorted(set(commands()) - {"penstock"}))
def test_a_command_that_prints_can_print_json(path: str) -> None:
    has_json = "--json" in {option.name for option in options() if option.command == path}
    assert has_json


def test_every_option_is_in_the_one_list_and_means_one_thing() -> None:
    wrong = [(option, why) for option in options() for why in faults(option)]
    told = [f"{o.command} {o.name} {why}" for o, why in wrong]
    assert not told, "\n" + "\n".join(told)


def faults(option: Option) -> Iterator[str]:
    if option.is_foreign:
        return
    if option.name not in listed():
        yield "is not in the list of docs/cli.md"
        return
    short, value = listed()[option.name]
    if option.short != short:
        yield f"has the short form {option.short!r}, not {short!r}"
    if option.is_flag != (value == ""):
        yield "is a flag here and not there"
    words = set(value.split(", "))
    given = set(option.value.split("|")) if option.value else words
    if not option.is_flag and not given <= words:
        yield f"has the value {option.value}, not {value}"
    if not option.is_flag and not option.value and value.isupper():
        yield f"does not name its value, which is {value}"


def test_the_list_has_nothing_that_is_gone() -> None:
    there = {option.name for option in options()} | {"--help"}
    assert set(listed()) - there == set()
    assert set(re.findall(r"`(--[\w-]+)`", FOREIGN)) <= there


def test_a_short_form_means_one_thing() -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    for option in options():
        if option.short:
            meanings[option.short].add(option.name)
    assert {short: names for short, names in meanings.items() if len(names) > 1} == {}


def test_every_command_is_in_a_panel_of_the_help() -> None:
    assert {name for names in PANELS.values() for name in names} == set(command().commands)


@pytest.mark.parametrize("path", commands())
def test_help_shows_no_types_of_python(run: Run, path: str) -> None:
    shown = run(*path.split()[1:], "--help").stdout
    assert re.findall(r"<(?:bool|str|int|float|list|path)\b[^>]*>|\bBOOL\b", shown) == []
    assert "{" not in shown.partition("Usage:")[2].partition("\n")[0]


def test_examples_can_be_typed() -> None:
    """What help shows are commands and options that are there."""
    there = {path: {o.name for o in options() if o.command == path} for path in commands()}
    lines = "\n".join(one.epilog or "" for one in commands().values()).splitlines()
    typed = [part.strip() for line in lines for part in line.strip("`").split("|")]
    for line in [line for line in typed if line.startswith("penstock ")]:
        own = line.partition(" -- ")[0]
        path = max((path for path in there if f"{own} ".startswith(f"{path} ")), key=len)
        assert set(re.findall(r"(?<= )--[a-z-]+", own)) <= there[path] | {"--log"}, line
