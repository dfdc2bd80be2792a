"""A group's state survives being saved and read back, step by step and as snapshots."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import msgspec
import pytest

from penstock.errors import LogFormatError
from penstock.groups.outcomes import Bury, GroupRules, GroupStep, Redeliver
from penstock.groups.saved import (
    Clocks,
    GroupKeys,
    KnownPartition,
    Ranges,
    SavedGroup,
    pack_partition,
    pack_ranges,
    pack_step,
    to_saved_step,
    unpack_group,
    unpack_ranges,
)
from penstock.groups.slots import GroupPartition
from penstock.groups.state import GroupState

PLACE = GroupPartition(0, 3)
NOTHING = KnownPartition().after(0)


def test_ranges_are_a_set() -> None:
    rng = random.Random(7)
    for _ in range(200):
        ranges, model = Ranges(), set[int]()
        for _ in range(rng.randrange(12)):
            start = rng.randrange(30)
            end = start + rng.randrange(1, 6)
            ranges.add(start, end)
            model |= set(range(start, end))
        assert [n in ranges for n in range(40)] == [n in model for n in range(40)]
        items = ranges.items()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(items))
        assert ranges.first_gap == next(n for n in range(40) if n not in model)
        assert ranges.end == (max(model) + 1 if model else 0)
        assert list(unpack_ranges(pack_ranges(items))) == items


def merge(saved: dict[str, bytes], progress: Mapping[str, bytes | None]) -> None:
    for key, value in progress.items():
        if value is None:
            del saved[key]
        else:
            saved[key] = value


@pytest.mark.row("F8", engine="any")
def test_many_steps_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fit into the ring, with snapshots in several values; at every moment what is read
    is what was.
    """
    ring = 100
    monkeypatch.setattr("penstock.groups.saved.RING", ring)
    monkeypatch.setattr("penstock.groups.saved.VALUE_BYTES_MAX", 100)
    monkeypatch.setattr("penstock.groups.saved.RANGES_MAX", 2)
    most = values = 0
    rng = random.Random(11)
    rules = GroupRules(deliveries_max=3, breaker_letters=1000, backoff_s=0.0)
    state, keys, saved = GroupState(rules), GroupKeys("orders", "billing"), dict[str, bytes]()
    state.open(PLACE, 0, 0)
    steps = 8 * ring
    for number in range(steps):
        clocks = Clocks(float(number), number * 1_000_000)
        for _ in range(rng.randrange(3)):
            offset = state.windows[PLACE].head + rng.randrange(3)
            state.add(PLACE, offset, offset + 1, rng.choice([b"a", b"b", b"c"]), clocks.steady_s)
        settled = state.expire(clocks.steady_s)
        for slot in state.take("m", 2, clocks.steady_s):
            outcome = rng.choice([None, None, Redeliver(3.0, "no"), Bury("never")])
            settled.append(state.settle(slot.lease, outcome, clocks.steady_s))
        step = GroupStep(settled, state.arm(clocks.steady_s))
        if number % ring == 0:
            packed = pack_partition(number, state.windows[PLACE], NOTHING)
            merge(saved, keys.snapshot(PLACE, packed, values))
            values = len(packed)
            most = max(most, values)
        saved[keys.step(number)] = pack_step(to_saved_step(number, step, clocks))
        state.finish(step, clocks.steady_s)
        known = unpack_group(keys, saved)
        assert known.next_number == number + 1
        found, window = known.partitions.get(PLACE, KnownPartition()), state.windows[PLACE]
        for slot in window.slots():
            assert slot.offset not in found.done
            history = found.history(slot.offset, clocks)
            if slot.deliveries:
                assert history is not None
                assert history.deliveries >= slot.deliveries
                if slot.due_s > clocks.steady_s:
                    assert history.due_s == pytest.approx(slot.due_s)
                    assert history.reasons == slot.reasons
        for start, end in window.done_ranges():
            assert all(offset in found.done for offset in range(start, end))
        assert found.done.first_gap == window.floor
    assert len(saved) == ring + values
    assert most > 1


def test_a_later_version_is_left_alone() -> None:
    keys = GroupKeys("orders", "billing")
    group = msgspec.json.encode(SavedGroup(inputs=(("orders", 1),), created_us=0, version=99))
    with pytest.raises(LogFormatError, match="later version"):
        unpack_group(keys, {keys.group: group})
