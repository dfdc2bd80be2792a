"""Applies committed transactions to a worker's target in the background, in commit order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.connect.hosts.spool import DeadMessage, Lot, Spool, StagedCommit, now_ms
from penstock.connect.hosts.targets import (
    PAGE_BYTES,
    SinkMessage,
    SinkTarget,
    describe,
    is_passing,
)
from penstock.connect.protocol.marks import Mark
from penstock.errors import MarkMovedError, UsageError
from penstock.failpoints import failpoint
from penstock.patience import Patience

TRIES_MAX = 3
"""How often a target may refuse a message permanently before it is set aside."""


class ApplierHooks(NamedTuple):
    """What an applier calls: to report to the user, if the target cannot be used as it is, and if
    a stream's position differs from the one in the spool.
    """

    tell: Callable[[str], None]
    give_up: Callable[[UsageError], None]
    reset: Callable[[str], None]


class SinkApplier:
    """One worker's stream: its target, and a thread while there is something to apply."""

    def __init__(self, name: str, target: SinkTarget, spool: Spool, hooks: ApplierHooks) -> None:
        self.name = name
        self.target = target
        self._spool = spool
        self._hooks = hooks
        self._using = threading.Lock()
        """Held while the target is used: by its thread, or to look up its position."""
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_awake = False
        self._is_known = False
        """Whether the spool is known to be at the target's position."""
        self._tries = 0
        self._patience = Patience(f"the target of {name}", hooks.tell)

    def find_start(self) -> Mark:
        """The target's position in a stream that the spool knows nothing about."""
        with self._using:
            found = self.target.applied()
        self._is_known = True
        return found

    def wake(self) -> None:
        """Called when there may be something to apply or to reconcile."""
        with self._state:
            if self._is_stopping:
                return
            self._is_awake = True
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name=f"penstock-sink-{self.name}", daemon=True
                )
                thread.start()
                self._thread = thread
            self._state.notify_all()

    def stop(self) -> None:
        """Finish the current step, and release the target."""
        with self._state:
            self._is_stopping = True
            thread, self._thread = self._thread, None
            self._state.notify_all()
        if thread is not None:
            thread.join()
        with self._using:
            self.target.close()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_awake or self._is_stopping)
                if self._is_stopping:
                    return
                self._is_awake = False
            wait_s = self._work()
            with self._state:
                if wait_s is not None:
                    self._is_awake = True
                    self._state.wait_for(lambda: self._is_stopping, wait_s)

    def _work(self) -> float | None:
        """Apply everything there is; after a failure, return the seconds until the next attempt."""
        try:
            with self._using:
                self._apply_all()
        except Exception as error:
            self._is_known = False  # the outcome of the last step is unknown
            if isinstance(error, UsageError):
                self._hooks.give_up(error)
            return self._patience.note_failure(describe(error))
        self._patience.note_answer()
        return None

    def _apply_all(self) -> None:
        if not self._is_known:
            self._reconcile()
        while not self._is_stopping and (commit := self._spool.next_commit(self.name)):
            self._apply(commit)

    def _reconcile(self) -> None:
        """Continue from the target's position; if the spool does not have that, start there."""
        found, marks = self.target.applied(), self._spool.marks(self.name)
        if marks is None or not marks.applied <= found <= marks.committed:
            at = "nothing" if marks is None else f"{marks.applied} to {marks.committed}"
            self._hooks.tell(
                f"the target of {self.name} is at {found}, but the spool has {at}: continuing from "
                "the target's position"
            )
            self._spool.adopt(self.name, found)
            self._hooks.reset(self.name)
        elif found != marks.applied:
            self._spool.set_applied(self.name, found)
        self._is_known = True

    def _apply(self, commit: StagedCommit) -> None:
        try:
            after = self._find_place(commit)
            if after >= commit.end:  # a transaction without messages
                self._spool.set_applied(self.name, after)
            for messages, start, end in self._pages(commit, after, self.target.page_bytes):
                self._step(messages, start, end)
                if self._is_stopping:
                    return
        except Exception as error:
            if is_passing(error) or isinstance(error, UsageError | MarkMovedError):
                raise
            self._tries += 1
            if self._tries < TRIES_MAX:
                raise
            self._apply_around(commit)
        self._tries = 0

    def _find_place(self, commit: StagedCommit) -> Mark:
        """Where to continue a commit that the target may already have in part."""
        marks = self._spool.marks(self.name)
        return commit.start if marks is None else max(commit.start, marks.applied)

    def _step(self, messages: Iterable[SinkMessage], start: Mark, end: Mark) -> None:
        failpoint("sink.apply")
        self.target.apply(messages, start, end)
        failpoint("sink.applied")
        self._spool.set_applied(self.name, end)

    def _pages(
        self, commit: StagedCommit, after: Mark, page_bytes: int | None
    ) -> Iterator[tuple[Iterable[SinkMessage], Mark, Mark]]:
        """The messages passed to the target in one call, with the marks before and after them."""
        lots = self._spool.messages(self.name, after, commit.end)
        if after >= commit.end:
            return
        if page_bytes is None:
            yield (message for lot, _, _ in lots for message in lot), after, commit.end
            return
        page: list[SinkMessage] = []
        start = at = after
        for lot, _, end in _cut(lots, page_bytes):
            page += lot
            at = end
            if at.offset - start.offset >= page_bytes:
                yield page, start, at
                page, start = [], at
        if page:
            yield page, start, at

    # What a target refuses permanently

    def _apply_around(self, commit: StagedCommit) -> None:
        """Apply a commit in small steps, and set aside the messages that are refused."""
        for messages, start, _ in self._pages(commit, self._find_place(commit), PAGE_BYTES):
            self._halve(list(messages), start)

    def _halve(self, messages: list[SinkMessage], start: Mark) -> None:
        end = start
        for message in messages:
            end = end.advance(message.data)
        try:
            self._step(messages, start, end)
        except Exception as error:
            if is_passing(error) or isinstance(error, UsageError | MarkMovedError):
                raise
            if len(messages) == 1:
                self._bury(messages[0], start, end, error)
                return
            half = len(messages) // 2
            self._halve(messages[:half], start)
            for message in messages[:half]:
                start = start.advance(message.data)
            self._halve(messages[half:], start)

    def _bury(self, message: SinkMessage, start: Mark, end: Mark, error: Exception) -> None:
        dead = DeadMessage(self.name, start, now_ms(), message, describe(error))
        self._spool.bury(dead)
        failpoint("sink.buried")
        self._step([], start, end)
        self._hooks.tell(
            f"{self.name}: the target refuses message {start.messages}, which was set aside: "
            f"{describe(error)}"
        )


def _cut(lots: Iterable[Lot], size: int) -> Iterator[Lot]:
    """The lots, split where they are too large."""
    for lot, start, end in lots:
        if end.offset - start.offset <= size:
            yield lot, start, end
            continue
        part: list[SinkMessage] = []
        first = at = start
        for message in lot:
            part.append(message)
            at = at.advance(message.data)
            if at.offset - first.offset >= size:
                yield part, first, at
                part, first = [], at
        if part:
            yield part, first, at
