"""Acknowledgements without the lock, step by step beside somebody who has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from penstock.errors import LeaseLostError
from penstock.groups.outcomes import GroupRules
from penstock.groups.rounds import AckNote, GroupRounds
from penstock.groups.slots import GroupPartition
from penstock.groups.state import GroupState
from penstock.testing.processes import wait_until

PLACE = GroupPartition(0, 0)


class Between(dict[int, AckNote]):
    """Notes, around the adding of which somebody else does something."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self._before, self._after = before, after

    def setdefault(self, lease: int, note: AckNote) -> AckNote:
        self._before()
        found = super().setdefault(lease, note)
        self._after()
        return found


@pytest.fixture
def state() -> GroupState:
    made = GroupState(GroupRules())
    made.open(PLACE, 0, 10)
    made.add(PLACE, 0, 1, b"ada", 0.0)
    return made


def lease_of(state: GroupState) -> int:
    (slot,) = state.take("m", 1, 0.0)
    return slot.lease


def watch(
    state: GroupState, before: Callable[[GroupRounds], None], after: Callable[[GroupRounds], None]
) -> GroupRounds:
    rounds = GroupRounds(state, threading.Lock())
    rounds._notes = Between(lambda: before(rounds), lambda: after(rounds))
    return rounds


def follow(rounds: GroupRounds) -> None:
    with rounds.exclusively():
        rounds.begin_next()


def test_the_round_is_the_one_that_has_it(state: GroupState) -> None:
    """Another round begins just before the note is added, or just after."""
    rounds = watch(state, follow, lambda rounds: None)
    first = rounds.current
    done = rounds.ack(lease_of(state))
    with rounds.exclusively():
        assert done is rounds.current.done is not first.done
        assert len(rounds.current.settled) == 1


def test_a_note_that_was_carried_out_at_once(state: GroupState) -> None:
    rounds = watch(state, lambda rounds: None, follow)
    first = rounds.current
    assert rounds.ack(lease_of(state)) is first.done is not rounds.current.done
    assert len(first.settled) == 1


def test_a_lease_that_ends_just_before_is_lost(state: GroupState) -> None:
    lease = lease_of(state)

    def give_back(rounds: GroupRounds) -> None:
        with rounds.exclusively():
            state.release(lease, 0.0)

    rounds = watch(state, give_back, follow)
    with pytest.raises(LeaseLostError):
        rounds.ack(lease)


def test_a_lease_that_ends_just_after_was_acknowledged(state: GroupState) -> None:
    lease = lease_of(state)

    def expire(rounds: GroupRounds) -> None:
        with rounds.exclusively():
            assert state.expire(1e6) == []

    rounds = watch(state, lambda rounds: None, expire)
    assert rounds.ack(lease) is rounds.current.done
    assert [outcome for _, outcome in rounds.current.settled] == [None]


def test_when_it_is_closed_it_needs_the_lock(state: GroupState) -> None:
    rounds = watch(state, lambda rounds: rounds.close(), lambda rounds: None)
    assert rounds.ack(lease_of(state)) is None
    with rounds.exclusively():
        assert rounds.current.settled == []


def acknowledge(rounds: GroupRounds, state: GroupState, lease: int) -> Future[None]:
    """By a note if that is possible, else with the lock."""
    done = rounds.ack(lease)
    if done is None:
        with rounds.exclusively():
            rounds.current.settled.append(state.settle(lease, None, 0.0))
            done = rounds.current.done
    return done


def acknowledge_during(
    rounds: GroupRounds,
    state: GroupState,
    lease: int,
    monkeypatch: pytest.MonkeyPatch,
    do: Callable[[], object],
) -> Future[None]:
    """Acknowledge while somebody has the lock, with all notes carried out, does something, and lets
    go just when it was looked whether the lease is there.
    """
    look, looked, go_on = state.has_lease, threading.Event(), threading.Event()

    def has_lease(lease: int) -> bool:
        found = look(lease)
        looked.set()
        go_on.wait(10)
        return found

    with ThreadPoolExecutor(1) as threads:
        with rounds.exclusively():
            monkeypatch.setattr(state, "has_lease", has_lease)
            answer = threads.submit(acknowledge, rounds, state, lease)
            wait_until(lambda: bool(rounds._notes), 10, "the note")
            looked.wait(0.2)
            do()
        go_on.set()
        return answer.result(10)


def test_a_round_that_ends_while_it_is_looked(
    state: GroupState, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = GroupRounds(state, threading.Lock())
    lease = lease_of(state)
    done = acknowledge_during(rounds, state, lease, monkeypatch, rounds.begin_next)
    with rounds.exclusively():
        assert done is rounds.current.done
        assert len(rounds.current.settled) == 1


def test_a_lease_that_ends_while_it_is_looked(
    state: GroupState, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = GroupRounds(state, threading.Lock())
    lease = lease_of(state)
    with pytest.raises(LeaseLostError):
        acknowledge_during(rounds, state, lease, monkeypatch, lambda: state.release(lease, 0.0))


def test_a_note_that_comes_too_late_is_not_carried_out(state: GroupState) -> None:
    """It is closed while a member waits for the lock; whoever has it next saves nothing more."""
    rounds = GroupRounds(state, threading.Lock())
    lease = lease_of(state)
    with ThreadPoolExecutor(1) as threads:
        with rounds.exclusively():
            rounds.close()
            answer = threads.submit(rounds.ack, lease)
            wait_until(lambda: bool(rounds._notes), 10, "the note")
            rounds._carry_out()
        assert answer.result(10) is None
    assert rounds.current.settled == []
