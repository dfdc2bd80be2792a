"""The log: streams, transactions, tables; one contract, several engines."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock.errors import UsageError
from penstock.log.api import Limits, Log
from penstock.log.declaring.objects import Defaults
from penstock.log.sqlite.log import SqliteLog, SqliteOptions

OptionValue = str | int | bool
S = TypeVar("S", bound=msgspec.Struct)


def open_log(
    url: str | Path = "penstock.db", *, create: bool = True, **options: OptionValue
) -> Log:
    """Open the log that `url` names; use it in a `with` statement, or close it.

    A path names an embedded log, `kafka://host:port,…` one in a Kafka cluster. It is created if it
    does not exist, unless `create` is false. Options are the fields of `Limits`, `Defaults` and the
    engine's own options, by name; on Kafka also librdkafka's, such as `security.protocol`.
    """
    if not isinstance(url, str | Path) or not str(url):
        raise UsageError(f"a log must be a path or a URL, not {url!r}")
    text = str(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme not in ("", "file", "kafka"):
        raise UsageError(
            f"{text!r} has the unsupported scheme {scheme!r}: use a path, such as penstock.db, "
            "or kafka://HOST:PORT"
        )
    limits, rest = _take(Limits, dict(options))
    defaults, rest = _take(Defaults, rest)
    if scheme == "kafka":
        return _open_kafka(text, create, limits, defaults, rest)
    own, rest = _take(SqliteOptions, rest)
    _check_all_known(SqliteOptions, rest)
    return SqliteLog(
        log_path(text), create=create, limits=limits, defaults=defaults, options=own
    ).open()


def _open_kafka(
    url: str, create: bool, limits: Limits, defaults: Defaults, rest: dict[str, OptionValue]
) -> Log:
    try:
        from penstock.log.kafka.client import KafkaOptions
        from penstock.log.kafka.log import open_kafka
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a log on Kafka needs more packages ({error.name}): pip install 'penstock[kafka]'"
        ) from None
    settings = {name: rest.pop(name) for name in list(rest) if "." in name}
    own, rest = _take(KafkaOptions, rest)
    _check_all_known(KafkaOptions, rest)
    return open_kafka(
        url, create=create, limits=limits, defaults=defaults, options=own, settings=settings
    )


def _check_all_known(own: type[msgspec.Struct], rest: dict[str, OptionValue]) -> None:
    if rest:
        kinds = (Limits, Defaults, own)
        known = [name for kind in kinds for name in kind.__struct_fields__]
        raise UsageError(
            f"there is no log option {next(iter(rest))!r}; known options: {', '.join(known)}"
        )


def is_path(url: str) -> bool:
    """Whether a log is a file, and so an embedded log."""
    return "://" not in url or url.startswith("file://")


def log_path(url: str) -> Path:
    """The file of an embedded log."""
    return Path(url.removeprefix("file://"))


def _take(kind: type[S], options: dict[str, OptionValue]) -> tuple[S, dict[str, OptionValue]]:
    mine = {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
    try:
        made = msgspec.convert(mine, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"a log option is not valid: {error}") from None
    for name in mine:
        value, least = getattr(made, name), 0 if name == "upkeep_interval_ms" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise UsageError(f"log option {name} is {value}; it must be at least {least}")
    return made, options


__all__ = ["Limits", "Log", "OptionValue", "is_path", "log_path", "open_log"]
