"""What commands print: JSON for programs, tables and plain lines for people.

Results go to standard output, everything else (progress, notes, errors) to standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Literal

import msgspec
import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.errors import DestructiveChangeError, PenstockError
from penstock.log.api import Count, Report

PIPE_COLUMNS = 200
"""How wide a table is where nobody can say."""

CUT_COLUMNS_MIN = 20
BAR_AFTER_S = 1.0
"""What is over sooner needs no progress bar."""

stderr = Console(stderr=True, highlight=False)


class OutputClosedError(Exception):
    """Whoever read the output has gone away."""


class OutputError(PenstockError):
    """The output cannot be written."""

    code = "output"


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around whatever writes to standard output: its errors are told from all others."""
    try:
        yield
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as error:
        raise OutputError(f"cannot write the output: {error.strerror or error}") from None


def say(text: str) -> None:
    """A line of a result."""
    with writing():
        sys.stdout.write(text + "\n")


def flush() -> None:
    """Let the reader of the output see what there is."""
    with writing():
        sys.stdout.flush()


def say_json(value: object) -> None:
    """A result as one line of JSON."""
    say(msgspec.json.encode(value).decode())


def say_listening(host: str, port: int, json: bool) -> None:
    """Say where something listens, at once: others wait for it."""
    address = f"{host}:{port}"
    say_json({"listening": address}) if json else say(f"listening at {address}")
    flush()


def note(text: str) -> None:
    """A line for the person who watches, not part of the result."""
    stderr.print(text, soft_wrap=True, markup=False)


def count(number: int | Count, noun: str) -> str:
    """A number of things, in words."""
    found = number if isinstance(number, Count) else Count(number)
    return f"{found} {noun}{'' if found.events == 1 else 's'}"


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, cut: str | None = None
) -> None:
    """Rows for people; wide where the terminal is. Numbers stand to the right.

    The column `cut` is shortened, so that a row is one line if there is any room for it.
    """
    shown = [[_cell(cell) for cell in row] for row in rows]
    console = Console(
        file=sys.stdout,
        highlight=False,
        markup=False,
        width=None if sys.stdout.isatty() else PIPE_COLUMNS,
    )
    if cut is not None:
        _cut(list(columns), shown, columns.index(cut), console.width)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        held = [row[index] for row in rows if row[index] is not None]
        numbers = held and all(type(cell) in (int, float, Count) for cell in held)
        justify: Literal["left", "right"] = "right" if numbers else "left"
        grid.add_column(name, overflow="fold", no_wrap=False, justify=justify)
    for line in shown:
        grid.add_row(*line)
    with writing():
        console.print(grid)


def _cut(columns: list[str], rows: list[list[str]], index: int, width: int) -> None:
    """Shorten the cells of a column to what the others leave of the width."""
    widest = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    room = max(CUT_COLUMNS_MIN, width - 2 * (len(columns) - 1) - sum(widest) + widest[index])
    for row in rows:
        text = " ".join(row[index].split())
        row[index] = text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)


def confirm(question: str, refusal: str, *, yes: bool) -> None:
    """Ask before something is removed, unless `yes` says so.

    Raises `DestructiveChangeError` where there is nobody to ask; a no ends the command.
    """
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty() and stderr.is_terminal):
        raise DestructiveChangeError(f"{refusal}. Nothing was changed: use --yes to confirm")
    if not typer.confirm(question, err=True):
        note("nothing was changed")
        raise typer.Exit(1)


@contextlib.contextmanager
def progress_bar(what: str, unit: str, *, shown: bool = True) -> Iterator[Report]:
    """A progress bar on a terminal; elsewhere nothing. A total of 0 is one that is not known.

    Without a unit only the share is shown: offsets, say, are not to be taken for counts.
    """
    if not shown or not stderr.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
    )
    # Results are written while the bar is shown, and must go where they belong.
    bar = Progress(*columns, console=stderr, transient=True, redirect_stdout=False)
    task = bar.add_task(what, total=None, counted="")
    begun = time.monotonic()

    def report(done: int, total: int) -> None:
        counted = _show_amount(done, total, unit)
        bar.update(task, completed=done, total=total or None, counted=counted)
        if time.monotonic() - begun >= BAR_AFTER_S:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()


def _show_amount(done: int, total: int, unit: str) -> str:
    if not unit:
        return ""
    if unit == "bytes":
        return f"{size_text(done)} of {size_text(total)}" if total else size_text(done)
    return f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"


def size_text(number: int) -> str:
    """A number of bytes as people say it: 12.5 MB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} bytes"


def is_into_file() -> bool:
    """Whether results go into a file: then there is room on the terminal for a progress bar."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def stopping(stop: threading.Event, what: str) -> Iterator[None]:
    """Signals set `stop`, the second one interrupts."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set():
            raise KeyboardInterrupt
        note(f"stopping (signal {number}): {what} …")
        stop.set()

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
