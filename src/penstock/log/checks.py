"""What every engine checks of a call before it does anything."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from penstock.errors import (
    ClosedError,
    FencedError,
    LimitError,
    PenstockError,
    PieceError,
    RecordError,
    SequenceError,
    UsageError,
)
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Limits
from penstock.log.batch import check_compression
from penstock.log.names import check_text
from penstock.log.objects import Stream
from penstock.records.arrow import arrow_schema


def check_limits(commit: Commit, limits: Limits) -> None:
    size = sum(part.batch.nbytes for part in commit.parts)
    if size > limits.commit_bytes_max:
        raise LimitError(
            f"the commit holds {size} bytes; at most {limits.commit_bytes_max} are allowed "
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
            f"the columns {', '.join(name for name, _ in fields)} are not those of stream "
            f"{stream.name}: was it dropped and created anew?"
        )


def may_be_over(error: PenstockError) -> bool:
    """Errors that a repeated commit meets when its pieces or streams are gone by now."""
    return isinstance(error, PieceError | UsageError) and not isinstance(error, ClosedError)


def check_call(sequence: int, options: CommitOptions) -> None:
    check_compression(options.compression)
    if options.timeout_ms < 1:
        raise UsageError(f"timeout_ms is {options.timeout_ms}; it must be at least 1")
    if not 0 <= sequence < 2**63:
        raise UsageError(f"a sequence is 0 or more and fits 64 bits, not {sequence}")


def check_held(holder: Holder, epoch: int | None) -> None:
    """Raise `FencedError` unless the producer, which is at this epoch, is the holder's."""
    if epoch is None:
        raise FencedError(
            f"the producer {holder.producer} is not known here (it may have been forgotten after "
            "long disuse): open it again"
        )
    if epoch != holder.epoch:
        raise FencedError(
            f"the producer {holder.producer} was opened again (epoch {epoch}); this holder "
            f"(epoch {holder.epoch}) may write no more"
        )


def check_stageable(holder: Holder, sequence: int, latest: int | None) -> None:
    """Raise `SequenceError` where the commit to stage for has happened."""
    if latest is not None and sequence <= latest:
        raise SequenceError(
            f"the producer {holder.producer} has committed {latest} already: nothing can be staged "
            f"for {sequence}"
        )


def repeated(holder: Holder, sequence: int, last: Committed) -> Committed:
    """The outcome of a commit whose name is the latest; `SequenceError` for an older one."""
    if sequence < last.sequence:
        raise SequenceError(
            f"the producer {holder.producer} has committed {last.sequence}; {sequence} is older "
            "and was either committed before or skipped"
        )
    return msgspec.structs.replace(last, repeated=True)
