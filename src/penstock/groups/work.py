"""A group at work: who has which message, and what the log has to know of it.

Members call from threads of their own; what they take is handed out under the lock. Everything
that becomes of messages goes into the log through one thread, as much as there is in one commit,
and counts once it is there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from penstock.errors import (
    ClosedError,
    LeaseLostError,
    OffsetGoneError,
    PenstockError,
    UsageError,
)
from penstock.groups.control import is_paused
from penstock.groups.journal import GroupJournal
from penstock.groups.letters import find_replays
from penstock.groups.names import GroupName
from penstock.groups.outcomes import (
    DELAY_S_MAX,
    Bury,
    GroupStep,
    MessageOutcome,
    Redeliver,
    clean_reason,
)
from penstock.groups.reading import GroupReader
from penstock.groups.rounds import GroupRound, GroupRounds, GroupWriter
from penstock.groups.saved import Clocks, KnownGroup
from penstock.groups.slots import Lane, Slot
from penstock.groups.state import GroupState
from penstock.groups.transactions import PreparedTransaction, TransactionBook
from penstock.log.api import Commit, Count
from penstock.log.declaring.objects import Stream
from penstock.log.letters import readable
from penstock.log.writing.fate import Fate, fate_of
from penstock.patience import Patience, Tell
from penstock.records.event import StoredEvent

TICK_S = 0.5
T = TypeVar("T")
LOOK_S = 1.0
"""How often a coordinator looks whether its group was paused, or letters replayed to it."""


class Handout(msgspec.Struct, frozen=True, gc=False):
    """A message as it was handed out: its slot may be handed out again since."""

    slot: Slot
    lease: int
    deliveries: int
    first_s: float | None


class GroupWork:
    """What a group's coordinator does. Begins when the group is taken over, and never again."""

    def __init__(
        self,
        group: GroupName,
        state: GroupState,
        reader: GroupReader,
        writer: GroupWriter,
        *,
        letters: Stream,
        known: KnownGroup,
        lock: threading.Lock,
        tell: Tell,
    ) -> None:
        self.group = group
        self.epoch = writer.holder.epoch
        self._state = state
        self._reader = reader
        self._writer = writer
        self._journal = GroupJournal(group, reader, letters, known)
        self._book = TransactionBook(known.clients)
        self._tell = tell
        self._lock = lock
        self._takers = threading.Condition(lock)
        self._saver = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._waiting = 0
        self._look_at = 0.0
        self._slowest: Lane | None = None
        self._rounds = GroupRounds(state, lock)
        self._is_idle = False
        """Whether the saver waits for something to save, or is about to."""
        self._over = threading.Event()
        self._failure: PenstockError | None = None
        self.is_heard = False
        """Whether somebody was told why it cannot go on."""

    # Ending

    def stop(self) -> None:
        """Have it saved what is under way; then nothing more happens."""
        with self._rounds.exclusively():
            self._over.set()
            self._rounds.close()
            self._wake_all()

    def fail(self, error: PenstockError) -> None:
        """It cannot go on. Whoever waits hears why."""
        with self._lock:
            self._failure = self._failure or error
            self._over.set()
            self._rounds.close()
            given = self._rounds.begin_next()
            self._wake_all()
        given.fail(self._failure)  # without the lock: callbacks may do anything

    def _wake_all(self) -> None:
        self._saver.notify_all()
        self._takers.notify_all()
        self._room.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            self.is_heard = True
            raise self._failure
        if self._over.is_set():
            raise ClosedError(f"group {self.group} is closed")

    # Reading ahead

    def read(self) -> None:
        """Read ahead, until it is over. Runs in a thread of its own."""
        patience = Patience(f"stream {self.group.stream}", self._tell)
        while not self._over.is_set():
            try:
                has_added = self._reader.read_round()
                self._look_around()
                patience.note_answer()
            except OffsetGoneError:
                continue  # retention was faster: the next round goes on behind what it has removed
            except PenstockError as error:
                if not error.retriable:
                    raise
                self._over.wait(patience.note_failure(error))
                continue
            if has_added:
                with self._lock:
                    self._saver.notify()
                    self._takers.notify()
            else:
                self._await_news()

    def _look_around(self) -> None:
        """Now and then, whether the group was paused, or letters replayed to it."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        replays = find_replays(self._reader.log, self.group)
        if replays is not None and not self._reader.has_input(replays.id):
            self._reader.add_input(replays.id, replays)
        paused = is_paused(self._reader.log, self.group)
        with self._lock:
            if paused != self._state.is_paused:
                self._state.is_paused = paused
                self._tell(f"group {self.group} {'is paused' if paused else 'goes on'}")
                self._takers.notify_all()

    def _await_news(self) -> None:
        places = {name: heads for name, heads in self._reader.places().items() if heads}
        if places:
            self._reader.log.wait(places, TICK_S)
            return
        with self._lock:
            self._tell_slowest()
            self._room.wait(TICK_S)

    def _tell_slowest(self) -> None:
        """Say what everybody waits for, once."""
        lane, most = self._state.slowest(), self._state.rules.outstanding_max
        if lane is None or lane is self._slowest or lane.size < most // 2:
            return
        self._slowest = lane
        what = f"key {readable(lane.key)!r}" if isinstance(lane.key, bytes) else "one partition"
        self._tell(
            f"group {self.group} waits: {lane.size:,} messages of {what} are not acknowledged, and "
            f"no more than {most:,} of a partition may be (outstanding_max)"
        )

    # Members

    def take(self, member: str, count: int, timeout_s: float) -> list[Handout]:
        """Up to so many messages; waits until there is one, or the timeout is over.

        Where others wait too, it is a fair share of what there is.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._waiting += 1
            try:
                while True:
                    self._check()
                    now_s = time.monotonic()
                    taken = self._state.take(member, min(count, self._share()), now_s)
                    if self._state.needs_arming:
                        self._saver.notify()
                    if taken or now_s >= deadline:
                        return [Handout(s, s.lease, s.deliveries, s.first_s) for s in taken]
                    self._takers.wait(min(TICK_S, deadline - now_s))
            finally:
                self._waiting -= 1
                if self._state.ready_count:
                    self._takers.notify()

    def _share(self) -> int:
        """How many messages each who waits may have."""
        return max(1, self._state.ready_count // self._waiting) * self._state.rules.key_batch

    def ack(self, epoch: int, leases: Sequence[int]) -> Future[None]:
        """The messages are done. What this returns is, once that is saved.

        Raises `LeaseLostError` if one of them is not had any more; then nothing was done.
        """
        done = self._rounds.ack(leases[0]) if len(leases) == 1 and epoch == self.epoch else None
        if done is None:
            return self._settle(epoch, leases, lambda slot: None)
        if self._is_idle:
            with self._lock:
                self._saver.notify()
        return done

    def nack(
        self, epoch: int, leases: Sequence[int], delay_s: float | None, reason: str
    ) -> Future[None]:
        """The messages failed, and are handed out again after a pause."""

        if delay_s is not None and not 0 <= delay_s <= DELAY_S_MAX:
            raise UsageError(f"delay_s must be 0 to {DELAY_S_MAX:,.0f} seconds, not {delay_s}")
        text = clean_reason(reason)

        def fail(slot: Slot) -> Redeliver:
            pause_s = self._state.pause_before(slot) if delay_s is None else delay_s
            return Redeliver(pause_s, text)

        return self._settle(epoch, leases, fail)

    def reject(self, epoch: int, leases: Sequence[int], reason: str) -> Future[None]:
        """The messages become dead letters."""
        text = clean_reason(reason)
        return self._settle(epoch, leases, lambda slot: Bury(text))

    def _settle(
        self, epoch: int, leases: Sequence[int], judge: Callable[[Slot], MessageOutcome]
    ) -> Future[None]:
        with self._rounds.exclusively():
            self._check_leases(epoch, leases)
            now_s, settled = time.monotonic(), self._rounds.current.settled
            if not settled:
                self._saver.notify()
            for lease in leases:
                if self._state.has_lease(lease):  # one behind another was given back with it
                    outcome = judge(self._state.slot_of(lease))
                    settled.append(self._state.settle(lease, outcome, now_s))
            return self._rounds.current.done

    def has_lease(self, lease: int) -> bool:
        """Whether a message is still its member's."""
        with self._lock:
            return self._state.has_lease(lease)

    def release(self, epoch: int, leases: Sequence[int]) -> None:
        """Give messages back as if they had not been handed out."""
        with self._rounds.exclusively():
            self._check_leases(epoch, leases)
            for lease in leases:
                if self._state.has_lease(lease):
                    self._state.release(lease, time.monotonic())
            self._takers.notify(len(leases))

    def extend(self, epoch: int, leases: Sequence[int], lease_s: float | None) -> None:
        """Have messages for longer."""
        if lease_s is not None and not 0 < lease_s <= DELAY_S_MAX:
            raise UsageError(f"lease_s must be up to {DELAY_S_MAX:,.0f} seconds, not {lease_s}")
        with self._rounds.exclusively():
            self._check_leases(epoch, leases)
            for lease in leases:
                self._state.extend(lease, time.monotonic(), lease_s)

    def join(self, member: str, silence_s: float) -> None:
        """A member that says something at least so often."""
        with self._lock:
            self._state.join(member, time.monotonic(), silence_s)

    def leave(self, member: str) -> None:
        """A member goes, and gives back what it has."""
        with self._rounds.exclusively():
            self._state.leave(member, time.monotonic())
            self._takers.notify_all()

    def execute(self, epoch: int | None, given: PreparedTransaction) -> Future[None]:
        """Have a transaction committed; where its client's has been already, that is all.

        Raises `LeaseLostError` if it has a message that is not had any more.
        """
        with self._rounds.exclusively():
            self._check()
            if (earlier := self._book.find(given)) is not None:
                return earlier
            self._check_leases(self.epoch if epoch is None else epoch, given.leases)
            self._book.begin(given)
            now_s = time.monotonic()
            given.settled = [self._state.settle(lease, None, now_s) for lease in given.leases]
            self._rounds.current.transactions.append(given)
            self._saver.notify()
            return given.done

    def _check_leases(self, epoch: int, leases: Sequence[int]) -> None:
        self._check()
        if epoch != self.epoch:
            raise LeaseLostError(
                f"the message was handed out before group {self.group} was taken over: it will be, "
                "or was, handed out again"
            )
        for lease in leases:
            self._state.slot_of(lease)

    # Saving

    def save(self) -> None:
        """Save what becomes of messages, until it is over and nothing is left to be saved."""
        while True:
            with self._lock:
                self._is_idle = True  # before it is looked for notes
                self._saver.wait_for(self._is_due, self._until_next_s())
                self._is_idle = False
            with self._rounds.exclusively():
                if self._failure is not None:
                    raise self._failure
                is_over = self._over.is_set()
                given = self._rounds.begin_next()
            try:
                has_saved = self._save_round(given)
            except PenstockError as error:
                given.fail(error)
                raise
            except BaseException as error:
                what = f"group {self.group} failed: {type(error).__name__}: {error}"
                given.fail(PenstockError(what))
                raise
            if has_saved:
                given.done.set_result(None)
            elif is_over:
                break
        self._commit(self._compose_end())

    def _save_round(self, given: GroupRound) -> bool:
        """In one commit, if that is possible; otherwise what is refused fails alone, and what is
        too large for one commit is saved in several. Whether there was anything to save.
        """
        with self._rounds.exclusively():
            step = self._collect(given)
        if not (step.settled or step.armed or given.transactions):
            return False
        accepted = self._check_transactions(given.transactions)
        first, *more = self._journal.cut(step)
        self._save_first(first, accepted)
        for part in more:
            self._save_step(part, [])
        return True

    def _save_first(self, step: GroupStep, accepted: Sequence[PreparedTransaction]) -> None:
        try:
            self._save_step(step, accepted)
        except UsageError as error:
            if not accepted or fate_of(error) is not Fate.REFUSED:
                raise
            self._save_step(step, [])
            for one in accepted:
                try:
                    self._save_step(GroupStep([], []), [one])
                except UsageError as why:
                    self._refuse(one, why)

    def _check_transactions(
        self, given: Sequence[PreparedTransaction]
    ) -> list[PreparedTransaction]:
        """Those that can be committed."""
        accepted: list[PreparedTransaction] = []
        written: set[tuple[str, bytes]] = set()
        for one in given:
            try:
                self._patiently(partial(one.check, self._reader.log, written))
            except PenstockError as why:
                self._refuse(one, why)
                continue
            accepted.append(one)
            written |= one.keys_written()
        return accepted

    def _patiently(self, do: Callable[[], T]) -> T:
        """Do it; again and again while the log is away."""
        patience = Patience(f"the log of group {self.group}", self._tell)
        while True:
            try:
                return do()
            except PenstockError as error:
                if not error.retriable or self._wait(patience.note_failure(error)):
                    raise

    def _refuse(self, given: PreparedTransaction, why: PenstockError) -> None:
        with self._lock:
            self._state.undo(GroupStep(given.settled, []), time.monotonic())
            self._book.end(given, is_saved=False)
        given.done.set_exception(why)

    def _save_step(self, step: GroupStep, transactions: Sequence[PreparedTransaction]) -> None:
        settled = [*step.settled, *(one for given in transactions for one in given.settled)]
        whole = GroupStep(settled, step.armed)
        letters = self._journal.bury(whole, self._find_event)
        with self._lock:
            expired = self._book.find_expired() if self._journal.is_full else []
            commit = self._journal.compose(whole, letters, transactions, expired)
        self._commit(commit)
        with self._lock:
            self._book.forget(expired)
            self._journal.note_saved()
            self._finish(whole)
            for given in transactions:
                self._book.end(given, is_saved=True)
        for given in transactions:
            given.done.set_result(None)

    def _is_due(self) -> bool:
        return (
            self._over.is_set()
            or not self._rounds.is_empty
            or self._state.needs_arming
            or self._state.has_exhausted
            or self._until_next_s() <= 0
        )

    def _until_next_s(self) -> float:
        return max(0.0, min(TICK_S, self._state.next_time() - time.monotonic()))

    def _collect(self, given: GroupRound) -> GroupStep:
        now_s = time.monotonic()
        self._state.tick(now_s)
        given.settled += self._state.expire(now_s)
        self._takers.notify()  # a pause may be over
        return GroupStep(given.settled, [] if self._over.is_set() else self._state.arm(now_s))

    def _find_event(self, slot: Slot) -> StoredEvent[object] | None:
        """The event of a message, if there is one; as it is stored, if it is no such record."""
        for read in (self._reader.event, self._reader.stored_event):
            with contextlib.suppress(Exception):  # a dead letter tells of what cannot be read, too
                return self._patiently(partial(read, slot))
        return None

    def _finish(self, step: GroupStep) -> None:
        self._state.finish(step, time.monotonic())
        for slot, _ in step.settled:
            if slot.state == "done":
                self._reader.chunks.finish(slot)
        self._takers.notify(len(step.settled) + len(step.armed))
        self._room.notify()

    def _compose_end(self) -> Commit:
        """Everything as it is left; what is handed out is given back."""
        clocks = Clocks.read()
        with self._lock:
            for member in self._state.members():
                self._state.leave(member, clocks.steady_s)
            return self._journal.compose_end(self._state.windows.items(), clocks)

    def _commit(self, commit: Commit) -> None:
        self._writer.commit(commit, self._wait, self._tell)

    def _wait(self, pause_s: float) -> bool:
        """Wait before the next try; true if it is not to be waited for any more."""
        time.sleep(pause_s)
        return self._failure is not None

    # Looking

    def lag(self) -> Count:
        """How many messages are not acknowledged."""
        return self._reader.lag()

    def event(self, slot: Slot) -> StoredEvent[object]:
        """The event of a message that was taken; raises whatever is wrong with it."""
        return self._reader.event(slot)
