"""What commands print: JSON for programs, tables and plain lines for people.

Results go to standard output, everything else (progress, notes, errors) to standard error.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.errors import LogError
from penstock.log.api import Progress as Report

stderr = Console(stderr=True, highlight=False)


class OutputClosedError(Exception):
    """Whoever read the output has gone away."""


def say(text: str) -> None:
    """A line of a result."""
    try:
        sys.stdout.write(text + "\n")
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as error:
        raise LogError(f"the output cannot be written: {error.strerror}") from None


def flush() -> None:
    """Let the reader of the output see what there is."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosedError from None


def say_json(value: object) -> None:
    """A result as one line of JSON."""
    say(msgspec.json.encode(value).decode())


def note(text: str) -> None:
    """A line for the person who watches, not part of the result."""
    stderr.print(text, soft_wrap=True, markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows for people; wide where the terminal is."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name, overflow="fold", no_wrap=False)
    for row in rows:
        grid.add_row(*("" if cell is None else str(cell) for cell in row))
    width = None if sys.stdout.isatty() else 200
    Console(file=sys.stdout, highlight=False, width=width, markup=False).print(grid)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Report]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not stderr.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
