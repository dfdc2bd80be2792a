"""What a group commits: rounds of what its members did, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from penstock.errors import PenstockError
from penstock.failpoints import failpoint
from penstock.groups.names import GroupName
from penstock.groups.outcomes import Settlement
from penstock.groups.transactions import PreparedTransaction
from penstock.log.api import Commit, Holder, Log
from penstock.log.writing.fate import Fate, fate_of
from penstock.patience import Patience

Tell = Callable[[str], None]


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
