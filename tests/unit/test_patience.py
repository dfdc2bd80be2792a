"""Waiting for a server that is away: how long, and what is said of it."""

from __future__ import annotations

import pytest

from penstock.patience import Patience


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits without the part that is left to chance."""
    monkeypatch.setattr("random.uniform", lambda least, most: (least + most) / 2)


def test_it_waits_longer_each_time_up_to_a_limit_and_soon_again_after_an_answer() -> None:
    patience = Patience("the server", lambda line: None, backoff_s=1.0, backoff_s_max=5.0)
    assert [patience.note_failure("gone") for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    patience.note_answer()
    assert patience.note_failure("gone") == 1.0


def test_an_answer_that_may_not_last_does_not_make_it_hurry() -> None:
    patience = Patience("the server", lambda line: None, backoff_s=1.0, backoff_s_max=5.0)
    patience.note_failure("gone")
    patience.note_return()
    assert patience.note_failure("gone") == 2.0


def test_it_is_said_once_that_it_is_away_and_once_that_it_is_back() -> None:
    told: list[str] = []
    patience = Patience("the server", told.append)
    patience.note_answer()
    assert told == []
    for why in ("refused", "reset"):
        patience.note_failure(why)
    patience.note_answer()
    patience.note_answer()
    patience.note_failure("again")
    assert told == [
        "the server is not available (refused): retrying",
        "the server is available again",
        "the server is not available (again): retrying",
    ]


def test_it_is_asked_again_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    patience = Patience("the server", lambda line: None, backoff_s=1.0)
    assert patience.is_due
    patience.note_failure("gone")
    assert not patience.is_due
    now = 101.0
    assert patience.is_due
    patience.note_answer(pause_s=3.0)
    now = 103.9
    assert not patience.is_due
    now = 104.0
    assert patience.is_due
