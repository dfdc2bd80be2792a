"""From the log into a sink, each row once: kills on both sides, at every step and at random."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import App, CreateStream, Log, Producer, declare, failpoints, read_events
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.backends import InlineBackend
from penstock.app.running.building import build
from penstock.app.running.query import QueryLimits
from penstock.app.running.reports import sink_rows
from penstock.app.running.runner import QueryStatus, RunnerOptions
from penstock.app.running.streams import make_streams
from penstock.connect.hosts.sink_host import SinkHost, SinkOptions
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.delivery import Delivery, deliveries
from penstock.connect.push.remote import SENDING, TELLING, DialStep, RemoteSink
from penstock.connect.push.worker import DialOptions
from penstock.connect.sinks.file import FileSink
from penstock.errors import AppError, ConnectorError, PlanChangedError, SinkGoneError, UsageError
from penstock.failpoints import CONNECTOR_NAMES, ENVIRONMENT, REACHED
from penstock.testing.apps import AppTest
from penstock.testing.processes import VICTIMS, RunnerProcess, wait_until
from tests.connect.hosting import SinkProcess
from tests.connect.pushing import Number, app
from tests.connect.test_sinks import address_of, committed_lines

APP = Path(__file__).with_name("pushing.py")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        make_streams(opened, plan(app).only(["numbers_sink"]))
        yield opened


def send(log: Log, numbers: range) -> None:
    with Producer(log) as producer:
        for n in numbers:
            producer.send("numbers", Number(f"k{n % 7}", n))


def of_worker(folder: Path, number: int, query: str = "numbers_sink") -> list[Number]:
    found = committed_lines(folder, f"pushing.{query}-{number}")
    return [msgspec.json.decode(line, type=Number) for line in found]


def received(folder: Path, query: str = "numbers_sink", workers: int = 2) -> list[Number]:
    return [row for n in range(workers) for row in of_worker(folder, n, query)]


def check(folder: Path, count: int, workers: int = 2) -> None:
    """Every row once, those of a key with one worker and in order."""
    rows = received(folder, workers=workers)
    assert Counter(row.n for row in rows) == Counter(range(count))
    for key in {row.key for row in rows}:
        mine = [row.n for row in rows if row.key == key]
        assert mine == sorted(mine)
    homes = [{row.key for row in of_worker(folder, n)} for n in range(workers)]
    assert sum(map(len, homes)) == len(set.union(*homes)), "a key has one worker"


@pytest.mark.row("W14", engine="any")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rows_arrive_once(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key", partitions=3)
        made.sink(numbers, address_of(host), workers=workers)
        with AppTest(made, tmp_path) as run:
            run.send(numbers, *[Number(f"k{n % 7}", n) for n in range(300)])
            run.until_idle()
            run.restart()
            run.send(numbers, *[Number(f"k{n % 7}", n) for n in range(300, 400)])
            run.until_idle()
            listed = sink_rows(run.log)
    assert sum(row.messages for row in listed) == 400
    assert {row.worker for row in listed} <= {f"pushing.numbers_sink-{n}" for n in range(workers)}
    assert all(row.transactions >= 1 and row.lag == 0 for row in listed)
    check(folder, 400, workers)


def test_mistakes_are_found_when_it_is_declared() -> None:
    made = App("a")
    numbers = made.stream("numbers", Number)
    with pytest.raises(AppError, match=r"test_push.py.*'nowhere' is not a valid address"):
        made.sink(numbers, "nowhere")
    with pytest.raises(AppError, match="workers must be between 1 and 256"):
        made.sink(numbers, "127.0.0.1:1", workers=0)


def test_another_sink_is_noticed(tmp_path: Path) -> None:
    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    first, second = tmp_path / "one", tmp_path / "two"
    with SinkHost(lambda worker: FileSink(first, worker), first) as host:
        made.sink(numbers, address_of(host), workers=1)
        port = host.address[1]
        with AppTest(made, tmp_path) as run:
            for number in (1, 2):  # that the target has the first is saved with the second
                run.send(numbers, Number("k", number))
                run.until_idle()
    options = SinkOptions(address=f"127.0.0.1:{port}")
    with SinkHost(lambda worker: FileSink(second, worker), second, options):
        with AppTest(made, tmp_path, tries_max=1) as run:
            assert "it is a different sink, or has lost data" in str(run.until_failed())


class Driver:
    """The app without Spark, in a process of its own."""

    def __init__(self, folder: Path, log: Log, sink: SinkProcess) -> None:
        self.reached = folder / "reached"
        self._command = [sys.executable, "-m", "tests.connect.pushing", log.url]
        self._environment = {**os.environ, "SINK_ADDRESS": sink.address}

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        armed = {ENVIRONMENT: failpoint, REACHED: str(self.reached)} if failpoint else {}
        return subprocess.Popen(self._command, env={**self._environment, **armed})

    def run(self, failpoint: str = "") -> int:
        with self.start(failpoint) as process:
            return process.wait(90)


@pytest.mark.row("W14", engine="any")
@pytest.mark.parametrize("step", ["push.voted", "push.decided", "push.told", "commit.committed"])
@pytest.mark.parametrize("at", [1, 3])
def test_the_driver_is_killed_at(
    tmp_path: Path, log: Log, sink: SinkProcess, step: str, at: int
) -> None:
    kill_the_driver(tmp_path, log, sink, f"{step}=kill@{at}")


def kill_the_driver(folder: Path, log: Log, sink: SinkProcess, failpoint: str) -> None:
    sink.start()
    send(log, range(1500))
    driver = Driver(folder, log, sink)
    assert driver.run(failpoint) == -signal.SIGKILL
    assert driver.run() == 0
    check(sink.folder, 1500)


@pytest.mark.row("W14", engine="any")
@pytest.mark.parametrize(
    "step", [n for n in CONNECTOR_NAMES if n.startswith("sink.") and n != "sink.buried"]
)
def test_the_sink_is_killed_at(tmp_path: Path, log: Log, sink: SinkProcess, step: str) -> None:
    kill_the_sink(tmp_path, log, sink, step, loses_disk=False)


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize("step", ["sink.voted", "sink.resolved", "sink.apply", "sink.applied"])
def test_the_sink_is_killed_and_loses_its_spool_at(
    tmp_path: Path, log: Log, sink: SinkProcess, step: str
) -> None:
    kill_the_sink(tmp_path, log, sink, step, loses_disk=True)


def kill_the_sink(folder: Path, log: Log, sink: SinkProcess, step: str, loses_disk: bool) -> None:
    sink.start(f"{step}=kill@3")
    send(log, range(1500))
    with Driver(folder, log, sink).start() as driver:
        wait_until(lambda: not sink.is_running(), 60, "the sink being killed")
        for path in sink.folder.glob("spool.*") if loses_disk else ():
            path.unlink()
        sink.ensure()
        assert driver.wait(90) == 0
    check(sink.folder, 1500)


@pytest.mark.row("W14", engine="any")
def test_a_driver_that_slept_past_its_fencing_does_no_harm(
    tmp_path: Path, log: Log, sink: SinkProcess
) -> None:
    wake_a_zombie(tmp_path, log, sink)


def wake_a_zombie(folder: Path, log: Log, sink: SinkProcess) -> None:
    """It has every vote and is stopped; another one takes over and finishes; it wakes up."""
    sink.start()
    send(log, range(600))
    driver = Driver(folder, log, sink)
    with driver.start("push.voted=stop@2") as zombie:
        try:
            wait_until(driver.reached.exists, 60, "the votes")
            assert driver.run() == 0
            check(sink.folder, 600)
            zombie.send_signal(signal.SIGCONT)
            zombie.wait(90)  # it is refused; or it sees that all is done before it tries
        finally:
            zombie.kill()
    check(sink.folder, 600)


@pytest.mark.row("W14", engine="any")
@pytest.mark.timeout(600)
def test_random_kills(tmp_path: Path, log: Log, sink: SinkProcess, chance: random.Random) -> None:
    push_under_kills(tmp_path, log, sink, 3, chance)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_kills(
    tmp_path: Path, log: Log, sink: SinkProcess, chance: random.Random
) -> None:
    push_under_kills(tmp_path, log, sink, 25, chance)


def push_under_kills(
    folder: Path, log: Log, sink: SinkProcess, kills: int, chance: random.Random
) -> None:
    """On Spark: the runner, its JVM, a worker, or the sink; another number of tasks each time."""
    sink.start()
    environment = {"SINK_ADDRESS": sink.address}
    sent, done = 0, 0

    def more() -> None:
        nonlocal sent
        count = chance.randrange(200, 800)
        send(log, range(sent, sent + count))
        sent += count

    def arguments() -> list[str]:
        master = f"local[{chance.choice([1, 2, 3])}]"
        return ["--master", master, "--checkpoints", str(folder / "spark"), "--batch-rows", "300"]

    output = folder / "output.txt"
    while done < kills:
        with RunnerProcess(
            APP, log.url, arguments=arguments(), output=output, environment=environment
        ) as runner:
            while done < kills and runner.is_running():
                more()
                before = len(received(sink.folder))
                wait_until(
                    lambda: len(received(sink.folder)) > before or not runner.is_running(),  # noqa: B023
                    120, "rows",
                )  # fmt: skip
                runner.wait(chance.random() / 2)
                victim = chance.choice([*VICTIMS, "sink"])
                if victim == "sink":
                    sink.stop()
                    sink.start()
                elif not runner.kill(victim, chance):  # type: ignore[arg-type]
                    continue
                done += 1
                print(f"kill {done}: {victim}")
                if victim in ("runner", "jvm"):
                    runner.wait(60)
    given = [*arguments(), "--until-idle"]
    with RunnerProcess(
        APP, log.url, arguments=given, output=output, environment=environment
    ) as last:
        assert last.wait(240) == 0, output.read_text()[-3000:]
    check(sink.folder, sent)
    evens = received(sink.folder, "even_sink", 1)
    assert Counter(row.n for row in evens) == Counter(range(0, sent, 2))


def test_a_sink_that_was_replaced_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Not only at the start: the next decision must go on where the last one ended."""
    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    folder = tmp_path / "one"
    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        made.sink(numbers, address_of(host), workers=1, timeout="5 seconds")
        port = host.address[1]
        run = AppTest(made, tmp_path, tries_max=1).__enter__()
        run.send(numbers, Number("k", 1))
        run.until_idle()
    try:
        other = tmp_path / "two"
        options = SinkOptions(address=f"127.0.0.1:{port}")
        with SinkHost(lambda worker: FileSink(other, worker), other, options):
            run.send(numbers, Number("k", 2))
            assert "it is a different sink, or has lost data" in str(run.until_failed())
    finally:
        run.__exit__(None, None, None)


def test_a_worker_that_waits_for_an_outcome_is_asked_again_later(tmp_path: Path) -> None:
    """It will hear it: that is no reason for an app to be given up."""
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        target = RemoteSink("q", address_of(host), 1, DialOptions(timeout_s=30), "begin anew")
        vote = target.push("q-0", [[(None, 0, b"one")]], DialStep(1, 1, SENDING))
        with pytest.raises(SinkGoneError, match=r"does not know the outcome of q-0/1\.1 yet"):
            target.push("q-0", [[(None, 0, b"two")]], DialStep(1, 2, SENDING))
        target.tell(vote, DialStep(1, 2, TELLING))
        target.push("q-0", [[(None, 0, b"two")]], DialStep(1, 3, SENDING))
    assert committed_lines(tmp_path, "q-0") == ["one"]


def test_a_sink_that_lost_what_it_has_voted_for_is_noticed_when_it_is_told(tmp_path: Path) -> None:
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        target = RemoteSink("q", address_of(host), 1, DialOptions(timeout_s=30), "begin anew")
        vote = target.push("q-0", [[(None, 0, b"one")]], DialStep(1, 1, SENDING))
        with pytest.raises(
            ConnectorError, match="has 3 bytes of worker q-0, but 7 bytes were committed"
        ):
            target.tell(vote._replace(end=7), DialStep(1, 2, TELLING))


def test_the_number_of_workers_must_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "sink"

    def pushing(workers: int) -> App:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key")
        made.sink(numbers, address_of(host), workers=workers)
        return made

    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        with AppTest(pushing(2), tmp_path) as run:
            run.send(run.app.streams["numbers"], Number("k", 1))
            run.until_idle()
        with pytest.raises(
            PlanChangedError, match=r"of its workers .* changed from 2 to 1"
        ) as told:
            AppTest(pushing(1), tmp_path).__enter__()
        assert "`penstock reset APP numbers_sink`" in str(told.value)


class Stuck(FileSink):
    """A target that can be away."""

    is_stuck = True

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        if Stuck.is_stuck:
            raise OSError("the target is away")
        super().apply(messages, after, mark)


@pytest.mark.row("X10", engine="any")
def test_it_is_not_idle_before_the_target_has_everything(tmp_path: Path) -> None:
    """Votes do not need the target; what is decided waits on the sink's disk."""
    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    Stuck.is_stuck = True
    with SinkHost(lambda worker: Stuck(tmp_path / "s", worker), tmp_path / "s") as host:
        made.sink(numbers, address_of(host), workers=1)
        with AppTest(made, tmp_path, tries_max=1) as run:
            for number in range(3):
                run.send(numbers, Number("k", number))
                wait_until(lambda: status(run).rows_in == number + 1, 30, "a vote")  # noqa: B023
            assert not run.runner.until_idle(1.0)
            assert status(run).batches >= 1
            Stuck.is_stuck = False
            run.until_idle()
    assert [row.n for row in of_worker(tmp_path / "s", 0)] == [0, 1, 2]


@pytest.mark.row("X10", engine="any")
def test_what_is_decided_and_not_applied_is_bounded(tmp_path: Path) -> None:
    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    Stuck.is_stuck = True
    with SinkHost(lambda worker: Stuck(tmp_path / "s", worker), tmp_path / "s") as host:
        made.sink(numbers, address_of(host), workers=1, unapplied_max=2)
        with AppTest(made, tmp_path, limits=QueryLimits(batch_rows_max=1)) as run:
            run.send(numbers, *[Number("k", number) for number in range(5)])
            wait_until(lambda: status(run).batches == 2, 30, "two transactions")
            assert not run.runner.until_idle(1.0)
            assert status(run).batches == 2
            Stuck.is_stuck = False
            run.until_idle()
    assert [row.n for row in of_worker(tmp_path / "s", 0)] == [0, 1, 2, 3, 4]


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize("step", ["push.decided", "push.told", "push.again"])
def test_a_sink_that_lost_its_disk_has_each_row_once(
    tmp_path: Path, log: Log, step: str, chance: random.Random
) -> None:
    """The spool is a cache: what was decided and not applied is sent again, from the log."""
    files, spool = tmp_path / "files", tmp_path / "spool"
    Stuck.is_stuck = False
    send(log, range(900))
    options = SinkOptions()
    for life in range(6):
        # The target is away in the lives before the last, most of the time.
        Stuck.is_stuck = life < 5 and life % 3 != 1
        with SinkHost(lambda worker: Stuck(files, worker), spool, options) as host:
            options = SinkOptions(address=address_of(host))
            made = App("pushing")
            numbers = made.stream("numbers", Number, key="key", partitions=3)
            made.sink(numbers, address_of(host), workers=2, timeout="10 seconds")
            runner = build(
                log, plan(made), InlineBackend(), limits=QueryLimits(batch_rows_max=100),
                options=RunnerOptions(backoff_ms=20, metrics_interval_ms=0),
            )  # fmt: skip
            failpoints.arm(step, "raise", at=chance.randrange(1, 4))
            runner.start()
            try:
                assert runner.until_idle(60 if life == 5 else 1.0) or life < 5, runner.failure()
            finally:
                failpoints.disarm()
                runner.stop()
        shutil.rmtree(spool)
    check(files, 900)


@pytest.mark.row("X10", engine="any")
def test_what_the_target_has_of_a_transaction_is_not_sent_again(tmp_path: Path, log: Log) -> None:
    """Nor are messages without data, which no byte tells apart."""
    files, spool, texts = tmp_path / "files", tmp_path / "spool", [b"a", b"", b"", b"b", b"", b"c"]
    log.apply([CreateStream(declare("rows", content="bytes"))])
    with Producer(log) as producer:
        for text in texts:
            producer.send("rows", text)
    options = SinkOptions()
    for is_stuck in (True, False):
        Stuck.is_stuck = is_stuck
        with SinkHost(lambda worker: Stuck(files, worker), spool, options) as host:
            options = SinkOptions(address=address_of(host))
            dial = DialOptions(timeout_s=1 if is_stuck else 30)
            target = RemoteSink("q", address_of(host), 1, dial, "begin anew")
            if is_stuck:
                with pytest.raises(SinkGoneError, match="are committed"):
                    Delivery(log, target, "rows", "stream").deliver()
            else:
                assert Delivery(log, target, "rows", "stream").deliver() == 0
        shutil.rmtree(spool)
        if is_stuck:  # the sink was killed after a part of it
            part = [SinkMessage(None, 0, text) for text in texts[:2]]
            FileSink(files, "q-0").apply(part, Mark(), Mark(1, 2))
    assert committed_lines(files, "q-0") == [text.decode() for text in texts]


def test_what_cannot_be_read_again_as_it_was_is_refused(tmp_path: Path) -> None:
    """The encoder has changed meanwhile; the way out is named."""

    def encode(value: Number) -> bytes:
        return f"{value.n}{suffix}".encode()

    files, spool = tmp_path / "files", tmp_path / "spool"
    suffix, options = "", SinkOptions()
    Stuck.is_stuck = True
    for life in range(2):
        with SinkHost(lambda worker: Stuck(files, worker), spool, options) as host:
            options = SinkOptions(address=address_of(host))
            made = App("pushing")
            numbers = made.stream("numbers", Number, key="key")
            made.sink(numbers, address_of(host), workers=1, encoder=encode)
            with AppTest(made, tmp_path, tries_max=1) as run:
                if life == 0:
                    run.send(numbers, Number("k", 1))
                    wait_until(lambda: status(run).batches == 1, 30, "a decision")
                else:
                    failure = str(run.until_failed())
        shutil.rmtree(spool)
        suffix = "x"
    assert "does not give what was sent" in failure
    assert "penstock reset" in failure


def test_a_stream_is_one_stream_however_a_delivery_writes_it(tmp_path: Path) -> None:
    """Its rows are counted under any name, and two deliveries do not both take them."""
    folder = tmp_path / "sink"
    with (
        open_log(tmp_path / "log.db") as log,
        SinkHost(lambda worker: FileSink(folder, worker), folder) as host,
    ):
        log.apply([CreateStream(declare("rows", content="bytes"))])
        target = RemoteSink("one", address_of(host), 1, DialOptions(), "…")
        with Producer(log) as producer:
            producer.send("rows", b"a")
        assert Delivery(log, target, "default.rows", "stream").deliver() == 1
        with Producer(log) as producer:
            producer.send("rows", b"b")
        assert [(found.stream, rows) for found, rows in deliveries(log)] == [("rows", 1)]
        other = msgspec.structs.replace(target, query="two")
        with pytest.raises(UsageError, match="producer one already delivers stream rows"):
            Delivery(log, other, "rows", "stream")
        assert Delivery(log, target, "rows", "stream").deliver() == 1
    assert committed_lines(folder, "one-0") == ["a", "b"]


class Picky(FileSink):
    """Refuses a row for good, or while something is not there yet."""

    is_ready = False

    def check(self, messages: Sequence[SinkMessage]) -> None:
        for message in messages:
            if b'"n":13' in message.data:
                raise ValueError("13 is no number for us")
            if b'"n":5' in message.data and not self.is_ready:
                raise OSError("the disk is away")


def test_an_app_says_why_a_row_is_never_taken_and_waits_where_it_may_be(tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    said: list[str] = []
    Picky.is_ready = False
    with SinkHost(lambda worker: Picky(folder, worker), folder, tell=said.append) as host:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key")
        made.sink(numbers, address_of(host), workers=1, name="out")
        with AppTest(made, tmp_path, limits=QueryLimits(batch_rows_max=4)) as run:
            run.send(numbers, *[Number("k", n) for n in range(8)])
            wait_until(lambda: status(run).restarts > 3, 60, "it being tried again")
            assert "could not stage messages: OSError: the disk is away" in status(run).error
            Picky.is_ready = True
            run.until_idle()
            run.send(numbers, *[Number("k", n) for n in range(8, 16)])
            failure = str(run.until_failed())
    assert "out failed at the sink at 127.0.0.1:" in failure
    assert "the target refuses a message: ValueError: 13 is no number for us" in failure
    assert "Traceback" not in failure
    assert [row.n for row in received(folder, "out", 1)] == list(range(12))
    assert sum("ValueError: 13 is no number" in line for line in said) == 3, "a line for each try"


class Odd(FileSink):
    def check(self, messages: Sequence[SinkMessage]) -> None:
        for message in messages:
            number = msgspec.json.decode(message.data, type=Number).n
            if number % 3 == 0:
                raise ValueError(f"{number} is no number for us")


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize("on_damage", ["skip", "dead-letter"])
def test_rows_that_are_never_taken_are_left_out_as_the_stream_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_damage: str
) -> None:
    """They are not in the sink; the others are, once and in order, over several rounds."""
    monkeypatch.setattr("penstock.connect.hosts.refusals.REFUSALS_MAX", 20)
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: Odd(folder, worker), folder) as host:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key", on_damage=on_damage)  # type: ignore[call-overload]
        made.sink(numbers, address_of(host), workers=2, name="out")
        with AppTest(made, tmp_path) as run:
            run.send(numbers, *[Number(f"k{n % 7}", n) for n in range(400)])
            run.until_idle()
            skipped = sum(found.rows_skipped for found in run.runner.statuses())
            letters: list[Any] = (
                list(read_events(run.log, "numbers_dead")) if on_damage != "skip" else []
            )
    rows = sorted(row.n for row in received(folder, "out"))
    assert rows == [n for n in range(400) if n % 3]
    assert skipped == 134
    if on_damage == "dead-letter":
        told: dict[int, Any] = {letter.data.offset: letter.data for letter in letters}
        assert len(told) == len(letters) == 134
        assert all(letter.agent == "out" for letter in told.values())
        numbers_of = {msgspec.json.decode(letter.data, type=Number).n for letter in told.values()}
        assert numbers_of == {n for n in range(400) if n % 3 == 0}
        assert "ValueError: 0 is no number for us" in {x.error for x in told.values()}


def status(run: AppTest) -> QueryStatus:
    (found,) = run.runner.statuses()
    return found
