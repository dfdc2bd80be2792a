"""Timers of a query against a plain dictionary of them."""

from __future__ import annotations

import random

from penstock.app.tasks.timers import Timers


def test_timers_are_due_in_order(chance: random.Random) -> None:
    timers, model = Timers(), dict[bytes, int]()
    for step in range(3000):
        name = b"%d" % chance.randrange(200)
        due = None if chance.random() < 0.3 else chance.randrange(1000)
        timers.set(name, due)
        if due is None:
            model.pop(name, None)
        else:
            model[name] = due
        assert timers.next_us() == min(model.values(), default=None)
        if step % 50 == 0:
            now, most = chance.randrange(1000), chance.choice([1, 5, 1000])
            wanted = sorted((at, key) for key, at in model.items() if at <= now)[:most]
            assert timers.due(now, most) == [(key, at) for at, key in wanted]


def test_setting_one_again_and_again_takes_no_room() -> None:
    timers = Timers()
    for number in range(100_000):
        timers.set(b"x", number)
    assert len(timers._heap) < 5000
    assert timers.due(1 << 40, 10) == [(b"x", 99_999)]


def test_one_that_was_removed_and_set_again_is_due_once() -> None:
    timers = Timers()
    for _ in range(3):
        timers.set(b"x", 7)
        timers.set(b"x", None)
    timers.set(b"x", 7)
    timers.set(b"y", 7)
    for _ in range(2):
        assert timers.due(7, 10) == [(b"x", 7), (b"y", 7)]
