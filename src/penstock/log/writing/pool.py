"""Transactions of many clients in one process, on producers that stay open.

Opening a producer for each transaction costs a round trip to the log, on Kafka several. A pool
keeps those it has opened: one for each client that names its transactions, and as many unnamed
ones as there are transactions at a time.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import repeat
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import BadNameError, ClosedError, CommitOutcomeUnknownError, FencedError
from penstock.log.api import CommitOptions, Committed, Holder, Log
from penstock.log.declaring.names import check_producer
from penstock.log.writing.fate import Again, Tries
from penstock.log.writing.transaction import Transaction

CLIENTS_MAX = 1_000
"""How many clients' producers are kept."""
UNNAMED_MAX = 64
"""How many unnamed producers are kept; more are made while they are needed."""
TRIES_MAX = 5
TIMEOUT_S = 600.0
PREFIX = "client/"


class _Unnamed(NamedTuple):
    """A producer of the pool's own, and the number of its next commit."""

    holder: Holder
    sequence: int


class TransactionPool:
    """Transactions over streams and tables, for any number of threads and clients.

        with penstock.TransactionPool(log) as pool:
            with pool.transaction(("till-7", 42)) as tx:
                tx.send("receipts", receipt)
                tx.put("balances", "ada", balance)

    Leaving the block commits; an exception rolls back. A transaction's name is its client's and a
    number that grows with each of them: one that was committed is not committed again, whatever
    process is asked, so a client that does not know what became of one makes it again under the
    same name, or asks `last_commit`. The log remembers a client for as long as producers that
    commit nothing are remembered. Closing the pool rolls back what is open.
    """

    def __init__(
        self, log: Log, *, options: CommitOptions = CommitOptions(), timeout_s: float = TIMEOUT_S
    ) -> None:
        self._log = log
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, Holder] = OrderedDict()
        self._free: deque[_Unnamed] = deque()
        self._name = f"pool-{secrets.token_hex(8)}"
        self._made = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commit nothing any more."""
        self._is_closed = True

    def last_commit(self, client: str) -> Committed | None:
        """The latest transaction of a client that was committed: its number and its places."""
        return self._log.last_commit(_producer_of(client))

    @contextlib.contextmanager
    def transaction(
        self, name: tuple[str, int] | None = None, *, timeout_s: float | None = None
    ) -> Iterator[Transaction]:
        """A transaction; leaving the block commits it.

        Raises `SequenceError` if the client's number is older than its latest, and
        `CommitOutcomeUnknownError` if it may have been committed.
        """
        self._check_open()
        unnamed: _Unnamed | None = None
        if name is None:
            unnamed = self._lend()
            holder, sequence = unnamed
        else:
            holder, sequence = self._hold(name[0]), name[1]
        tx = Transaction(
            self._log,
            holder,
            sequence=sequence,
            options=self._options,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )
        try:
            with tx:
                yield tx
                if tx.state == "open":
                    self._check_open()
                    self._commit(tx, name)
        finally:
            if unnamed is not None:
                self._give_back(tx)

    def _commit(self, tx: Transaction, name: tuple[str, int] | None) -> None:
        """Commit, until it is known what became of it, or that cannot be found out now.

        A producer that was opened elsewhere, or forgotten since it was used last, is opened again.
        """
        tries = Tries(repeat(0.0, TRIES_MAX - 1), only_unknown=True)
        fenced = TRIES_MAX
        while True:
            try:
                tx.commit()
                return
            except FencedError:
                fenced -= 1
                if tx.has_staged or not fenced:
                    raise
                if name is None:
                    tx.move(*self._make())
                else:
                    tx.move(self._hold(name[0], anew=True), name[1])
            except CommitOutcomeUnknownError as error:
                if not isinstance(tries.after(error, now_s=0.0), Again):
                    raise

    def _hold(self, client: str, *, anew: bool = False) -> Holder:
        """The producer of a client."""
        producer = _producer_of(client)
        with self._lock:
            held = None if anew else self._clients.get(producer)
        if held is None:
            held = self._log.hold(producer, ephemeral=True)
        with self._lock:
            self._clients[producer] = held
            self._clients.move_to_end(producer)
            while len(self._clients) > CLIENTS_MAX:
                self._clients.popitem(last=False)
        return held

    def _lend(self) -> _Unnamed:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._make()

    def _make(self) -> _Unnamed:
        with self._lock:
            self._made += 1
            name = f"{self._name}-{self._made}"
        return _Unnamed(self._log.hold(name, ephemeral=True), 0)

    def _give_back(self, tx: Transaction) -> None:
        """Keep a producer, unless it has left something staged or nobody knows what it did."""
        if tx.state == "committed":
            free = _Unnamed(tx.holder, tx.sequence + 1)
        elif tx.state == "rolled back" and not tx.has_staged:
            free = _Unnamed(tx.holder, tx.sequence)
        else:
            return
        with self._lock:
            if len(self._free) < UNNAMED_MAX:
                self._free.append(free)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the pool of transactions is closed, and its transactions with it")


def _producer_of(client: str) -> str:
    producer = f"{PREFIX}{client}"
    if not client:
        raise BadNameError("a client's name is empty")
    check_producer(producer)
    return producer
