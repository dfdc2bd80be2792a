"""Resetting a query: where it starts again, and what happens to its output."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from penstock.app.running.positions import Position, StartPosition, read_position
from penstock.app.running.takeover import claim
from penstock.errors import UnknownObjectError, UsageError
from penstock.log import is_path, log_path
from penstock.log.api import Log
from penstock.log.declaring.objects import CreateStream, DropStream

From = Literal["earliest", "latest"]
Output = Literal["keep", "clear"]


def default_checkpoints(url: str) -> Path:
    """Where Spark keeps its state by default: beside the log, or for a log on Kafka, in the current
    directory."""
    path = log_path(url) if is_path(url) else Path("penstock")
    return path.with_name(f"{path.name}.spark").resolve()


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    query: str
    start: From
    checkpoint: str
    cleared: tuple[str, ...]


def reset_query(
    log: Log,
    app: str,
    name: str,
    *,
    start: From = "earliest",
    output: Output = "keep",
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    checkpoints: Path | None = None,
) -> Reset:
    """Discard the position of a definition, and the state that Spark keeps for it.

    A run that has it is fenced first. With `output="clear"`, the streams and tables that it writes
    are emptied too; otherwise its new output is added to what is there.
    """
    saved = read_position(log, app, name)
    if saved is None and not (checkpoints and (checkpoints / app / name).exists()):
        known = sorted(key.split("/", 2)[2] for key in log.progress_items(f"app/{app}/"))
        raise UnknownObjectError(
            f"app {app} has never run a query {name}: it has run {', '.join(known) or 'none'}"
        )
    if start == "latest" and not inputs:
        raise UsageError(
            f"{name} reads no stream, so it cannot start from the latest event: omit --from latest"
        )
    if output == "clear" and not outputs:
        raise UsageError(f"{name} has no known output to clear: omit --output clear")

    def decide(found: Mapping[str, Position | None]) -> dict[str, Position | None]:
        del found
        if start == "earliest":
            return {name: None}
        ends = {s: {p: o.next for p, o in log.offsets(s).items()} for s in inputs}
        ids = {s: log.stream(s).id for s in inputs}
        return {name: StartPosition(next=ends, ids=ids)}

    claim(log, app, [name], decide, {name: None})
    folder = None if checkpoints is None else checkpoints / app / name
    if folder is not None and folder.exists():
        shutil.rmtree(folder)
    cleared = outputs if output == "clear" else ()
    for stream in cleared:
        _clear(log, stream)
    return Reset(query=name, start=start, checkpoint=str(folder or ""), cleared=cleared)


def _clear(log: Log, stream: str) -> None:
    spec = log.stream(stream).spec
    log.apply([DropStream(stream), CreateStream(spec)])
