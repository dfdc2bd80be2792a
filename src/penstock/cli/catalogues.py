"""`penstock apply` and `penstock namespace …`: what a log is to hold, as a file says or by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.finding import find_namespace
from penstock.cli.options import (
    DryRunOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    YesOption,
    change_log,
    empty_log,
    examples,
    log_exists,
    log_url,
    open_named,
    open_to_read,
)
from penstock.cli.output import confirm, count, say, say_json
from penstock.log import log_path
from penstock.log.api import Log
from penstock.log.catalogue import PlanStep, load, make_plan
from penstock.log.declaring.objects import CreateNamespace, DropNamespace

NamespaceArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the namespace.")]
namespaces = typer.Typer(no_args_is_help=True, help="List, create and drop namespaces.")


def register(app: typer.Typer) -> None:
    app.command(
        "apply",
        epilog=examples("penstock apply shop.toml --dry-run", "penstock apply shop.toml --yes"),
    )(apply)
    app.add_typer(namespaces, name="namespace")


@namespaces.command("list", epilog=examples("penstock namespace list --json"))
def list_namespaces(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List the namespaces of the log."""
    with open_to_read(context, log, log_option) as opened:
        for name in opened.namespaces():
            if json:
                say_json({"namespace": name})
            else:
                say(name)


@namespaces.command("create", epilog=examples("penstock namespace create shop"))
def create_namespace(
    context: typer.Context,
    name: NamespaceArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Create a namespace."""
    change_log(context, log, log_option, lambda opened: opened.apply([CreateNamespace(name)]))
    say_json({"created": name}) if json else say(f"created namespace {name}")


@namespaces.command("drop", epilog=examples("penstock namespace drop shop"))
def drop_namespace(
    context: typer.Context,
    name: NamespaceArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Drop a namespace that holds no streams; `default` cannot be dropped."""
    with open_named(context, log, log_option) as opened:
        opened.apply([DropNamespace(find_namespace(opened, name))])
    say_json({"dropped": name}) if json else say(f"dropped namespace {name}")


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A catalogue file (TOML).")],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Bring the log in line with a catalogue file: show the plan, then apply it as one
    change.

    Applying the same file again changes nothing. Changes that remove events ask for confirmation;
    without a terminal, `--yes` is required.
    """
    catalogue = load(file)
    if dry_run:
        with _log_or_empty(context, log, log_option) as opened:
            _show_plan(make_plan(opened, catalogue), json)
        return

    url = log_url(context, log)

    def carry_out(opened: Log) -> list[PlanStep]:
        plan = make_plan(opened, catalogue)
        if opened.url in (url, str(log_path(url))):  # not at the rehearsal
            _show_plan(plan, json)
            _confirm_destructive(file, plan, yes)
        opened.apply([step.change for step in plan])
        return plan

    plan = change_log(context, log, log_option, carry_out)
    if json:
        say_json({"applied": len(plan)})
    elif plan:
        say(f"applied {count(len(plan), 'change')}")


def _confirm_destructive(file: Path, plan: list[PlanStep], yes: bool) -> None:
    removing = [step.description for step in plan if step.destructive]
    if removing:
        what = "; ".join(removing)
        confirm(f"This will {what}. Continue?", f"{file} would {what}", yes=yes)


@contextlib.contextmanager
def _log_or_empty(
    context: typer.Context, log: str | None, options: list[str] | None
) -> Iterator[Log]:
    """The log, or where there is none yet, an empty one that leaves nothing behind."""
    if log_exists(context, log, options):
        with open_named(context, log, options) as opened:
            yield opened
    else:
        with empty_log(options) as opened:
            yield opened


def _show_plan(plan: list[PlanStep], json: bool) -> None:
    if json:
        for step in plan:
            say_json({"change": step.description, "destructive": step.destructive})
        return
    if not plan:
        say("nothing to change")
    for step in plan:
        say(f"{'! ' if step.destructive else '+ '}{step.description}")
