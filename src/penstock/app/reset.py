"""Letting a query start again: where it reads from, and what becomes of what it made."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from penstock.app.positions import Position, saved_position
from penstock.app.takeover import claim
from penstock.errors import UnknownObjectError, UsageError
from penstock.log import is_path, log_path
from penstock.log.api import Log
from penstock.log.objects import CreateStream, DropStream

From = Literal["earliest", "latest"]
Output = Literal["keep", "clear"]


def default_checkpoints(url: str) -> Path:
    """Where Spark keeps its state unless told: beside the log, or of one on Kafka, here."""
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
    """Forget where a definition is, and what Spark keeps for it.

    Whoever runs it is fenced first. With `output="clear"`, the streams and tables that it
    makes are emptied too; otherwise what it makes anew comes on top of what is there.
    """
    saved = saved_position(log, app, name)
    if saved is None and not (checkpoints and (checkpoints / app / name).exists()):
        known = sorted(key.split("/", 2)[2] for key in log.progress_items(f"app/{app}/"))
        raise UnknownObjectError(
            f"app {app} has not run a query {name}: it has run {', '.join(known) or 'none'}"
        )
    if start == "latest" and not inputs:
        raise UsageError(f"{name} reads no stream that has a latest event: leave out --from latest")
    if output == "clear" and not outputs:
        raise UsageError(f"{name}: nothing is known to be made by it, so nothing can be cleared")

    def decide(found: Mapping[str, Position | None]) -> dict[str, Position | None]:
        del found
        if start == "earliest":
            return {name: None}
        ends = {s: {p: o.next for p, o in log.offsets(s).items()} for s in inputs}
        ids = {s: log.stream(s).id for s in inputs}
        return {name: Position(producer="", sequence=-1, next=ends, ids=ids)}

    claim(log, app, [name], decide, {name: None})
    folder = None if checkpoints is None else checkpoints / app / name
    if folder is not None and folder.exists():
        shutil.rmtree(folder)
    cleared = tuple(_cleared(log, stream) for stream in outputs) if output == "clear" else ()
    return Reset(query=name, start=start, checkpoint=str(folder or ""), cleared=cleared)


def _cleared(log: Log, stream: str) -> str:
    spec = log.stream(stream).spec
    log.apply([DropStream(stream), CreateStream(spec)])
    return stream
