"""From the log into a sink, each row once: kills on both sides, at every step and at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from penstock import App, CreateStream, Log, Producer, declare
from penstock import open as open_log
from penstock.app.plan import plan
from penstock.app.query import QueryLimits
from penstock.app.reports import sink_rows
from penstock.app.runner import QueryStatus, make_streams
from penstock.connect.delivery import Delivery, deliveries
from penstock.connect.dial import DialOptions
from penstock.connect.push import SENDING, TELLING, Step, Target
from penstock.connect.sink import SinkHost, SinkOptions
from penstock.connect.sinks.file import FileSink
from penstock.connect.wire import Message
from penstock.errors import AppError, ConnectorError, SinkGoneError, UsageError
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
    with pytest.raises(AppError, match=r"test_push.py.*'nowhere' is no address"):
        made.sink(numbers, "nowhere")
    with pytest.raises(AppError, match="workers is 1 to 256"):
        made.sink(numbers, "127.0.0.1:1", workers=0)


def test_another_sink_is_noticed(tmp_path: Path) -> None:
    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    first, second = tmp_path / "one", tmp_path / "two"
    with SinkHost(lambda worker: FileSink(first, worker), first) as host:
        made.sink(numbers, address_of(host), workers=1)
        port = host.address[1]
        with AppTest(made, tmp_path) as run:
            run.send(numbers, Number("k", 1))
            run.until_idle()
    options = SinkOptions(address=f"127.0.0.1:{port}")
    with SinkHost(lambda worker: FileSink(second, worker), second, options):
        with AppTest(made, tmp_path, tries_max=1) as run:
            assert "it is another one, or has lost some" in str(run.until_failed())


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
@pytest.mark.parametrize(
    "step", [*(n for n in CONNECTOR_NAMES if n.startswith("push.")), "commit.committed"]
)
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
@pytest.mark.parametrize("step", [n for n in CONNECTOR_NAMES if n.startswith("sink.")])
def test_the_sink_is_killed_at(tmp_path: Path, log: Log, sink: SinkProcess, step: str) -> None:
    sink.start(f"{step}=kill@3")
    send(log, range(1500))
    with Driver(tmp_path, log, sink).start() as driver:
        wait_until(lambda: not sink.is_running(), 60, "the sink being killed")
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
            assert "it is another one, or has lost some" in str(run.until_failed())
    finally:
        run.__exit__(None, None, None)


def test_a_worker_that_waits_for_an_outcome_is_asked_again_later(tmp_path: Path) -> None:
    """It will hear it: that is no reason for an app to be given up."""
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        target = Target("q", address_of(host), 1, DialOptions(timeout_s=30), "begin anew")
        vote = target.push("q-0", [[(None, 0, b"one")]], Step(1, 1, SENDING))
        with pytest.raises(SinkGoneError, match=r"has not heard the outcome of q-0/1\.1 yet"):
            target.push("q-0", [[(None, 0, b"two")]], Step(1, 2, SENDING))
        target.tell(vote, Step(1, 2, TELLING))
        target.push("q-0", [[(None, 0, b"two")]], Step(1, 3, SENDING))
    assert committed_lines(tmp_path, "q-0") == ["one"]


def test_a_sink_that_lost_what_it_has_voted_for_is_noticed_when_it_is_told(tmp_path: Path) -> None:
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        target = Target("q", address_of(host), 1, DialOptions(timeout_s=30), "begin anew")
        vote = target.push("q-0", [[(None, 0, b"one")]], Step(1, 1, SENDING))
        with pytest.raises(ConnectorError, match="has 3 bytes of worker q-0, and 7 were committed"):
            target.tell(vote._replace(end=7), Step(1, 2, TELLING))


def test_the_number_of_workers_must_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        for workers in (2, 1):
            made = App("pushing")
            numbers = made.stream("numbers", Number, key="key")
            made.sink(numbers, address_of(host), workers=workers)
            with AppTest(made, tmp_path, tries_max=1) as run:
                run.send(numbers, Number("k", 1))
                if workers == 2:
                    run.until_idle()
                else:
                    assert "had 2 workers, and has 1 now" in str(run.until_failed())


def test_it_is_not_idle_before_every_worker_has_heard(tmp_path: Path) -> None:
    """The sink goes away between the vote and the outcome."""

    class Stuck(FileSink):
        is_stuck = True

        def commit(self, start: int, end: int) -> None:
            if Stuck.is_stuck:
                raise OSError("the target is away")
            super().commit(start, end)

    made = App("pushing")
    numbers = made.stream("numbers", Number, key="key")
    with SinkHost(lambda worker: Stuck(tmp_path / "s", worker), tmp_path / "s") as host:
        made.sink(numbers, address_of(host), workers=1)
        with AppTest(made, tmp_path, tries_max=1) as run:
            run.send(numbers, Number("k", 1))
            wait_until(
                lambda: host.transactions.standing("pushing.numbers_sink-0").pending, 30, "a vote"
            )
            assert not run.runner.until_idle(1.0)
            Stuck.is_stuck = False
            run.until_idle()
            assert host.transactions.standing("pushing.numbers_sink-0").pending is None


def test_a_stream_is_one_stream_however_a_delivery_writes_it(tmp_path: Path) -> None:
    """Its rows are counted under any name, and two deliveries do not both take them."""
    folder = tmp_path / "sink"
    with (
        open_log(tmp_path / "log.db") as log,
        SinkHost(lambda worker: FileSink(folder, worker), folder) as host,
    ):
        log.apply([CreateStream(declare("rows", content="bytes"))])
        target = Target("one", address_of(host), 1, DialOptions(), "…")
        with Producer(log) as producer:
            producer.send("rows", b"a")
        assert Delivery(log, target, "default.rows", "stream").deliver() == 1
        with Producer(log) as producer:
            producer.send("rows", b"b")
        assert [(found.stream, rows) for found, rows in deliveries(log)] == [("rows", 1)]
        other = msgspec.structs.replace(target, query="two")
        with pytest.raises(UsageError, match="producer one delivers the stream rows already"):
            Delivery(log, other, "rows", "stream")
        assert Delivery(log, target, "rows", "stream").deliver() == 1
    assert committed_lines(folder, "one-0") == ["a", "b"]


class Picky(FileSink):
    """Refuses a row for good, or while something is not there yet."""

    is_ready = False

    def append(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if b'"n":13' in message.payload:
                raise ValueError("13 is no number for us")
            if b'"n":5' in message.payload and not self.is_ready:
                raise OSError("the disk is away")
        super().append(messages)


def test_an_app_says_why_a_row_is_never_taken_and_waits_where_it_may_be(tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    said: list[str] = []
    with SinkHost(lambda worker: Picky(folder, worker), folder, tell=said.append) as host:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key")
        made.sink(numbers, address_of(host), workers=1, name="out")
        with AppTest(made, tmp_path, limits=QueryLimits(batch_rows_max=4)) as run:
            run.send(numbers, *[Number("k", n) for n in range(8)])
            wait_until(lambda: status(run).restarts > 3, 60, "it being tried again")
            assert "could not append: OSError: the disk is away" in status(run).error
            Picky.is_ready = True
            run.until_idle()
            run.send(numbers, *[Number("k", n) for n in range(8, 16)])
            failure = str(run.until_failed())
    assert "out failed at the sink at 127.0.0.1:" in failure
    assert "could not append: ValueError: 13 is no number for us" in failure
    assert "Traceback" not in failure
    assert [row.n for row in received(folder, "out", 1)] == list(range(12))
    assert sum("ValueError: 13 is no number" in line for line in said) == 3, "a line for each try"


def status(run: AppTest) -> QueryStatus:
    (found,) = run.runner.statuses()
    return found
