"""What tests of the command line share: calling it, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from penstock.cli import main

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ctrl-C reaches it also where tests run in the background of a shell, which has it ignored.
_START = "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
PROGRAM = [sys.executable, "-c", f"import signal, sys; from penstock.cli import main; {_START}"]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:  # fmt: skip
    """Call the program, in `tmp_path`: it is loaded once, which is most of what a call takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_LOG", raising=False)

    def call(*arguments: str, stdin: str | bytes = "", **extra: str) -> Done:
        modules, path = set(sys.modules), list(sys.path)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            for name, value in extra.items():
                patch.setenv(name, value)
            try:
                code = main(list(arguments))
            finally:
                for name in set(sys.modules) - modules:  # a user's, of this folder
                    if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                        del sys.modules[name]
                sys.path[:] = path
        out, err = capfd.readouterr()
        return Done(arguments, code, out, err)

    return call


@pytest.fixture
def start(tmp_path: Path) -> Run:
    """Call the program in a process of its own, and wait for it."""

    def call(*arguments: str, stdin: str = "", **extra: str) -> Done:
        return subprocess.run(
            [*PROGRAM, *arguments], input=stdin, capture_output=True, text=True, cwd=tmp_path,
            timeout=60, check=False, env=environment(**extra),
        )  # fmt: skip

    return call


class Program:
    """The program in a process of its own, for as long as a block."""

    def __init__(self, folder: Path, *arguments: str, **extra: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], cwd=folder, text=True, env=environment(**extra),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def note(self) -> str:
        """The next line of what else it says."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self, rest: str = "") -> Done:
        """What is left of its output, when it has ended."""
        out, err = self.process.communicate(rest or None, timeout=60)
        return Done([], self.process.returncode, out, err)


def environment(**extra: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PENSTOCK_LOG"} | extra


def rows(done: Done) -> list[dict[str, object]]:
    """What was printed, as JSON lines."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def data(done: Done) -> list[object]:
    """The data of the events that were printed."""
    return [row["data"] for row in rows(done)]


class Screen(NamedTuple):
    """How the program ended, and what was seen on the terminal, without its colours."""

    code: int
    text: str


def on_terminal(
    folder: Path, *arguments: str, typed: str = "", output: Path | None = None, columns: int = 80,
    program: Sequence[str] = PROGRAM, **extra: str,
) -> Screen:  # fmt: skip
    """Call the program at a terminal; standard output may go into a file instead."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    with contextlib.ExitStack() as stack:
        stdout = theirs if output is None else stack.enter_context(output.open("wb"))
        process = subprocess.Popen(
            [*program, *arguments], cwd=folder, stdin=theirs, stderr=theirs, stdout=stdout,
            env=environment(TERM="xterm", **extra),
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        os.write(ours, typed.encode())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
            try:
                more = os.read(ours, 65_536)
            except OSError:  # the other side is closed
                break
            seen += more
        os.close(ours)
        code = process.wait(60)
    return Screen(code, _STYLE.sub("", seen.decode()).replace("\r\n", "\n"))
