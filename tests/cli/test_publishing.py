"""`penstock pub`: what is published, what is said, and how long it waits."""

from __future__ import annotations

import array
import fcntl
import io
import json
import secrets
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from penstock.cli import main
from penstock.cli.lines import InputLine
from penstock.cli.publishing import Given, _failure
from penstock.cli.waiting import Attempts
from penstock.errors import CommitOutcomeUnknownError, LogBusyError, PenstockError
from penstock.log.writing.compose import EventOptions
from penstock.producer import Place
from penstock.testing.faults import Fault, FaultyVfs, faulty_disk
from penstock.testing.processes import wait_until
from tests.cli.conftest import PROGRAM, Program, Run, data, environment, on_terminal, rows


@pytest.fixture
def disk() -> Iterator[FaultyVfs]:
    with faulty_disk() as vfs:
        yield vfs


def test_without_data_there_is_nothing_to_publish(run: Run) -> None:
    run("stream", "create", "s")
    done = run("pub", "s")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is nothing to publish: give the event's data, or -" in done.stderr


@pytest.mark.parametrize("options", [[], ["--ack"]])
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_input_is_told_and_is_no_failure(run: Run, options: list[str], text: str) -> None:
    run("stream", "create", "s")
    done = run("pub", "s", "-", *options, stdin=text)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "the input was empty: nothing was published to s\n"
    (row,) = rows(run("pub", "s", "-", *options, "--json", stdin=text))
    assert row["published"] == 0


def test_a_failure_after_lines_were_published_does_not_say_that_nothing_was(
    run: Run, tmp_path: Path
) -> None:
    run("stream", "create", "s", "-F", "n=int")
    with Program(tmp_path, "pub", "s", "-", "--ack", "--json") as program:
        for n in range(3):
            program.write(f'{{"n": {n}}}')
            program.line()
        done = program.end('{"n": "x"}\n')
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert done.returncode == 1
    assert error["code"] == "partly_published"
    assert error["message"].startswith("line 4: S: Expected `int`, got `str`")
    assert error["message"].endswith("; published: lines 1 to 3")
    assert [row["n"] for row in data(run("read", "s", "--json"))] == [0, 1, 2]  # type: ignore[index]


def test_an_interrupt_says_what_it_has_left(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    with Program(tmp_path, "pub", "s", "-") as program:
        program.write("1")
        wait_until(lambda: has_read_all(program), 30, "the line being read")
        program.process.send_signal(signal.SIGINT)
        done = program.end()
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was published\n")
    assert data(run("read", "s", "--json")) == []


def has_read_all(program: Program) -> bool:
    """Whether nothing is left in the pipe to its standard input."""
    assert program.process.stdin is not None
    waiting = array.array("i", [0])
    fcntl.ioctl(program.process.stdin, termios.FIONREAD, waiting)
    return waiting[0] == 0


@pytest.mark.timeout(60)  # not the two minutes of a producer
def test_a_full_disk_is_told_and_waited_for_in_bounded_time(disk: FaultyVfs, run: Run) -> None:
    run("stream", "create", "s")
    disk.faults = [Fault("write", "full", lasting=True)]
    at = ["--setting", "vfs=faulty", "--timeout", "1s"]
    for arguments in (["pub", "s", "-"], ["pub", "s", "1"], ["pub", "s", "-", "--ack"]):
        done = run(*arguments, *at, "--json", stdin="1\n2\n")
        told = json.loads(done.stderr.splitlines()[-1])["error"]
        assert (done.returncode, done.stdout, told["code"]) == (1, "", "log_full")
        assert "is full" in told["message"]
        assert told["message"].endswith("gave up after 1 second (--timeout)")
    disk.faults = [Fault("write", "full", at=40, lasting=True)]  # when the producer is open
    done = run("pub", "s", json.dumps(secrets.token_hex(400_000)), *at)
    assert done.returncode == 1
    assert done.stderr.endswith("gave up after 1 second (--timeout)\n")
    disk.faults = []
    assert data(run("read", "s", "--json")) == []


class Waiting:
    """The program in a thread, which waits for something; what it has said so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
        self._capfd = capfd
        self._said = ""
        self._thread = threading.Thread(target=self._run, args=arguments)
        self.code: int | None = None

    def _run(self, *arguments: str) -> None:
        self.code = main(list(arguments))

    def until_said(self, text: str) -> None:
        self._thread.start()
        wait_until(lambda: text in self.said(), 20, text)

    def said(self) -> str:
        self._said += self._capfd.readouterr().err
        return self._said

    def join(self) -> int | None:
        self._thread.join(30)
        return self.code


@pytest.mark.parametrize("data_", ["-", "7"])
def test_what_waits_for_room_says_why_and_goes_on(
    disk: FaultyVfs, run: Run, capfd: pytest.CaptureFixture[str], data_: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run("stream", "create", "s")
    disk.faults = [Fault("write", "full", lasting=True)]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"7\n")))
    program = Waiting(capfd, "pub", "s", data_, "--setting", "vfs=faulty")
    program.until_said("is full")
    assert "retrying for up to 30 seconds" in program.said()
    disk.faults = []
    assert program.join() == 0
    assert data(run("read", "s", "--json")) == [7]


def test_a_writer_that_holds_the_log_is_waited_for_aloud(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run("stream", "create", "s")
    other = apsw.Connection("penstock.db")
    other.execute("BEGIN IMMEDIATE")
    program = Waiting(capfd, "pub", "s", "7")
    try:
        program.until_said("waiting for penstock.db: no answer yet")
    finally:
        other.close()
    assert program.join() == 0
    assert data(run("read", "s", "--json")) == [7]


def test_lines_that_may_be_published_are_told_from_those_that_are() -> None:
    chunk = [Given(InputLine(n, b"1"), 1, EventOptions()) for n in (4, 5, 6, 7)]
    there, unknown = Place(0, 1, "i"), CommitOutcomeUnknownError("no answer came")
    with Attempts("x.db", 250, print) as attempts:
        error = _failure(3, chunk, [there, there, unknown, unknown], attempts)
        assert isinstance(error, CommitOutcomeUnknownError)
        assert str(error) == (
            "no answer came; published: lines 1 to 5; outcome unknown: lines 6 to 7"
        )
        error = _failure(0, chunk, [unknown, there, there, unknown], attempts)
        assert isinstance(error, CommitOutcomeUnknownError)
        assert "published: lines 5 to 6; outcome unknown: lines 4, 7" in str(error)


def test_an_outcome_that_was_unknown_once_stays_so() -> None:
    """Whatever is wrong in the end: the try before it may have published everything."""
    errors: list[PenstockError] = [CommitOutcomeUnknownError("no answer came")]

    def work() -> None:
        raise errors.pop() if errors else LogBusyError("another process writes")

    with Attempts("x.db", 250, print) as attempts:
        with pytest.raises(CommitOutcomeUnknownError, match="another process writes; gave up"):
            attempts.until_done(work)
        assert not errors
        with pytest.raises(LogBusyError, match="another process writes; gave up"):
            attempts.until_done(work)


def test_an_error_of_the_system_is_told_as_it_is(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        (["backup", "folder/none/copy.db"], "folder/none"),
        (["run", "x" * 300 + ".py"], "File name too long"),
    ):
        done = run(*arguments)
        assert done.returncode != 0
        assert message in done.stderr
        assert "cannot write the output" not in done.stderr


def test_output_that_is_full_is_told_from_other_errors(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "1")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "read", "s"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False, timeout=60, env=environment(),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "penstock: cannot write the output: No space left on device\n"


def test_a_progress_bar_is_seen_and_takes_nothing_of_the_results(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    for start in range(0, 3000, 1000):  # three batches: it is there before all is written
        run("pub", "s", "-", stdin="".join(f'"{n}"\n' for n in range(start, start + 1000)))
    at_once = "import penstock.cli.output; penstock.cli.output.BAR_AFTER_S = 0; "
    program = [PROGRAM[0], "-c", at_once + PROGRAM[2]]
    seen = on_terminal(
        tmp_path, "read", "s", "--json", output=tmp_path / "out", program=program
    )  # fmt: skip
    assert seen.code == 0
    assert "reading" in seen.text
    assert "100%" in seen.text
    lines = (tmp_path / "out").read_text().splitlines()
    assert [json.loads(line)["data"] for line in lines] == [str(n) for n in range(3000)]
    assert on_terminal(tmp_path, "read", "s", "-n", "1", output=tmp_path / "out").text == ""
