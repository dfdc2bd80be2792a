"""What starting an app costs: three definitions, until each has handled a batch, and the end.

Measured is the processor time of the app's process, of Java and of the workers: unlike the clock,
it means something on a machine that has more to do.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import penstock
from bench.result import Result, in_turns
from penstock.spark import java
from penstock.spark.preparing import SampleItem, prepare, sample
from penstock.spark.running import running

ROUNDS = 3
PHASES = ("loading modules", "Spark and its workers", "first batches", "end")


def start(folder: Path, quick: bool) -> list[Result]:
    """The same app with the archive of `penstock prepare` and without it."""
    if not java.archive().exists():
        prepare()
    numbers = iter(range(2 * ROUNDS))
    phases: dict[str, list[list[float]]] = {"prepared": [], "plain": []}

    def measured(name: str, **environment: str) -> float:
        place = folder / f"start{next(numbers)}"
        before = _spent()
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(place), str(time.time())],
            check=True, capture_output=True, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        phases[name].append([float(word) for word in done.stdout.splitlines()[-1].split()])
        return _spent() - before

    prepared, plain = in_turns(
        lambda: measured("prepared"),
        lambda: measured("plain", PENSTOCK_JAVA_CACHE=str(folder)),
        1 if quick else ROUNDS,
    )
    result = Result(
        what="starting an app of three definitions, until the first batches, after `prepare`",
        measured=f"{prepared:.1f} s of processor time ({_told(phases['prepared'])})",
        beside=f"{plain:.1f} s without it ({_told(phases['plain'])})",
        ratio=prepared / plain,
        at_most=0.8,
    )
    return [result]


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _told(rounds: list[list[float]]) -> str:
    """The fastest round by the clock, in its phases."""
    best = min(rounds, key=sum)
    phases = ", ".join(f"{name} {each:.1f}" for name, each in zip(PHASES, best, strict=True))
    return f"by the clock {sum(best):.1f} s: {phases}"


def main(place: str, since: str) -> None:
    """Start an app and end it; print how many seconds each phase took."""
    marks = [float(since), time.time()]
    folder = Path(place)
    folder.mkdir()
    with penstock.open(folder / "log.db") as log:
        with running(sample(), log, master="local[2]") as runner:
            marks.append(time.time())
            with penstock.Producer(log) as producer:
                for n in range(10):
                    producer.send("items", SampleItem(f"n{n}", n))
            runner.until_idle(300)
            marks.append(time.time())
    marks.append(time.time())
    print(*(round(end - begin, 2) for begin, end in itertools.pairwise(marks)))


BENCHMARKS = {"start": start}

if __name__ == "__main__":
    main(*sys.argv[1:])
