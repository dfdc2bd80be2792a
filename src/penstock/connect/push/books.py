"""What Penstock remembers about a sink's workers: what was decided, and what may be needed again.

No I/O here. The books are saved in the commit that decides. A decision stays in them, with what it
was read from, until the sink reports that its target has it; so a sink that has lost its spool can
be sent the same messages again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.connect.protocol.marks import Mark
from penstock.errors import ConnectorError, SinkGoneError

UNAPPLIED_MAX = 100
"""How many transactions of a worker may be decided but not applied before the query waits."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's part of a transaction was read from: ranges of streams (name, partition,
    start, end), restricted to the keys of one slot out of `slots`, without the rows left out.
    """

    ranges: tuple[tuple[str, int, int, int], ...]
    slot: int = 0
    slots: int = 1
    left_out: tuple[int, ...] = ()


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """A worker's transaction that is to be committed: its bytes, its number of messages, a digest
    of everything sent, and what it was read from.
    """

    transaction: str
    start: int
    end: int
    messages: int
    digest: str
    share: Share


class SinkProgress(NamedTuple):
    """How far a sink reports to be: in its target, and in its spool."""

    applied: Mark
    staged: Mark


class SinkVote(NamedTuple):
    """A sink's worker has made these bytes durable, and awaits the outcome.

    `progress` is what the sink reported before they were sent; `None` if it does not count
    messages. `left_out` are the numbers of rows that its target can never accept.
    """

    worker: str
    transaction: str
    start: int
    end: int
    rows: int
    digest: str = ""
    progress: SinkProgress | None = None
    left_out: tuple[int, ...] = ()


class WorkerBook(msgspec.Struct, frozen=True):
    """What was decided about a worker: its end, the number of messages and transactions so far, and
    the name of the last one. `open` are those that the target may not have, oldest first.

    `counted` is how many messages the sink counts up to the end; `None` if it does not count.
    Where one of these began is known since the first contact (`is_begun`): what it says of itself
    later lives in its memory.
    """

    end: int = 0
    messages: int = 0
    transactions: int = 0
    last: str | None = None
    counted: int | None = None
    open: tuple[Decision, ...] = ()
    is_begun: bool = False

    @property
    def start(self) -> int | None:
        """Where a sink that does not count goes on; `None` if it counts, or is not known yet."""
        is_known = self.is_begun or self.last is not None
        return self.end if is_known and self.counted is None else None

    def has_decided(self, transaction: str) -> bool:
        """Whether the transaction is to be committed; any other one is to be aborted."""
        return transaction == self.last or any(d.transaction == transaction for d in self.open)

    def bounds(self) -> list[tuple[Decision, Mark, Mark]]:
        """Each open decision, with the marks before and after it."""
        end = Mark(self.end, self.counted or 0)
        found = []
        for decision in reversed(self.open):
            start = Mark(decision.start, end.messages - decision.messages)
            found.append((decision, start, end))
            end = start
        return found[::-1]

    def without_applied(self, progress: SinkProgress | None) -> WorkerBook:
        """The book without decisions that the sink has applied: all, if it does not count them."""
        if progress is None or self.counted is None:
            return msgspec.structs.replace(self, open=())
        left = (decision for decision, _, end in self.bounds() if end > progress.applied)
        return msgspec.structs.replace(self, open=tuple(left))


class Missing(NamedTuple):
    """A decision that a sink is missing, from message number `skip` on."""

    decision: Decision
    skip: int


class SinkBooks(msgspec.Struct, frozen=True):
    """Everything that the feeder of a sink has to remember. The number of workers is fixed."""

    workers: int
    books: dict[str, WorkerBook] = {}

    def book(self, worker: str) -> WorkerBook:
        return self.books.get(worker, WorkerBook())

    def replace(self, worker: str, book: WorkerBook) -> SinkBooks:
        return SinkBooks(self.workers, {**self.books, worker: book})

    def begins_after(self, saved: SinkBooks | None) -> bool:
        """Whether a worker has begun that was not saved: it must be, before anything is sent."""
        before = saved or SinkBooks(self.workers)
        return any(
            book.start is not None and before.book(worker).start is None
            for worker, book in self.books.items()
        )

    def has_unapplied(self) -> bool:
        return any(book.open for book in self.books.values())

    def decide(
        self, votes: Iterable[SinkVote], shares: Mapping[str, Share], where: SinkPlace
    ) -> SinkBooks:
        """The books after these votes are committed as well.

        Raises `ConnectorError` if a vote does not start where the last decision ends.
        """
        found = self
        for vote in votes:
            before = accept(found.book(vote.worker), vote.worker, vote.start, vote.progress, where)
            if find_missing(before, vote.worker, vote.progress, where):
                raise SinkGoneError(
                    f"the sink at {where.address} is missing committed messages of worker "
                    f"{vote.worker}: sending them again"
                )
            decision = Decision(
                vote.transaction, vote.start, vote.end, vote.rows, vote.digest, shares[vote.worker]
            )
            left = before.without_applied(vote.progress)
            staged = None if vote.progress is None else vote.progress.staged.messages
            book = WorkerBook(
                end=vote.end, messages=before.messages + vote.rows,
                transactions=before.transactions + 1, last=vote.transaction,
                counted=None if staged is None else staged + vote.rows,
                open=(*left.open, decision),
            )  # fmt: skip
            found = found.replace(vote.worker, book)
        return found


class SinkPlace(NamedTuple):
    """For error messages: a sink's address, and what to do if it is no longer the same sink."""

    address: str
    way_out: str


def accept(
    book: WorkerBook, worker: str, committed: int, progress: SinkProgress | None, where: SinkPlace
) -> WorkerBook:
    """The book, with the count of a sink that starts counting, or without that of one that stops.

    Raises `ConnectorError` unless the sink has what was decided, or counts and may miss some.
    """
    if progress is not None and book.counted is not None:
        return book
    if progress is None and book.start is not None:
        if not may_have(book.end, committed):
            raise _differs(book, worker, f"{committed} bytes", where)
        return msgspec.structs.replace(book, open=())
    if book.last is not None and committed != book.end:
        raise _differs(book, worker, f"{committed} bytes", where)
    counted = None if progress is None else progress.staged.messages
    return msgspec.structs.replace(
        book, end=committed, counted=counted, open=(), is_begun=progress is None
    )


def may_have(end: int, said: int) -> bool:
    """Whether a sink that does not count may have everything up to `end`.

    The originals answer NOTIFY from memory: how many bytes they have received since they were
    started, whether these were committed or not, and 0 if there were none. Their vote is what
    can be relied on: they refuse a transaction that does not begin where the last one ended.
    """
    return said in (0, end) or said > end


def find_missing(
    book: WorkerBook, worker: str, progress: SinkProgress | None, where: SinkPlace
) -> list[Missing]:
    """The decisions that the sink is missing.

    Raises `ConnectorError` if it misses more than is kept, or has something never decided.
    """
    if progress is None or book.counted is None:
        return []
    has, end = progress.staged, Mark(book.end, book.counted)
    if has == end:
        return []
    bounds = book.bounds()
    if has > end or not bounds or has < bounds[0][1]:
        described = f"{has.offset} bytes ({has.messages} messages)"
        raise _differs(book, worker, described, where)
    return [
        Missing(decision, max(0, has.messages - start.messages))
        for decision, start, after in bounds
        if after > has
    ]


def _differs(book: WorkerBook, worker: str, has: str, where: SinkPlace) -> ConnectorError:
    return ConnectorError(
        f"the sink at {where.address} has {has} of worker {worker}, but {book.end} bytes were "
        f"committed: it is a different sink, or has lost data; {where.way_out}"
    )


class EarlierDecision(msgspec.Struct, frozen=True, array_like=True):
    """A worker's last transaction, as earlier versions saved it."""

    transaction: str
    end: int
    messages: int = 0
    transactions: int = 0


def from_earlier(decided: Mapping[str, EarlierDecision], workers: int) -> SinkBooks:
    """The books for what an earlier version has decided."""
    return SinkBooks(
        workers,
        {
            worker: WorkerBook(
                end=last.end, messages=last.messages, transactions=last.transactions,
                last=last.transaction,
            )
            for worker, last in decided.items()
        },
    )  # fmt: skip


def totals(books: SinkBooks | None) -> Sequence[tuple[str, WorkerBook]]:
    """Each worker and its book, by name."""
    return sorted(books.books.items()) if books is not None else ()
