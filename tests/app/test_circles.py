"""Streams may go in a circle, where that is meant: retries, an orchestrator and its stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import App, Entry, Record
from penstock.app.declaring.plan import plan
from penstock.testing.apps import AppTest

ON_BOTH = pytest.mark.parametrize("log", ["embedded", "kafka"], indirect=True)


class Job(Record):
    user: str
    tries: int = 0


class Done(Record):
    user: str
    tries: int


def retrying() -> App:
    """An agent that sends to itself what is to be tried again, up to three times."""
    app = App("shop")
    jobs = app.stream("jobs", Job, key="user", partitions=2)
    done = app.stream("done", Done, key="user")
    tried = app.table("tried", value=int, default=0)

    @app.agent(jobs, state=tried, to=[jobs, done])
    def work(job: Job, tried: Entry[int]) -> Iterator[Job | Done]:
        tried.value += 1
        if job.tries < 3:
            yield Job(job.user, job.tries + 1)
        else:
            yield Done(job.user, job.tries)

    return app


@ON_BOTH
def test_an_agent_may_send_to_itself(log: str, tmp_path: Path) -> None:
    app = retrying()
    users = [f"u{n}" for n in range(5)]
    with AppTest(app, tmp_path, log=log) as run:
        run.send(app.streams["jobs"], *(Job(user) for user in users))
        run.until_idle()
        assert sorted(e.user for e in run.events("done")) == users
        assert {e.tries for e in run.events("done")} == {3}
        assert run.table(app.tables["tried"]) == dict.fromkeys(users, 4)


def test_a_circle_goes_on_where_it_was_after_a_failure(tmp_path: Path) -> None:
    app = retrying()
    with AppTest(app, tmp_path) as run:
        with run.fault("commit.index", at=3):
            run.send(app.streams["jobs"], *(Job(f"u{n}") for n in range(5)))
            run.until_idle()
        assert len(run.events("done")) == 5
        assert len(run.events("jobs")) == 20


def test_two_agents_may_talk_to_each_other(tmp_path: Path) -> None:
    app = App("shop")
    asked = app.stream("asked", Job, key="user")
    answered = app.stream("answered", Job, key="user")

    @app.agent(asked, to=answered)
    def answer(job: Job) -> Iterator[Job]:
        yield Job(job.user, job.tries + 1)

    @app.agent(answered, to=asked)
    def ask(job: Job) -> Iterator[Job]:
        if job.tries < 5:
            yield job

    assert len(plan(app).definitions) == 2
    with AppTest(app, tmp_path) as run:
        run.send(asked, Job("ada"))
        run.until_idle()
        assert [e.tries for e in run.events(answered)] == [1, 2, 3, 4, 5]
