"""`penstock table …`: the latest value per key."""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import datetime as dt
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import typer

from penstock.app.declaring.tables import window_key
from penstock.app.declaring.windows import Window
from penstock.cli.finding import find_table, tables_of
from penstock.cli.formats import as_json, cells, fields_of, plain
from penstock.cli.options import JsonOption, LogOption, LogOptionsOption, examples, open_to_read
from penstock.cli.output import (
    is_into_file,
    note,
    progress_bar,
    say,
    say_json,
    table,
    writing,
)
from penstock.errors import UsageError
from penstock.log.api import Log
from penstock.log.batch import json_data, json_key
from penstock.log.declaring.objects import Stream
from penstock.log.reading.table import Table
from penstock.records.event import JsonValue, from_microseconds

PAGE = 100
tables = typer.Typer(no_args_is_help=True, help="List tables and show their entries.")
TableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="NAME or NAMESPACE.NAME.",
        show_default=False,
        autocompletion=lambda ctx, incomplete: complete_table(ctx, incomplete),  # noqa: PLW0108
    ),
]
Base64Option = Annotated[
    bool, typer.Option("--base64", help="Keys are given in base64, for keys that are not text.")
]
WindowsOption = Annotated[
    bool,
    typer.Option(
        "--windows", help="The table has windows: show key and start of window separately."
    ),
]


class Shown(NamedTuple):
    """An entry as it is shown; `window` is the start of its window."""

    key: JsonValue
    value: JsonValue
    window: str | None = None


def register(app: typer.Typer) -> None:
    app.add_typer(tables, name="table")


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """Names of tables for the shell; nothing where the log cannot be opened."""
    try:
        with open_to_read(context, context.params.get("log")) as log:
            names = [str(stream.name) for stream in tables_of(log)]
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete)]


@tables.command("list", epilog=examples("penstock table list", "penstock table list --json"))
def list_tables(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List the tables of the log."""
    with open_to_read(context, log, log_option) as opened:
        rows = [_summary(stream) for stream in tables_of(opened)]
    if json:
        for row in rows:
            say_json(row)
    elif rows:
        columns = ("table", "value", "key", "partitions")
        table(columns, [[row[name] for name in columns] for row in rows])
    else:
        note("there are no tables yet: create one with `penstock stream create NAME --table`")


def _summary(stream: Stream) -> dict[str, object]:
    return {
        "table": str(stream.name),
        "value": _value_type(stream),
        "key": stream.spec.key,
        "partitions": stream.partitions,
    }


def _value_type(stream: Stream) -> str:
    if stream.record is None:
        return stream.spec.content
    element = stream.record.field("value")
    if stream.spec.entries != "value" and element is not None:
        return f"{stream.spec.entries}[{str(element.type).removesuffix(' | None')}]"
    return stream.record.name


@tables.command(
    "get",
    epilog=examples(
        "penstock table get customers ada",
        "penstock table get customers ada bob --json",
        "penstock table get visits ada --windows",
        "penstock table get visits ada --window 2026-11-15T10:00",
    ),
)
def get_entries(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    name: TableArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="One or more keys.")],
    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="TIME", help="Show the entry of the window that starts at TIME."
        ),
    ] = None,
    windows: WindowsOption = False,
    base64_: Base64Option = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Print the values of one or more keys; exit with 1 if a key has no entry.

    With `--json`, one object per key: `{"key": …, "value": …}`, with `null` if there is no entry.
    """
    if window is not None and windows:
        raise UsageError("--window shows one window, --windows shows all of them: omit one")
    wanted = [parse_key(key, base64_) for key in keys]
    with open_to_read(context, log, log_option) as opened:
        found = find_table(opened, name)
        if windows:
            rows = [row for key in wanted for row in _windows_of(opened, found, key)]
            missing = [key for key in wanted if not any(_is_key(row, key) for row in rows)]
        else:
            asked = [_with_window(key, window) for key in wanted]
            values = Table[object](opened, name).get_many(asked)
            rows = [
                Shown(json_key(key), None if value is None else json_data(value), window)
                for key, value in zip(wanted, values, strict=True)
            ]
            missing = [key for key, value in zip(wanted, values, strict=True) if value is None]
        hint = _hint(opened, found, missing, is_windowed=windows or window is not None)
    _show_rows(rows, json, with_key=windows or len(wanted) > 1)
    if missing:
        what = ", ".join(repr(plain(json_key(key))) for key in missing)
        note(f"{found.name} has no entry for {what}{hint}")
        raise typer.Exit(1)


def _is_key(row: Shown, key: bytes) -> bool:
    return row.key == json_key(key)


def _with_window(key: bytes, start: str | None) -> bytes:
    if start is None:
        return key
    try:
        time = dt.datetime.fromisoformat(start)
    except ValueError:
        raise UsageError(f"--window {start!r} is not a time such as 2026-11-15T10:00") from None
    time = time if time.tzinfo else time.replace(tzinfo=dt.UTC)
    return window_key(key, Window(time, time))


def _windows_of(log: Log, stream: Stream, key: bytes) -> Iterator[Shown]:
    with contextlib.closing(
        Table[object](log, str(stream.name)).starting_with(key + b"@")
    ) as found:
        for own, value in found:
            row = _show_entry(own, value, is_windowed=True)
            if row.window is not None and _is_key(row, key):
                yield row


def _hint(log: Log, stream: Stream, missing: Sequence[bytes], *, is_windowed: bool) -> str:
    if is_windowed or not any(next(_windows_of(log, stream, key), None) for key in missing):
        return ""
    return ", but entries for windows: use --windows"


def _show_rows(rows: Sequence[Shown], json: bool, *, with_key: bool) -> None:
    for row in rows:
        if json:
            say_json(_json_row(row))
        elif row.value is not None:
            say(_line(row) if with_key else as_json(row.value))


def _json_row(row: Shown) -> dict[str, JsonValue]:
    window: dict[str, JsonValue] = {} if row.window is None else {"window": row.window}
    return {"key": row.key, **window, "value": row.value}


def _line(row: Shown) -> str:
    window = [] if row.window is None else [row.window]
    return "\t".join([plain(row.key), *window, as_json(row.value)])


@tables.command(
    "page",
    epilog=examples(
        "penstock table page customers",
        "penstock table page customers --after bob --limit 20",
        "penstock table page customers --prefix eu- --json",
        "penstock table page customers --all --format csv > customers.csv",
    ),
)
def page_entries(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    name: TableArgument,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="KEY", help="Show only keys with this prefix.")
    ] = "",
    after: Annotated[
        str | None, typer.Option("--after", metavar="KEY", help="Start after this key.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show at most N entries.")
    ] = PAGE,
    all_: Annotated[bool, typer.Option("--all", help="Show all entries.")] = False,
    windows: WindowsOption = False,
    base64_: Base64Option = False,
    format_: Annotated[
        Literal["text", "table", "json", "csv"],
        typer.Option("--format", help="table is for people. --json means --format json."),
    ] = "text",
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Print the entries of a table in key order, as of one moment; `--after` continues."""
    if json and format_ not in ("text", "json"):
        raise UsageError(f"--json means --format json: omit it, or --format {format_}")
    wanted = parse_key(prefix, base64_)
    behind = None if after is None else parse_key(after, base64_)
    with open_to_read(context, log, log_option) as opened:
        found = find_table(opened, name)
        entries = Table[object](opened, name).starting_with(wanted, behind)
        most = None if all_ else limit
        with progress_bar("reading", "entries", shown=is_into_file()) as report:
            writer = _PageWriter(found, "json" if json else format_, windows)
            last = None
            for number, (key, value) in enumerate(itertools.islice(entries, most), 1):
                writer.write(_show_entry(key, value, is_windowed=windows))
                last = key
                report(number, 0)
            writer.close()
        is_more = next(entries, None) is not None
        entries.close()
    if last is None:
        note(f"{found.name} has no {'matching ' if prefix or after else ''}entries")
    elif is_more:
        shown = base64.b64encode(last).decode() if base64_ else plain(json_key(last))
        note(f"there are more entries: continue with --after {shown}")


class _PageWriter:
    """Writes entries in one of the formats; a table for people is laid out at the end of a page."""

    def __init__(self, stream: Stream, format_: str, windows: bool) -> None:
        self._format = format_
        self._fields = fields_of(stream) if stream.spec.entries == "value" else None
        window = ["window"] if windows else []
        self._columns = ["key", *window, *(self._fields or ["value"])]
        self._held: list[list[str]] = []
        if format_ == "csv":
            self._write_csv(
                ["_key", *(f"_{name}" for name in window), *(self._fields or ["value"])]
            )

    def write(self, row: Shown) -> None:
        if self._format == "json":
            say_json(_json_row(row))
        elif self._format == "text":
            say(_line(row))
        else:
            window = [] if "window" not in self._columns else [row.window or ""]
            made = [plain(row.key), *window, *cells({"data": row.value}, self._fields)]
            self._write_csv(made) if self._format == "csv" else self._held.append(made)
            if len(self._held) >= 1_000:
                self.close()

    def _write_csv(self, row: list[str]) -> None:
        with writing():
            csv.writer(sys.stdout, lineterminator="\n").writerow(row)

    def close(self) -> None:
        if self._held:
            table(self._columns, self._held)
            self._held = []


def parse_key(text: str, is_base64: bool) -> bytes:
    """A key as it is typed: text, or base64."""
    if not is_base64:
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UsageError(f"{text!r} is not base64: {error}") from None


def _show_entry(key: bytes, value: object, *, is_windowed: bool) -> Shown:
    own, mark, start = key.rpartition(b"@")
    if is_windowed and mark and start.removeprefix(b"-").isdigit():
        time = from_microseconds(int(start) * 1000)
        window = time.isoformat().replace("+00:00", "Z")
        return Shown(json_key(own), json_data(value), window)
    return Shown(json_key(key), json_data(value))
