"""What a group has handed out and what it may hand out next: a state machine without I/O.

In goes what happened: messages were read, taken, acknowledged, given back; a member is gone; time
has passed. Whatever has to be in the log before it counts is collected as a `GroupStep`: whoever
drives the machine saves it, and then says `finish`, or `undo` if it was refused.

A message is *armed* before it is handed out: the log counts the delivery ahead of it, so that one
that kills its process is counted too. Messages are armed in blocks, new ones by how far the group
was dispatched. After a crash all of a block count as handed out, though few were; so blocks get
smaller with each try, and at the last one it is known which message it was.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator

from penstock.errors import LeaseLostError
from penstock.groups.leases import Leases
from penstock.groups.outcomes import (
    Bury,
    GroupRules,
    GroupStep,
    History,
    MessageOutcome,
    Redeliver,
    Settlement,
    add_reason,
)
from penstock.groups.slots import GroupPartition, Lane, PartitionWindow, Slot

BLOCK = 1024
"""How many messages are armed at once, at most. At the last try it is one, before that four times
more each."""
KILLED = "its member was killed or stopped before acknowledging it"


class _Member:
    __slots__ = ("heard_s", "leases", "silence_s")

    def __init__(self, heard_s: float, silence_s: float) -> None:
        self.heard_s = heard_s
        self.silence_s = silence_s
        """After so long without a word it is gone."""
        self.leases: set[int] = set()


class GroupState:
    """One group, for one coordinator. Times are of a clock that only goes forward, in seconds."""

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self.is_paused = False
        self.windows: dict[GroupPartition, PartitionWindow] = {}
        self._lanes: dict[object, Lane] = {}
        self._ready: deque[Lane] = deque()
        """Lanes whose first message can be taken."""
        self._unarmed: list[deque[Lane]] = [deque() for _ in range(rules.deliveries_max)]
        """Lanes whose first message is not armed, by how often that was handed out."""
        self._blocks = [min(BLOCK, 1 << 2 * min(n, 5)) for n in range(rules.deliveries_max)][::-1]
        if rules.deliveries_max > 1:
            self._blocks[0] = min(BLOCK, 4 * self._blocks[0])  # few of these were ever a problem
        self._on_trial = [0] * rules.deliveries_max
        """How many of each are armed, and were not handed out yet."""
        self._exhausted: deque[Lane] = deque()
        """Lanes whose first message was handed out too often, before a crash."""
        self._delayed: list[tuple[float, int, Lane]] = []
        self._leases = Leases(rules.lease_s)
        self._members: dict[str, _Member] = {}
        self._numbers = 0
        self._failures = 0
        """Messages in a row that would have become dead letters."""
        self._resume_s = 0.0
        """Until then the breaker keeps the group from handing out."""

    # Reading

    def open(self, place: GroupPartition, head: int, dispatched: int) -> None:
        """Begin with a partition: everything below `head` is acknowledged."""
        self.windows[place] = PartitionWindow(place, head, dispatched)

    def room(self, place: GroupPartition) -> int:
        """How many more messages of a partition may be added."""
        return max(0, self.rules.outstanding_max - self.windows[place].size)

    def skip(self, place: GroupPartition, end: int) -> None:
        """There is nothing to be handed out below `end` that was not added."""
        window = self.windows[place]
        window.head = max(window.head, end)

    def add(
        self,
        place: GroupPartition,
        offset: int,
        end: int,
        key: bytes | None,
        now_s: float,
        history: History | None = None,
    ) -> Slot:
        """A message was read, behind those that were read before it."""
        window = self.windows[place]
        lane = self._lane(place, key)
        slot = Slot(window, window.head, offset, end, lane)
        if history is not None:
            slot.deliveries, slot.first_s, slot.due_s, slot.reasons = history[:4]
            slot.is_reprieved = history.is_reprieved
            slot.is_suspect = history.is_suspect
        window.add(slot)
        lane.add(slot)
        if lane.first is slot:
            self._offer(lane, now_s)
        return slot

    def _lane(self, place: GroupPartition, key: bytes | None) -> Lane:
        match self.rules.order:
            case "key" if key is not None:
                name: object = key
            case "partition":
                name = place
            case "stream":
                name = ""
            case _:
                return Lane(None)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        return lane

    def _offer(self, lane: Lane, now_s: float) -> None:
        """Have the first message of a lane taken, once it may be."""
        slot = lane.first
        if slot is None:
            self._lanes.pop(lane.key, None)
            return
        if lane.in_flight or lane.is_offered:
            return
        lane.is_offered = True
        if self._is_exhausted(slot):
            self._exhausted.append(lane)
        elif slot.due_s > now_s:
            self._numbers += 1
            heapq.heappush(self._delayed, (slot.due_s, self._numbers, lane))
        elif slot.is_armed or self._is_dispatched(slot):
            self._ready.append(lane)
        else:
            self._unarmed[self._level(slot)].append(lane)

    def _is_exhausted(self, slot: Slot) -> bool:
        is_allowed = slot.is_armed or slot.is_reprieved
        return slot.deliveries >= self.rules.deliveries_max and not is_allowed

    def _level(self, slot: Slot) -> int:
        """How often it was handed out, as far as that says how carefully it is to be armed."""
        return min(slot.deliveries, self.rules.deliveries_max - 1)

    def _is_dispatched(self, slot: Slot) -> bool:
        """Whether the log counts the first delivery of a message already."""
        return slot.deliveries == 0 and slot.offset < slot.window.dispatched

    # Taking

    def take(self, member: str, count: int, now_s: float) -> list[Slot]:
        """Hand out up to so many messages that may be handed out now."""
        self.tick(now_s)
        who = self._hear(member, now_s)
        taken = self._take(member, who, count, now_s)
        self._forget(member)
        return taken

    def _take(self, member: str, who: _Member, count: int, now_s: float) -> list[Slot]:
        if self.is_paused or now_s < self._resume_s:
            return []
        room = min(
            count,
            self.rules.member_in_flight_max - len(who.leases),
            self.rules.in_flight_max - len(self._leases),
        )
        if self._failures >= self.rules.breaker_letters:
            room = min(room, 1 - len(self._leases))
        taken: list[Slot] = []
        while self._ready and len(taken) < room:
            lane = self._ready.popleft()
            lane.is_offered = False
            slot, most = lane.first, min(self.rules.key_batch, room - len(taken))
            while slot is not None and most and self._may_follow(slot, now_s):
                self._lend(slot, member, who, now_s)
                taken.append(slot)
                slot, most = slot.after, most - 1
        return taken

    def _may_follow(self, slot: Slot, now_s: float) -> bool:
        if slot.state == "done":
            return False
        return slot.due_s <= now_s and (slot.is_armed or self._is_dispatched(slot))

    def _lend(self, slot: Slot, member: str, who: _Member, now_s: float) -> None:
        self._numbers += 1
        if slot.trial is not None and not self._is_alone(slot.trial, slot):
            self._end_trial(slot)
        slot.lane.in_flight += 1
        slot.state = "leased"
        slot.is_armed = False
        slot.deliveries += 1
        slot.first_s = now_s if slot.first_s is None else slot.first_s
        slot.lease = self._numbers
        slot.member = member
        self._leases.add(slot, now_s)
        who.leases.add(slot.lease)

    # Giving back

    def extend(self, lease: int, now_s: float, lease_s: float | None = None) -> None:
        """Have a message for longer. Raises `LeaseLostError` if it is not had any more."""
        self._leases.extend(self.slot_of(lease), now_s, lease_s)

    def release(self, lease: int, now_s: float) -> None:
        """Give a message back as if it had not been handed out, and those of its lane behind it."""
        slot = self.slot_of(lease)
        self._give_back(slot, now_s)

    def settle(self, lease: int, outcome: MessageOutcome, now_s: float) -> Settlement:
        """What becomes of a message, to be saved; until that is finished nobody else has it.

        Raises `LeaseLostError` if it is not had any more. What was handed out behind one that is
        not acknowledged is given back: it comes again behind it.
        """
        slot = self.slot_of(lease)
        if outcome is not None:
            outcome = self._judge(slot, outcome, now_s)
            self._give_back_behind(slot)
        self._end_lease(slot)
        slot.state = "settling"
        return Settlement(slot, outcome)

    def has_lease(self, lease: int) -> bool:
        return lease in self._leases

    def slot_of(self, lease: int) -> Slot:
        """Raises `LeaseLostError` if the message is not had any more."""
        slot = self._leases.get(lease)
        if slot is None:
            raise LeaseLostError()
        return slot

    def _judge(self, slot: Slot, outcome: Redeliver | Bury, now_s: float) -> Redeliver | Bury:
        """Whether a message that failed is tried again: not for ever, unless all of them fail."""
        if isinstance(outcome, Redeliver) and slot.deliveries < self.rules.deliveries_max:
            return outcome
        self._failures += 1
        if self._failures >= self.rules.breaker_letters:
            self._resume_s = now_s + self.rules.breaker_s
            if isinstance(outcome, Redeliver):
                return Redeliver(self.rules.breaker_s, outcome.reason, is_reprieve=True)
        return Bury(outcome.reason)

    def pause_before(self, slot: Slot) -> float:
        """How long a message that failed waits, unless somebody says otherwise."""
        doublings = min(slot.deliveries - 1, 60)
        return min(self.rules.backoff_max_s, self.rules.backoff_s * 2.0**doublings)

    def _end_lease(self, slot: Slot) -> None:
        self._end_trial(slot)
        self._leases.remove(slot)
        leases = self._members[slot.member].leases
        leases.discard(slot.lease)
        if not leases:
            self._forget(slot.member)

    def _forget(self, member: str) -> None:
        """Members that have nothing and need not be heard of do not pile up."""
        who = self._members.get(member)
        if who is not None and not who.leases and who.silence_s == math.inf:
            del self._members[member]

    def _give_back(self, slot: Slot, now_s: float) -> None:
        """Give a message back, and those of its lane behind it."""
        self._give_back_behind(slot)
        self._end_lease(slot)
        slot.state = "waiting"
        slot.deliveries -= 1
        slot.is_armed = True  # the log counts that delivery already
        slot.lane.in_flight -= 1
        self._offer(slot.lane, now_s)

    def _give_back_behind(self, slot: Slot) -> None:
        found: list[Slot] = []
        behind = slot.after if slot.lane.key is not None else None
        while behind is not None:
            if behind.state == "leased":
                found.append(behind)
            behind = behind.after
        for last in reversed(found):
            self._end_lease(last)
            last.state = "waiting"
            last.deliveries -= 1
            last.is_armed = True
            last.lane.in_flight -= 1

    # Saving

    def arm(self, now_s: float) -> list[Slot]:
        """The messages that the log should count next, ahead of their being handed out."""
        self.tick(now_s)
        found: list[Slot] = []
        for deliveries, lanes in enumerate(self._unarmed):
            if self._is_short(deliveries):
                room = self._blocks[deliveries] - self._on_trial[deliveries]
                end = len(found) + room
                while lanes and len(found) < end:
                    lane = lanes.popleft()
                    _first_of(lane).trial = deliveries
                    self._on_trial[deliveries] += 1
                    found += self._next_of(lane, end - len(found))
        return found

    def _next_of(self, lane: Lane, count: int) -> Iterable[Slot]:
        """What a lane may hand out together next, as far as it is to be armed alike."""
        first = _first_of(lane)
        return [first] if self.rules.key_batch == 1 else self._followers(lane, first, count)

    def _followers(self, lane: Lane, first: Slot, count: int) -> Iterator[Slot]:
        for slot in itertools.islice(lane, min(count, self.rules.key_batch)):
            if slot is not first and (slot.is_armed or self._level(slot) != self._level(first)):
                return
            if slot.state != "done":
                yield slot

    def _is_alone(self, trial: int, slot: Slot) -> bool:
        """Whether nothing like it is handed out beside it: were the process killed, this was it.
        What a member has given back since has not killed it.
        """
        return slot.is_suspect and trial > 0 and self._blocks[trial] == 1

    def _end_trial(self, slot: Slot) -> None:
        if slot.trial is not None:
            self._on_trial[slot.trial] -= 1
            slot.trial = None

    def _is_short(self, deliveries: int) -> bool:
        """Whether most of the last block was handed out."""
        return 2 * self._on_trial[deliveries] < self._blocks[deliveries]

    def finish(self, step: GroupStep, now_s: float) -> None:
        """The log has it."""
        for slot, outcome in step.settled:
            lane = slot.lane
            lane.in_flight -= 1
            if isinstance(outcome, Redeliver):
                slot.state = "waiting"
                slot.due_s = now_s + outcome.delay_s
                slot.is_suspect = False
                slot.is_reprieved = outcome.is_reprieve
                slot.reasons = add_reason(slot.reasons, outcome.reason)
            else:
                slot.window.finish(slot)
                lane.drop_done()
                if outcome is None:
                    self._failures = 0
            self._offer(lane, now_s)
        for slot in step.armed:
            window = slot.window
            slot.is_armed = True
            slot.is_reprieved = False
            if not slot.deliveries:
                window.dispatched = max(window.dispatched, slot.end)
            if slot.lane.first is slot:
                self._ready.append(slot.lane)

    def undo(self, step: GroupStep, now_s: float) -> None:
        """The log does not have it: whoever had the messages has them still."""
        for slot, _ in step.settled:
            if not slot.member:
                slot.state = "waiting"
                slot.lane.in_flight -= 1
                self._offer(slot.lane, now_s)
                continue
            slot.state = "leased"
            self._leases.add(slot, now_s)
            self._hear(slot.member, now_s).leases.add(slot.lease)
        for slot in step.armed:
            if slot.trial is not None:
                self._end_trial(slot)
                self._unarmed[self._level(slot)].appendleft(slot.lane)

    # Time and members

    def tick(self, now_s: float) -> None:
        """Have messages handed out again whose time has come."""
        while self._delayed and self._delayed[0][0] <= now_s:
            lane = heapq.heappop(self._delayed)[2]
            lane.is_offered = False
            self._offer(lane, now_s)

    def join(self, member: str, now_s: float, silence_s: float = math.inf) -> None:
        """A member is there, or still is, and gone once nothing is heard of it for so long."""
        self._hear(member, now_s).silence_s = silence_s

    def _hear(self, member: str, now_s: float) -> _Member:
        who = self._members.get(member)
        if who is None:
            who = self._members[member] = _Member(now_s, math.inf)
        who.heard_s = now_s
        return who

    def leave(self, member: str, now_s: float) -> None:
        """A member goes, and gives everything back that it has."""
        who = self._members.get(member)
        for lease in sorted(who.leases) if who else ():
            if slot := self._leases.get(lease):  # one behind another was given back with it
                self._give_back(slot, now_s)
        self._members.pop(member, None)

    def expire(self, now_s: float) -> list[Settlement]:
        """What becomes of messages that nobody acknowledged in time, or whose member is gone."""
        found: list[Settlement] = []
        for name, who in list(self._members.items()):
            if who.heard_s + who.silence_s < now_s:
                found += self._fail(sorted(who.leases), f"member {name} is gone", now_s)
                del self._members[name]
        late = self._leases.find_late(now_s)
        found += self._fail(late, "it was not acknowledged in time", now_s)
        while self._exhausted:
            found.append(self._exhaust(self._exhausted.popleft()))
        return found

    def _exhaust(self, lane: Lane) -> Settlement:
        slot = _first_of(lane)
        lane.is_offered = False
        lane.in_flight += 1
        slot.state = "settling"
        return Settlement(slot, Bury(KILLED))

    def _fail(self, leases: Iterable[int], reason: str, now_s: float) -> list[Settlement]:
        found = []
        for lease in leases:
            if slot := self._leases.get(lease):  # one behind another was given back with it
                outcome = Redeliver(self.pause_before(slot), reason)
                found.append(self.settle(lease, outcome, now_s))
        return found

    def next_time(self) -> float:
        """When something happens by itself: a lease or a pause is over, or a member is gone."""
        times = [self._leases.next_s(), *(due_s for due_s, _, _ in self._delayed[:1])]
        times += [who.heard_s + who.silence_s for who in self._members.values()]
        return min(times)

    # Looking

    @property
    def ready_count(self) -> int:
        """How many messages could be taken now, those that come together as one."""
        return len(self._ready)

    @property
    def needs_arming(self) -> bool:
        """Whether there is something that could be handed out once the log counts it."""
        return any(lanes and self._is_short(n) for n, lanes in enumerate(self._unarmed))

    @property
    def has_exhausted(self) -> bool:
        return bool(self._exhausted)

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def is_broken_off(self) -> bool:
        """Whether the breaker is open: everything fails."""
        return self._failures >= self.rules.breaker_letters

    def members(self) -> dict[str, int]:
        """How many messages each member has."""
        return {name: len(who.leases) for name, who in self._members.items()}

    def slowest(self) -> Lane | None:
        """The lane that most messages wait in."""
        return max(self._lanes.values(), key=lambda lane: lane.size, default=None)


def _first_of(lane: Lane) -> Slot:
    slot = lane.first
    assert slot is not None  # noqa: S101  a lane is offered for its first message
    return slot
