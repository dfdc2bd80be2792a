"""What a coordinator writes into the log: steps, at times whole partitions, and dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.errors import UsageError
from penstock.groups.letters import letter_of
from penstock.groups.names import GroupName
from penstock.groups.outcomes import Bury, GroupStep
from penstock.groups.reading import GroupReader
from penstock.groups.saved import (
    RING,
    VALUE_BYTES_MAX,
    Clocks,
    GroupKeys,
    KnownGroup,
    SavedClient,
    cut_step,
    pack_client,
    pack_left,
    pack_step,
    to_saved_step,
)
from penstock.groups.slots import GroupPartition, PartitionWindow, Slot
from penstock.groups.transactions import PreparedTransaction
from penstock.log.api import Commit, Part
from penstock.log.declaring.objects import Stream
from penstock.log.letters import DEAD_CHARS_MAX, DeadLetter
from penstock.log.writing.compose import Composer, EventOptions, Outgoing
from penstock.records.event import StoredEvent, now_us

SHORT_CHARS = 1000
LETTERS_MAX = 100
"""How many dead letters are written in one commit."""


class GroupJournal:
    """Composes a coordinator's commits, under the numbers of its steps."""

    def __init__(
        self, group: GroupName, reader: GroupReader, letters: Stream, known: KnownGroup
    ) -> None:
        limits = reader.log.limits
        self._group = group
        self._reader = reader
        self._letters = letters
        self._composer = Composer(group.producer, limits)
        self._keys = GroupKeys(*group)
        self._number = known.next_number
        self._changed = set(known.partitions)
        """Partitions of which something was saved since they were saved whole, by whomever."""
        self._values = {place: found.values for place, found in known.partitions.items()}
        """How many values the log has of each partition that is saved whole."""
        self._snapshots: dict[GroupPartition, int] = {}
        """The same, of those that are being saved."""
        self._concerned: set[GroupPartition] = set()
        """Partitions that the step which is being saved concerns."""
        fitting = limits.commit_bytes_max // (4 * DEAD_CHARS_MAX)
        self._letters_max = max(1, min(LETTERS_MAX, fitting))

    @property
    def is_full(self) -> bool:
        """Whether the next commit saves whole what has changed, and the ring begins again."""
        return self._number % RING == 0

    def cut(self, step: GroupStep) -> list[GroupStep]:
        """A step as several that can be saved; at least one."""
        return list(cut_step(step, VALUE_BYTES_MAX, self._letters_max))

    def bury(
        self, step: GroupStep, find_event: Callable[[Slot], StoredEvent[object] | None]
    ) -> list[Part]:
        """The dead letters of a step."""
        letters = [
            letter_of(
                self._reader.stream_of(slot), self._group.name, slot, outcome, find_event(slot)
            )
            for slot, outcome in step.settled
            if isinstance(outcome, Bury)
        ]
        if not letters:
            return []
        events = [self._admit(letter, how) for letter, how in letters]
        return [self._composer.part(self._letters, events)]

    def _admit(self, letter: DeadLetter, how: EventOptions) -> Outgoing:
        """A dead letter as an event, without most of it if a stream cannot hold it: however large
        another program's message is, the group must go on.
        """
        try:
            return self._composer.admit(self._letters, letter, how)
        except UsageError as error:
            short = msgspec.structs.replace(
                letter,
                key=None if letter.key is None else letter.key[:SHORT_CHARS],
                data=letter.data[:SHORT_CHARS],
                error=letter.error[:SHORT_CHARS],
                traceback=f"the letter was shortened: {error}"[:SHORT_CHARS],
            )
            return self._composer.admit(self._letters, short, EventOptions())

    def compose(
        self,
        step: GroupStep,
        letters: Sequence[Part],
        transactions: Sequence[PreparedTransaction],
        expired: Iterable[str],
    ) -> Commit:
        """One commit: the step, its dead letters and transactions; without clients that are
        `expired`; and now and then all that has changed, whole. The group's lock is held.
        """
        progress: dict[str, bytes | None] = {self._keys.client(name): None for name in expired}
        self._snapshots = {}
        for place in self._changed if self.is_full else ():
            packed = self._reader.pack(place, self._number)
            progress |= self._keys.snapshot(place, packed, self._values.get(place, 0))
            self._snapshots[place] = len(packed)
        saved_step = to_saved_step(self._number, step, Clocks.read())
        progress[self._keys.step(self._number)] = pack_step(saved_step)
        self._concerned = saved_step.places
        parts = list(letters)
        for one in transactions:
            parts += one.parts
            if one.name is not None:
                saved = pack_client(SavedClient(one.name[1], now_us()))
                progress[self._keys.client(one.name[0])] = saved
        conditions = [condition for one in transactions for condition in one.conditions]
        return Commit(parts=parts, progress=progress, conditions=conditions)

    def note_saved(self) -> None:
        """The log has it: what was saved whole has changed since only by the step itself."""
        self._number += 1
        self._values.update(self._snapshots)
        self._changed.difference_update(self._snapshots)
        self._changed |= self._concerned

    def compose_end(
        self, windows: Iterable[tuple[GroupPartition, PartitionWindow]], clocks: Clocks
    ) -> Commit:
        """Everything as it is left. The group's lock is held."""
        progress: dict[str, bytes | None] = {}
        for place, window in windows:
            packed = pack_left(self._number, window, self._reader.unread(place), clocks)
            progress |= self._keys.snapshot(place, packed, self._values.get(place, 0))
        return Commit(progress=progress)
