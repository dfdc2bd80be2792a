"""What every engine checks about a call before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from penstock.errors import ConflictError, LimitError, RecordError, UsageError
from penstock.log.api import Commit, CommitOptions, Limits
from penstock.log.batch import check_compression
from penstock.log.declaring.names import check_text
from penstock.log.declaring.objects import Stream
from penstock.records.arrow import arrow_schema


def check_limits(commit: Commit, limits: Limits) -> None:
    size = sum(part.batch.nbytes for part in commit.parts)
    if size > limits.commit_bytes_max:
        raise LimitError(
            f"the commit has {size} bytes; at most {limits.commit_bytes_max} are allowed "
            "(commit_bytes_max): stage its parts, or commit in smaller steps"
        )
    for key, value in commit.progress.items():
        check_text(key, "the progress key")
        if not 0 < len(key) <= limits.progress_key_chars_max:
            raise LimitError(
                f"the progress key {key[:20]!r}… has {len(key)} characters; 1 to "
                f"{limits.progress_key_chars_max} are allowed (progress_key_chars_max)"
            )
        if value is not None and len(value) > limits.progress_value_bytes_max:
            raise LimitError(
                f"the progress value of {key!r} has {len(value)} bytes; at most "
                f"{limits.progress_value_bytes_max} are allowed (progress_value_bytes_max)"
            )


def check_columns(stream: Stream, batch: pa.RecordBatch) -> None:
    fields = [(f.name, f.type) for f in batch.schema if not f.name.startswith("_")]
    if stream.record is None:
        expected = [[("data", pa.binary() if stream.spec.content == "bytes" else pa.string())]]
    else:
        expected = [[(f.name, f.type) for f in arrow_schema(r)] for r in stream.records]
    if fields not in expected:
        raise RecordError(
            f"columns {', '.join(name for name, _ in fields)} do not match stream "
            f"{stream.name}: was it dropped and created again?"
        )


def check_writer(stream: Stream, producer: str) -> None:
    """Raise `UsageError` if a table belongs to another writer."""
    if not stream.spec.admits(producer):
        raise UsageError(
            f"only {stream.spec.writer} may write to table {stream.name}, not {producer}: write "
            f"through its writer, or change it with `penstock stream alter {stream.name} "
            "--writer NAME`"
        )


def check_conditions(
    commit: Commit, streams: Iterable[Stream], find: Callable[[Stream, bytes], int | None]
) -> None:
    """Raise `ConflictError` unless the entries are where the commit needs them; `find` looks."""
    tables = {str(stream.name): stream for stream in streams}
    for one in commit.conditions:
        if one.table not in tables:
            raise UsageError(
                f"the commit has a condition on table {one.table} but does not write to it"
            )
        found = find(tables[one.table], one.key)
        if found != one.offset:
            is_at = "does not exist" if found is None else f"is at offset {found}"
            wanted = "not exist" if one.offset is None else f"be at offset {one.offset}"
            raise ConflictError(f"the entry {one.key!r} of {one.table} {is_at}, but must {wanted}")


def check_call(sequence: int, options: CommitOptions) -> None:
    check_compression(options.compression)
    if options.timeout_ms < 1:
        raise UsageError(f"timeout_ms is {options.timeout_ms}; it must be at least 1")
    if not 0 <= sequence < 2**63:
        raise UsageError(f"a sequence must be 0 or more and fit into 64 bits, not {sequence}")
