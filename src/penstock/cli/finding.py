"""Finding what a command line names; where it is not there, what may have been meant."""

from __future__ import annotations

from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Log
from penstock.log.declaring.names import SYSTEM, guess
from penstock.log.declaring.objects import Stream


def find_stream(log: Log, name: str) -> Stream:
    """The stream of that name; `UnknownObjectError` names the nearest ones."""
    try:
        return log.stream(name)
    except UnknownObjectError as error:
        meant = guess(name, [str(stream.name) for stream in log.streams()])
        if not meant:
            raise
        raise UnknownObjectError(
            f"there is no stream {name}: {meant} (`penstock stream list` shows all)"
        ) from error


def find_table(log: Log, name: str) -> Stream:
    """The changelog of the table of that name."""
    tables = [str(stream.name) for stream in tables_of(log)]
    try:
        found = log.stream(name)
    except UnknownObjectError as error:
        hint = guess(name, tables) or "see `penstock table list`"
        raise UnknownObjectError(f"there is no table {name}: {hint}") from error
    if not found.spec.table:
        hint = guess(name, tables) or "`penstock table list` shows all"
        raise UsageError(
            f"{found.name} is a stream, not a table: {hint}; `penstock read {found.name}` reads it"
        )
    return found


def tables_of(log: Log) -> list[Stream]:
    """Every table of the log."""
    return [s for s in log.streams() if s.spec.table and s.name.namespace != SYSTEM]


def find_namespace(log: Log, name: str) -> str:
    """The namespace, if it is there; `UnknownObjectError` names the nearest ones."""
    known = log.namespaces()
    if name not in known:
        hint = guess(name, known) or "see `penstock namespace list`"
        raise UnknownObjectError(f"there is no namespace {name}: {hint}")
    return name
