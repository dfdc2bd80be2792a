"""Leases end when they should, and those that have ended take no room."""

from __future__ import annotations

import random

import pytest

from penstock.groups.leases import Leases
from penstock.groups.slots import SPARE, GroupPartition, Lane, PartitionWindow, Slot

USUAL_S = 10.0


def make_slot(lease: int) -> Slot:
    window = PartitionWindow(GroupPartition(0, 0), lease, 0)
    slot = Slot(window, lease, lease, lease + 1, Lane(None))
    slot.lease = lease
    return slot


@pytest.mark.parametrize("seed", range(5))
def test_each_ends_at_its_time(seed: int) -> None:
    """Beside a mapping from leases to when they end."""
    rng = random.Random(seed)
    leases, slots, ends = Leases(USUAL_S), dict[int, Slot](), dict[int, float]()
    now_s = 0.0
    for number in range(2_000):
        now_s += rng.random()
        slots[number] = make_slot(number)
        leases.add(slots[number], now_s)
        ends[number] = now_s + USUAL_S
        lease = rng.choice(list(ends))
        match rng.randrange(6):
            case 0:
                leases.extend(slots[lease], now_s, None)
                ends[lease] = now_s + USUAL_S
            case 1 | 2:
                long_s = rng.choice([0.5, 5.0, 50.0])
                leases.extend(slots[lease], now_s, long_s)
                ends[lease] = now_s + long_s
            case 3:
                leases.remove(slots[lease])
                del ends[lease]
        assert len(leases) == len(ends)
        assert leases.next_s() <= min(ends.values(), default=now_s + USUAL_S)
        late = leases.find_late(now_s)
        assert sorted(late) == sorted(lease for lease, end_s in ends.items() if end_s <= now_s)
        for lease in late:
            leases.remove(slots[lease])
            del ends[lease]
            assert lease not in leases


def test_those_that_have_ended_take_no_room() -> None:
    leases = Leases(USUAL_S)
    kept = make_slot(-1)
    leases.add(kept, 0.0)
    for number in range(10_000):
        slot = make_slot(number)
        leases.add(slot, 0.0)
        leases.extend(slot, 0.0, 3600.0)
        leases.extend(kept, 0.0, 3600.0 + number)
        leases.remove(slot)
    assert len(leases._usual) + len(leases._others) <= 2 * SPARE
    assert leases.find_late(USUAL_S) == []
    assert leases.find_late(20_000.0) == [-1]
