"""One hierarchy of errors: everything Penstock raises on purpose is a `PenstockError`.

A message is a fact, then the detail, then what to do. `code` is stable and may be
matched by programs; `retriable` says whether the same call may succeed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class PenstockError(Exception):
    """Something in Penstock failed."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class UsageError(PenstockError):
    """The call itself is wrong; nothing was changed."""

    code = "usage"


class BadNameError(UsageError):
    """A name is not valid."""

    code = "bad_name"


class RecordError(UsageError):
    """A record class or a value is not valid."""

    code = "bad_record"


class LimitError(UsageError):
    """A named limit was exceeded."""

    code = "limit"


class CatalogueError(UsageError):
    """The catalogue file is wrong."""

    code = "bad_catalogue"


class UnknownObjectError(UsageError):
    """There is no such object in the log."""

    code = "unknown_object"


class ObjectExistsError(UsageError):
    """An object with this name already exists."""

    code = "object_exists"


class EvolutionError(UsageError):
    """The change to the record is not allowed."""

    code = "evolution"


class DestructiveChangeError(UsageError):
    """The change would destroy data, and no permission to do so was given."""

    code = "destructive"


class TransactionStateError(UsageError):
    """The transaction is not in a state that allows this."""

    code = "transaction_state"


class ConflictError(UsageError):
    """An entry has changed since it was read; nothing was written."""

    code = "conflict"


class ClosedError(UsageError):
    """This object is closed."""

    code = "closed"


class AppError(UsageError):
    """An app is declared wrongly; the message names the file and line."""

    code = "bad_app"


class PlanChangedError(UsageError):
    """The definition does not match the state or checkpoint of earlier runs."""

    code = "plan_changed"


class QueryFailedError(PenstockError):
    """A query of an app failed and will not be retried any more."""

    code = "query_failed"


class SparkGoneError(PenstockError):
    """Spark itself has terminated; it can be started again only in a new process."""

    code = "spark_gone"


class FencedError(PenstockError):
    """Another holder has opened this producer; this one can no longer write."""

    code = "fenced"


class ClaimLostError(FencedError):
    """Another run has taken over from this one; this run ends."""

    code = "claim_lost"


class GroupBusyError(PenstockError):
    """A group is coordinated by another process."""

    code = "group_busy"
    retriable = True


class LeaseLostError(PenstockError):
    """The message is no longer yours: its lease has expired, or it was given back. It has been, or
    will be, delivered again.
    """

    code = "lease_lost"


class SequenceError(PenstockError):
    """The commit's sequence is older than the producer's latest."""

    code = "old_sequence"


class PieceError(PenstockError):
    """A staged piece does not exist."""

    code = "piece"


class CommitOutcomeUnknownError(PenstockError):
    """The commit may or may not have happened; repeat it under the same name to find out."""

    code = "outcome_unknown"
    retriable = True


class LogError(PenstockError):
    """The log could not do what was asked."""

    code = "log"


class LogBusyError(LogError):
    """The log is in use by another writer."""

    code = "log_busy"
    retriable = True


class LogFullError(LogError):
    """The disk is full; nothing of the commit was written."""

    code = "log_full"
    retriable = True


class LogIOError(LogError):
    """The disk failed to read or write."""

    code = "log_io"
    retriable = True


class LogReadOnlyError(LogError):
    """The log cannot be written to from here."""

    code = "log_read_only"


class LogFormatError(LogError):
    """This is not a log that this version can open."""

    code = "log_format"


class LogUnreachableError(LogError):
    """The log's servers do not answer; nothing is known to have happened."""

    code = "log_unreachable"
    retriable = True


class LogAccessError(LogError):
    """The log's servers deny access to this client."""

    code = "log_access"


class OffsetGoneError(PenstockError):
    """The requested offsets have been removed by retention."""

    code = "offset_gone"

    def __init__(self, message: str, earliest: int) -> None:
        super().__init__(message)
        self.earliest = earliest


class PinExpiredError(PenstockError):
    """The pinned commit is no longer kept."""

    code = "pin_expired"


class DamagedError(PenstockError):
    """Stored data is damaged.

    `first_offset` and `last_offset` are the range that cannot be read;
    reading can continue at `last_offset + 1`. If the range is a single message written by a
    foreign client, `key` and `data` are its contents.
    """

    code = "damaged"

    def __init__(
        self,
        message: str,
        stream: str,
        partition: int,
        first_offset: int,
        last_offset: int,
        *,
        key: bytes | None = None,
        data: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.stream = stream
        self.partition = partition
        self.first_offset = first_offset
        self.last_offset = last_offset
        self.key = key
        self.data = data


class BufferFullError(PenstockError):
    """The producer's buffer is full."""

    code = "buffer_full"
    retriable = True


class DeliveryTimeoutError(PenstockError):
    """The events could not be committed in time; none of them was."""

    code = "delivery_timeout"
    retriable = True


class ProtocolError(PenstockError):
    """A peer sent something that the connector protocol does not allow, or not at this point.

    `frames` are the valid frames that preceded it in the same bytes.
    """

    code = "protocol"
    frames: Sequence[Any] = ()


class ConnectorError(PenstockError):
    """A connector cannot continue: the other side refuses it."""

    code = "connector"


class SinkGoneError(ConnectorError):
    """A sink cannot be reached, or does not answer in time."""

    code = "sink_gone"
    retriable = True


class RowsRefusedError(ConnectorError):
    """A sink votes against a transaction and names the messages that its target can never accept.

    `refusals` holds the number of each such message in the transaction, with the reason.
    """

    code = "rows_refused"

    def __init__(self, message: str, refusals: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)


class MarkMovedError(ConnectorError):
    """A target's mark is not where the sink's host expected it: someone else has moved it."""

    code = "mark_moved"


class OutboxError(PenstockError):
    """The contents of an outbox cannot be published."""

    code = "outbox"


class DatabaseGoneError(OutboxError):
    """The database of an outbox cannot be reached."""

    code = "database_gone"
    retriable = True


class ConnectorTimeoutError(ConnectorError):
    """Messages that a connector sent were not safe in time; they may still become so."""

    code = "connector_timeout"
    retriable = True
