"""What a group commits: rounds of what its members did, one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Lock

import msgspec

from penstock.errors import LeaseLostError, PenstockError
from penstock.failpoints import failpoint
from penstock.groups.names import GroupName
from penstock.groups.outcomes import Settlement
from penstock.groups.state import GroupState
from penstock.groups.transactions import PreparedTransaction
from penstock.log.api import Commit, Holder, Log
from penstock.log.writing.fate import Fate, fate_of
from penstock.patience import Patience, Tell


class GroupWriter:
    """Commits as a group, one after the other, under the numbers of its producer."""

    def __init__(self, log: Log, group: GroupName, holder: Holder, sequence: int) -> None:
        self.holder = holder
        self._log = log
        self._sequence = sequence
        self._what = f"the log of group {group}"

    def commit(self, commit: Commit, wait: Callable[[float], bool], tell: Tell) -> None:
        """Commit, however long it takes: what may succeed later is tried again, and so is what may
        have happened.

        Raises what is wrong for good; `wait` returns true where it is not to be waited for.
        """
        patience = Patience(self._what, tell)
        failpoint("group.save")
        while True:
            try:
                self._log.commit(self.holder, self._sequence, commit)
                break
            except PenstockError as error:
                is_over = fate_of(error) in (Fate.REFUSED, Fate.FAILED)
                if is_over or wait(patience.note_failure(error)):
                    raise
        failpoint("group.saved")
        self._sequence += 1


class GroupRound:
    """What is to be saved together. Whoever waits for it waits for all of it."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []
        self.transactions: list[PreparedTransaction] = []
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # one of many who wait cannot cancel it

    def fail(self, error: PenstockError) -> None:
        """Nothing of it is known to have happened."""
        for done in (self.done, *(one.done for one in self.transactions)):
            if not done.done():
                done.set_exception(error)


class AckNote(msgspec.Struct, gc=False):
    """An acknowledgement, and the round that it became part of: none, if its lease was over."""

    round: GroupRound | None = None


class GroupRounds:
    """The round that is being filled: with the group's lock, or by notes without it.

    If every single acknowledgement took the lock, members and saver would wait for each other all
    the time. So it is a note, which whoever has the lock carries out. A member adds its note first,
    and then looks whether that was in time; whoever takes leases away shuts notes out first, and
    then carries out those that are there. So one of the two always sees the other.
    """

    def __init__(self, state: GroupState, lock: Lock) -> None:
        self.current = GroupRound()
        self._state = state
        self._lock = lock
        self._notes: dict[int, AckNote] = {}
        self._is_shut = False
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        return not (self._notes or self.current.settled or self.current.transactions)

    def ack(self, lease: int) -> Future[None] | None:
        """Acknowledge a message by a note; `None` if that needs the lock. Raises `LeaseLostError`.

        If notes were not shut out when it was added, then it is carried out before anything else
        happens: before its lease can end, and before another round follows the current one.
        """
        note = AckNote()
        if self._notes.setdefault(lease, note) is not note:
            return None
        was_open = not self._is_shut  # then whoever shuts it from now on carries the note out first
        given = self.current
        if was_open and self._state.has_lease(lease) and self._is_pending(lease, note):
            return given.done
        with self._lock:
            if self._notes.get(lease) is note:
                del self._notes[lease]
                return None
        if note.round is None:
            raise LeaseLostError()
        return note.round.done

    def _is_pending(self, lease: int, note: AckNote) -> bool:
        """Whether a note will be carried out: in what was the current round just before."""
        return self._notes.get(lease) is note and not self._is_closed

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Have the lock, with all notes carried out and no others made: leases may end."""
        with self._lock:
            self._carry_out()
            self._is_shut = True
            try:
                self._carry_out()
                yield
            finally:
                self._is_shut = self._is_closed

    def _carry_out(self) -> None:
        if self._is_closed:  # nobody saves the round: whoever waits with a note finds out
            return
        now_s = time.monotonic()
        for lease, note in self._notes.copy().items():  # others are added meanwhile
            if self._state.has_lease(lease):
                self.current.settled.append(self._state.settle(lease, None, now_s))
                note.round = self.current
            del self._notes[lease]  # only now: until then it cannot be acknowledged again

    def begin_next(self) -> GroupRound:
        """The round that was filled; exclusively."""
        given, self.current = self.current, GroupRound()
        return given

    def close(self) -> None:
        """Everything needs the lock from now on; with the lock."""
        self._is_shut = self._is_closed = True
