"""A group's state machine beside a naive model, through made-up sequences of what may happen."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import LeaseLostError
from penstock.groups.outcomes import (
    Bury,
    GroupOrder,
    GroupRules,
    GroupStep,
    History,
    Redeliver,
    Settlement,
)
from penstock.groups.slots import GroupPartition, Slot
from penstock.groups.state import GroupState

MEMBERS = ("ada", "bob", "cleo")
KEYS = (b"a", b"b", b"c", None)


class Sent(NamedTuple):
    """A message of the model."""

    place: GroupPartition
    offset: int
    key: bytes | None


class GroupMachine(RuleBasedStateMachine):
    """The model: a list of all messages, how often each was delivered, what became of it."""

    @initialize(
        order=st.sampled_from(["key", "partition", "stream", "none"]),
        key_batch=st.integers(1, 3),
        deliveries_max=st.integers(1, 4),
    )
    def begin(self, order: GroupOrder, key_batch: int, deliveries_max: int) -> None:
        self.given = GroupRules(
            order=order, key_batch=key_batch, lease_s=10, deliveries_max=deliveries_max,
            backoff_s=1, outstanding_max=30, in_flight_max=8, member_in_flight_max=5,
            breaker_letters=3, breaker_s=20,
        )  # fmt: skip
        self.state = GroupState(self.given)
        self.places = [GroupPartition(0, 0), GroupPartition(0, 1)]
        for place in self.places:
            self.state.open(place, 0, 0)
        self.now_s = 100.0
        self.sent: list[Sent] = []
        self.deliveries: dict[Sent, int] = {}
        self.ended: set[Sent] = set()
        self.held: dict[int, Sent] = {}
        self.member: dict[int, str] = {}
        self.counted: dict[Sent, int] = {}
        """How many deliveries the log knows of."""
        self.reprieved: dict[Sent, bool] = {}
        self.has_crashed = False
        self.has_undone = False
        self.open: list[GroupStep] = []
        for n in range(12):
            self.add(n % 2, (*KEYS, b"d", b"e")[n // 2], 0)
        self.save()

    def of(self, slot: Slot) -> Sent:
        return next(m for m in self.sent if (m.place, m.offset) == (slot.place, slot.offset))

    def lane_of(self, sent: Sent) -> object:
        match self.given.order:
            case "key":
                return sent if sent.key is None else sent.key
            case "partition":
                return sent.place
            case "stream":
                return ""
            case "none":
                return sent

    def dispatched(self, sent: Sent) -> int:
        return max(
            self.counted.get(sent, 0),
            int(sent.offset < self.state.windows[sent.place].dispatched),
        )

    # Reading

    @rule(p=st.integers(0, 1), key=st.sampled_from(KEYS), gap=st.integers(0, 3))
    def add(self, p: int, key: bytes | None, gap: int) -> None:
        place = self.places[p]
        if self.state.room(place):
            offset = self.state.windows[place].head + gap
            self.state.add(place, offset, offset + 1, key, self.now_s)
            self.sent.append(Sent(place, offset, key))
            self.deliveries[self.sent[-1]] = 0

    # Taking

    @rule(member=st.sampled_from(MEMBERS), count=st.integers(1, 6))
    def take(self, member: str, count: int) -> None:
        taken = [(slot, self.of(slot)) for slot in self.state.take(member, count, self.now_s)]
        assert len(taken) <= count
        messages = [sent for _, sent in taken]
        for slot, sent in taken:
            assert sent not in self.ended, "what is settled was handed out"
            assert sent not in self.held.values(), "it was handed out twice at once"
            for other in self.sent[: self.sent.index(sent)]:
                if self.lane_of(other) == self.lane_of(sent) and other not in self.ended:
                    assert other in messages, "out of order"
            self.deliveries[sent] += 1
            assert slot.deliveries >= self.deliveries[sent]
            assert self.has_crashed or slot.deliveries == self.deliveries[sent]
            assert self.dispatched(sent) >= self.deliveries[sent], "the log counts too low"
            self.held[slot.lease] = sent
            self.member[slot.lease] = member
        lanes = [self.lane_of(sent) for sent in self.held.values()]
        assert all(lanes.count(lane) <= self.given.key_batch for lane in lanes)
        mine = [lease for lease in self.held if self.member[lease] == member]
        if not self.has_undone:  # then members have messages back that were not counted
            assert len(mine) <= self.given.member_in_flight_max
            assert len(self.held) <= self.given.in_flight_max

    # Giving back

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["ack", "nack", "reject"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        outcome = {"ack": None, "nack": Redeliver(2.0, "no"), "reject": Bury("never")}[how]
        self.note_settled(self.state.settle(lease, outcome, self.now_s))

    def note_settled(self, settled: Settlement) -> None:
        slot, outcome = settled
        self.open.append(GroupStep([settled], []))
        sent = self.held.pop(slot.lease, None)
        if outcome is not None and sent is not None:
            self.give_back_behind(sent)

    def give_back_behind(self, sent: Sent) -> None:
        """What was handed out behind it in its lane is nobody's any more."""
        behind = self.sent[self.sent.index(sent) + 1 :]
        for lease, other in list(self.held.items()):
            if other in behind and self.lane_of(other) == self.lane_of(sent):
                self.give_back(lease)

    def give_back(self, lease: int) -> None:
        self.deliveries[self.held.pop(lease)] -= 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        self.state.release(lease, self.now_s)
        sent = self.held[lease]
        self.give_back(lease)
        self.give_back_behind(sent)
        with pytest.raises(LeaseLostError):
            self.state.settle(lease, None, self.now_s)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.state.extend(data.draw(st.sampled_from(sorted(self.held))), self.now_s)

    # Saving

    @rule()
    def arm(self) -> None:
        step = GroupStep([], self.state.arm(self.now_s))
        if step.armed:
            self.open.append(step)

    @rule()
    def save(self) -> None:
        """What a coordinator does all the time."""
        for settled in self.state.expire(self.now_s):
            self.note_settled(settled)
        self.arm()
        while self.open:
            self.finish()

    @precondition(lambda self: self.open)
    @rule()
    def finish(self) -> None:
        step = self.open.pop(0)
        self.state.finish(step, self.now_s)
        for slot, outcome in step.settled:
            if isinstance(outcome, Redeliver):
                self.counted[self.of(slot)] = slot.deliveries
                self.reprieved[self.of(slot)] = outcome.is_reprieve
            else:
                self.ended.add(self.of(slot))
        for slot in step.armed:
            if slot.deliveries:
                self.counted[self.of(slot)] = slot.deliveries + 1
                self.reprieved[self.of(slot)] = False

    @precondition(lambda self: self.open)
    @rule()
    def undo(self) -> None:
        step = self.open.pop()
        self.state.undo(step, self.now_s)
        self.has_undone = True
        for slot, _ in step.settled:
            if slot.member:
                self.held[slot.lease] = self.of(slot)

    @rule()
    def crash(self) -> None:
        """A new coordinator begins with what the log knows."""
        before, self.state = self.state, GroupState(self.given)
        for place in self.places:
            self.state.open(place, 0, before.windows[place].dispatched)
        for sent in self.sent:
            if sent in self.ended:
                self.state.skip(sent.place, sent.offset + 1)
            else:
                dispatched = sent.offset < before.windows[sent.place].dispatched
                count = max(self.counted.get(sent, 0), int(dispatched))
                is_reprieved = self.reprieved.get(sent, False)
                history = History(count, is_reprieved=is_reprieved) if count else None
                self.state.add(
                    sent.place, sent.offset, sent.offset + 1, sent.key, self.now_s, history
                )
                self.counted[sent] = count
        self.open, self.held, self.has_crashed = [], {}, True

    # Time and members

    @rule(member=st.sampled_from(MEMBERS), silence_s=st.sampled_from([2.0, 15.0]))
    def join(self, member: str, silence_s: float) -> None:
        self.state.join(member, self.now_s, silence_s)

    @rule(by_s=st.sampled_from([0.5, 3.0, 11.0, 30.0]))
    def pass_time(self, by_s: float) -> None:
        self.now_s += by_s
        for settled in self.state.expire(self.now_s):
            self.note_settled(settled)

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        self.state.leave(member, self.now_s)
        for lease in list(self.held):
            if lease in self.held and self.member[lease] == member:
                sent = self.held[lease]
                self.give_back(lease)
                self.give_back_behind(sent)

    @invariant()
    def windows_agree(self) -> None:
        for place in self.places:
            window = self.state.windows[place]
            mine = [m for m in self.sent if m.place == place]
            left = [m for m in mine if m not in self.ended]
            assert [slot.offset for slot in window.slots()] == [m.offset for m in left]
            assert window.size == len(left)
            assert window.floor <= (left[0].offset if left else window.head)
            done = {o for start, end in window.done_ranges() for o in range(start, end)}
            assert not {m.offset for m in left} & done
            assert {m.offset for m in mine if m in self.ended} <= done | set(range(window.floor))
        assert self.state.in_flight == len(self.held)

    def teardown(self) -> None:
        """Whatever happened: in the end everything is acknowledged, or was tried often enough."""
        for _ in range(500):
            self.save()
            if len(self.ended) == len(self.sent):
                return
            self.now_s += 30
            self.take("last", 5)
            for lease in [lease for lease in self.held if self.member[lease] == "last"]:
                self.note_settled(self.state.settle(lease, None, self.now_s))
        raise AssertionError(f"stuck: {[m for m in self.sent if m not in self.ended]}")


QUICK = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
GroupMachine.TestCase.settings = QUICK
TestGroup = GroupMachine.TestCase


class LongGroupMachine(GroupMachine):
    pass


LongGroupMachine.TestCase.settings = settings(QUICK, max_examples=1000, stateful_step_count=100)


@pytest.mark.soak
@pytest.mark.timeout(7200)
class TestLongGroup(LongGroupMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = LongGroupMachine.TestCase.settings
