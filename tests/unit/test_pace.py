"""How large the next batch is."""

from __future__ import annotations

import pytest

from penstock.app.running.pace import START_ROWS, Pace

MIB = 1 << 20


def settle(pace: Pace, event_s: float, overhead_s: float = 0.04) -> int:
    """The size that batches come to, where events take so long."""
    for _ in range(20):
        pace.adapt_to(pace.rows, pace.rows, overhead_s + pace.rows * event_s)
    return pace.rows


@pytest.mark.parametrize(
    ("event_s", "least", "most"),
    [(1e-6, 524_288, 524_288), (1e-3, 5_000, 10_000), (0.01, 500, 1_000), (60.0, 1, 1)],
)
def test_batches_come_to_take_the_time_they_should(event_s: float, least: int, most: int) -> None:
    assert least <= settle(Pace(524_288, MIB, 10.0), event_s) <= most


def test_the_first_batch_is_small_and_quick_ones_grow_fast() -> None:
    pace = Pace(524_288, MIB, 10.0)
    assert pace.rows == START_ROWS
    sizes = []
    while pace.rows < 524_288:
        sizes.append(pace.rows)
        pace.adapt_to(pace.rows, pace.rows, 0.05)
    assert len(sizes) <= 4


def test_small_batches_say_nothing_of_large_ones() -> None:
    pace = Pace(524_288, MIB, 10.0)
    pace.adapt_to(1, 1, 0.01)
    pace.adapt_to(0, 0, 99.0)
    assert pace.rows == START_ROWS
    pace.adapt_to(1, 1, 100.0)
    assert pace.rows == 1


def test_a_batch_holds_no_more_than_it_may() -> None:
    pace = Pace(524_288, 100 * MIB, 10.0)
    settle(pace, 1e-6)
    assert pace.rows == 524_288
    pace.shrink_after(1_000, 101 * MIB)
    assert pace.rows == 990
    for _ in range(5):
        pace.adapt_to(pace.rows, pace.rows * MIB, 0.1)
    assert pace.rows == 100
    pace.adapt_to(100, 100, 0.1)
    assert pace.rows == 800


def test_what_is_too_large_is_halved_down_to_one_event() -> None:
    pace = Pace(10, MIB, 1.0)
    for _ in range(5):
        pace.shrink_after(1, 2)
    assert pace.rows == 1
