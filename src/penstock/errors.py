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
    """A record class or a value does not fit."""

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
    """An object of this name exists already."""

    code = "object_exists"


class EvolutionError(UsageError):
    """The change of the record is not allowed."""

    code = "evolution"


class DestructiveChangeError(UsageError):
    """The change would destroy data and was not allowed to."""

    code = "destructive"


class TransactionStateError(UsageError):
    """The transaction is not in a state that allows this."""

    code = "transaction_state"


class ClosedError(UsageError):
    """This object is closed."""

    code = "closed"


class AppError(UsageError):
    """An app is declared wrongly; the message names the file and line."""

    code = "bad_app"


class PlanChangedError(UsageError):
    """What runs now does not fit what ran before: its state or its checkpoint."""

    code = "plan_changed"


class QueryFailedError(PenstockError):
    """A query of an app failed, and was given up after its last try."""

    code = "query_failed"


class SparkGoneError(PenstockError):
    """Spark itself has died; only a new process can start it again."""

    code = "spark_gone"


class FencedError(PenstockError):
    """Another holder has opened this producer; this one may write no more."""

    code = "fenced"


class ClaimLostError(FencedError):
    """Somebody else does now what this run did; this one ends."""

    code = "claim_lost"


class SequenceError(PenstockError):
    """The commit's sequence is older than the producer's latest."""

    code = "old_sequence"


class PieceError(PenstockError):
    """A staged piece is not there."""

    code = "piece"


class CommitOutcomeUnknownError(PenstockError):
    """The commit may or may not have happened; commit again under the same name to find out."""

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
    """The log cannot be written here."""

    code = "log_read_only"


class LogFormatError(LogError):
    """This is not a log that this version can open."""

    code = "log_format"


class LogUnreachableError(LogError):
    """The log's servers do not answer; nothing is known to have happened."""

    code = "log_unreachable"
    retriable = True


class LogAccessError(LogError):
    """The log's servers do not let this client in."""

    code = "log_access"


class OffsetGoneError(PenstockError):
    """Retention has removed the wanted offsets."""

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
    reading may go on at `last_offset + 1`. `key` and `data` are what is stored there, where it
    is one message of a foreign client.
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
    """A peer sent what the connector protocol does not have, or not there.

    `frames` are those that came before it in the same bytes.
    """

    code = "protocol"
    frames: Sequence[Any] = ()


class ConnectorError(PenstockError):
    """A connector cannot go on: the other side refuses it."""

    code = "connector"


class SinkGoneError(ConnectorError):
    """A sink cannot be reached, or does not answer in time."""

    code = "sink_gone"
    retriable = True


class OutboxError(PenstockError):
    """What is in an outbox cannot be published."""

    code = "outbox"


class DatabaseGoneError(OutboxError):
    """The database of an outbox cannot be reached."""

    code = "database_gone"
    retriable = True


class ConnectorTimeoutError(ConnectorError):
    """What a connector sent was not safe in time; it may be yet."""

    code = "connector_timeout"
    retriable = True
