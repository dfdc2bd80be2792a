"""The options of `format("penstock")`, and the checks made on them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from penstock.app.running.splits import SPLIT_ROWS
from penstock.errors import UsageError
from penstock.log import OptionValue, is_path
from penstock.log.api import Log, Start
from penstock.log.declaring.quantities import parse_bytes
from penstock.log.reading.read import start_offset

SourceOnGone = Literal["fail", "earliest", "latest"]
SourceOnDamage = Literal["fail", "skip"]
_OF_SPARK = ("checkpointlocation", "queryname")
BATCH_ROWS = 4_194_304
BATCH_ROWS_ON_KAFKA = 1_048_576
"""On Kafka, writing a batch is one transaction, which must not take too long."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a read or write, checked.

    `start` and `end`: earliest, latest, an offset that applies to every partition, a JSON object
    of offsets by partition, or a time (ISO 8601, when events were appended). `on_gone`: what to do
    if retention has removed events that were not read yet; `on_damage`: what to do if an event
    cannot be read. `changes` reads a table's changelog instead of its entries.
    """

    log: str
    stream: str
    start: str = "earliest"
    end: str = "latest"
    batch_rows: int | None = None
    batch_bytes: int | None = None
    split_rows: int = SPLIT_ROWS
    on_gone: SourceOnGone = "fail"
    on_damage: SourceOnDamage = "fail"
    columns: tuple[str, ...] | None = None
    changes: bool = False
    wait_ms: int = 0
    producer: str | None = None
    checkpoint: str | None = None
    """Where Spark keeps the query's state, if given: Spark's option, not one of ours."""
    log_options: tuple[tuple[str, str], ...] = ()

    @property
    def default_batch_rows(self) -> int:
        return BATCH_ROWS if is_path(self.log) else BATCH_ROWS_ON_KAFKA

    @property
    def for_log(self) -> dict[str, OptionValue]:
        return dict(self.log_options)


def split_options(
    options: Mapping[str, str], format_: str, known: type[msgspec.Struct]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The options of a format, and separately those of the log, such as `log.event_bytes_max`.

    Raises `UsageError` for an option that the format does not have.
    """
    given = {k: v for k, v in options.items() if k.lower() not in _OF_SPARK}
    of_log = sorted((k[4:], given.pop(k)) for k in list(given) if k.startswith("log."))
    names = {*known.__struct_fields__} - {"log_options", "checkpoint"}
    unknown = sorted(set(given) - names - {"path"})
    if unknown:
        raise UsageError(
            f"format({format_!r}) has no option {unknown[0]!r}; it has {', '.join(sorted(names))}"
        )
    return given, of_log


def checkpoint_of(options: Mapping[str, str]) -> str | None:
    """The value of Spark's option `checkpointLocation`, in any letter case."""
    return next((v for k, v in options.items() if k.lower() == "checkpointlocation"), None)


def parse(options: Mapping[str, str]) -> SourceOptions:
    """Raise `UsageError` for an option that is missing, unknown or invalid."""
    given, of_log = split_options(options, "penstock", SourceOptions)
    stream = given.pop("path", None) or given.get("stream")
    if not stream:
        raise UsageError("format('penstock') needs the option stream: .option('stream', 'orders')")
    values: dict[str, object] = {"log": "penstock.db", **given, "stream": stream}
    if "columns" in given:
        values["columns"] = [name.strip() for name in given["columns"].split(",")]
    if "batch_bytes" in given:
        values["batch_bytes"] = parse_bytes(given["batch_bytes"])
    values["log_options"] = of_log
    values["checkpoint"] = checkpoint_of(options)
    try:
        made = msgspec.convert(values, SourceOptions, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid option of format('penstock'): {error}") from None
    for name in ("batch_rows", "batch_bytes", "split_rows"):
        value = getattr(made, name)
        if value is not None and value < 1:
            raise UsageError(f"the option {name} is {value}; it must be positive")
    return made


def offsets_of(log: Log, stream: str, text: str, what: str) -> dict[int, int]:
    """The offset by partition that `text` stands for at present."""
    partitions = range(log.stream(stream).partitions)
    if text.startswith("{"):
        found = _parse_offsets(text, what)
        rest: Start = "latest" if what == "end" else "earliest"
        return {p: found.get(p, start_offset(log, stream, p, rest)) for p in partitions}
    start: Start = cast(Start, text)
    if text.isdigit():
        start = int(text)
    elif text not in ("earliest", "latest"):
        try:
            time = start = dt.datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"the option {what} is {text!r}; it must be earliest, latest, an offset, a JSON "
                "object of offsets by partition, or a time such as 2026-01-31T12:00:00+00:00"
            ) from None
        if time.tzinfo is None:
            raise UsageError(f"the time {text!r} of the option {what} has no time zone: add +00:00")
    return {p: start_offset(log, stream, p, start) for p in partitions}


def _parse_offsets(text: str, what: str) -> dict[int, int]:
    try:
        return msgspec.json.decode(text, type=dict[int, int])
    except msgspec.MsgspecError as error:
        raise UsageError(f"the option {what} is not a JSON object of offsets: {error}") from None
