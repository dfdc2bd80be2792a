"""Two runners of one app: one is at work, the other stands by, and takes over when it is gone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import msgspec
import pytest

import penstock
from penstock import Log, Producer, Table, read_events
from penstock.app.declaring.plan import plan
from penstock.app.running.backends import InlineBackend
from penstock.app.running.building import build
from penstock.app.running.positions import AppRun
from penstock.app.running.query import Query
from penstock.app.running.runner import Runner, RunnerOptions
from penstock.app.running.standby import at_work
from penstock.app.running.streams import make_streams
from penstock.errors import ClaimLostError, LogBusyError, LogUnreachableError
from penstock.log.claims import PREFIX, Claims
from penstock.processes import this_process
from penstock.testing.processes import wait_until
from tests.app.counting import Number, Seen, app

SHORT_MS = 3_000
LONG_MS = 3_600_000
"""No lease ends within a test."""
ON_BOTH = pytest.mark.parametrize(
    "log",
    [
        pytest.param(engine, marks=pytest.mark.row("X12", engine=engine))
        for engine in ("embedded", "kafka")
    ],
    indirect=True,
)
KEYS = 10


class Program:
    """A runner in a process of its own."""

    def __init__(self, log: str, output: Path, lease_ms: int, *options: str) -> None:
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.app.counting", log, str(lease_ms), *options],
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(30)

    def told(self) -> str:
        return self._output.read_text("utf-8")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.told() or self.process.poll() is not None, 60, text)
        assert text in self.told(), self.told()


Start = Callable[..., Program]


@pytest.fixture
def start(log: str, tmp_path: Path) -> Iterator[Start]:
    with penstock.open(log, create=True) as opened:
        make_streams(opened, plan(app))
    programs: list[Program] = []

    def begin(*options: str, lease_ms: int = LONG_MS) -> Program:
        output = tmp_path / f"out{len(programs)}.txt"
        programs.append(Program(log, output, lease_ms, *options))
        return programs[-1]

    try:
        yield begin
    finally:
        for program in programs:
            program.__exit__()


def send(log: Log, count: int) -> None:
    with Producer(log) as producer:
        for n in range(count):
            producer.send("numbers", Number(f"k{n % KEYS}", 1))


def check(log: Log, sent: int) -> None:
    """Each was handled once: every total of every key is there, once, in its order."""
    wait_until(lambda: len(list(read_events(log, "seen"))) >= sent, 60, "everything handled")
    found: dict[str, list[int]] = {}
    for event in read_events(log, "seen", Seen):
        found.setdefault(event.data.key, []).append(event.data.total)
    each = sent // KEYS
    assert found == {f"k{n}": list(range(1, each + 1)) for n in range(KEYS)}
    totals: Table[Any] = Table(log, "totals")
    kept = [cast(Any, totals.get(f"k{n}")).value for n in range(KEYS)]
    assert kept == [each] * KEYS


@ON_BOTH
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_one_takes_over_when_the_first_is_gone(
    log: str, start: Start, how: signal.Signals
) -> None:
    with penstock.open(log) as opened:
        first = start()
        first.wait_for("starting the queries")
        send(opened, 200)
        check(opened, 200)
        second = start()
        second.wait_for(f"standing by for add: run by process {first.process.pid} on ")
        send(opened, 300)
        check(opened, 500)
        assert "starting" not in second.told()
        first.process.send_signal(how)
        first.process.wait(30)
        second.wait_for("starting the queries")
        send(opened, 300)
        check(opened, 800)


@ON_BOTH
def test_one_that_stood_still_past_its_lease_ends(log: str, start: Start) -> None:
    """It says who has the app now, and does not take it back."""
    with penstock.open(log) as opened:
        first = start(lease_ms=SHORT_MS)
        first.wait_for("starting the queries")
        second = start(lease_ms=SHORT_MS)
        second.wait_for("standing by")
        send(opened, 200)
        check(opened, 200)
        first.process.send_signal(signal.SIGSTOP)
        second.wait_for("starting the queries")
        send(opened, 300)
        check(opened, 500)
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(60) == 1
        told = f"app/counting: add was taken over: process {second.process.pid} on "
        assert f"claim_lost: {told}" in first.told()
        send(opened, 300)
        check(opened, 800)
        assert second.process.poll() is None, second.told()


@ON_BOTH
def test_taking_over_at_once(log: str, start: Start) -> None:
    with penstock.open(log) as opened:
        first = start(lease_ms=SHORT_MS)
        first.wait_for("starting the queries")
        send(opened, 200)
        check(opened, 200)
        second = start("--take-over")
        assert first.process.wait(60) == 1
        assert f"process {second.process.pid} on " in first.told()
        send(opened, 300)
        check(opened, 500)


@pytest.mark.parametrize("log", ["embedded"], indirect=True)
def test_whoever_stands_by_can_be_stopped(log: str, start: Start) -> None:
    first = start()
    first.wait_for("starting the queries")
    second = start()
    second.wait_for("standing by")
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(30) == 0
    assert first.process.poll() is None


@contextlib.contextmanager
def going(log: Log, *, take_over: bool = False) -> Iterator[Runner]:
    options = RunnerOptions(lease_ms=LONG_MS, backoff_ms=10)
    with at_work(log, plan(app), InlineBackend(), options=options, take_over=take_over) as runner:
        yield runner


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Log]:
    with penstock.open(tmp_path / "log.db", create=True) as log:
        yield log


def test_whoever_lost_the_app_ends_with_the_next_batch(opened: Log) -> None:
    """Long before its lease is renewed, and without disturbing whoever has it."""
    with going(opened) as old:
        send(opened, 100)
        check(opened, 100)
        with going(opened, take_over=True) as new:
            send(opened, 100)
            check(opened, 200)
            wait_until(old.is_over, 30, "the end of the old one")
            assert isinstance(old.failure(), ClaimLostError)
            send(opened, 100)
            check(opened, 300)
            assert (new.failure(), [status.restarts for status in new.statuses()]) == (None, [0])


def test_a_query_is_not_taken_back_by_starting_it_again(opened: Log) -> None:
    old = build(opened, plan(app), InlineBackend())
    new = build(opened, plan(app), InlineBackend())
    (query,) = [kept.query for kept in new._kept if isinstance(kept.query, Query)]
    query.start()
    (mine,) = [kept.query for kept in old._kept if isinstance(kept.query, Query)]
    with pytest.raises(ClaimLostError, match="add was taken over by another run of app"):
        mine.start()
    send(opened, 10)
    assert query.step() is not None, "its producer was left alone"


def test_what_was_lost_while_it_was_being_built_is_not_taken_over(opened: Log) -> None:
    before = build(opened, plan(app), InlineBackend())

    def fail() -> NoReturn:
        raise ClaimLostError("another one has it")

    with pytest.raises(ClaimLostError):
        build(opened, plan(app), InlineBackend(), run=AppRun("counting", "late", fail))
    (query,) = [kept.query for kept in before._kept if isinstance(kept.query, Query)]
    query.start()


def test_who_has_the_app_is_not_stopped_by_somebody_who_opens_its_producers(opened: Log) -> None:
    """Such as an older runner that has not yet noticed."""
    with going(opened) as runner:
        send(opened, 100)
        check(opened, 100)
        opened.hold("app/counting/add")
        send(opened, 100)
        check(opened, 200)
        assert runner.failure() is None
    assert opened.progress_items(PREFIX) == {}, "it was given back"


def test_whoever_stands_by_outlives_a_log_that_does_not_answer(
    opened: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([LogUnreachableError("no broker"), LogBusyError("later")])

    def ask(prefix: str) -> dict[str, bytes]:
        error = next(answers, None)
        if error is None:
            monkeypatch.undo()
            return {}
        raise error

    monkeypatch.setattr(opened, "progress_items", ask)
    claims = Claims(opened, "app/x", ["a"], producer="claims")
    assert claims.acquire(threading.Event())
    claims.release()


def test_a_process_of_another_container_with_this_host_name_is_not_thought_gone() -> None:
    here = this_process()
    gone = msgspec.structs.replace(here, started="1")
    assert not here.is_gone()
    assert gone.is_gone()
    assert not msgspec.structs.replace(gone, space="elsewhere").is_gone()
