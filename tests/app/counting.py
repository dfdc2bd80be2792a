"""An app without Spark, run as a program: adds up numbers, and says what it waits for."""

from __future__ import annotations

import signal
import sys
import threading

import penstock
from penstock import App, Entry, Record
from penstock.app.declaring.plan import plan
from penstock.app.running.backends import InlineBackend
from penstock.app.running.runner import RunnerOptions
from penstock.app.running.standby import at_work
from penstock.errors import PenstockError


class Number(Record):
    key: str
    value: int


class Seen(Record):
    key: str
    value: int
    total: int


app = App("counting")
numbers = app.stream("numbers", Number, key="key", partitions=2)
seen = app.stream("seen", Seen, key="key")
totals = app.table("totals", value=int, default=0)


@app.agent(numbers, state=totals, to=seen)
def add(number: Number, total: Entry[int]) -> Seen:
    total.value += number.value
    return Seen(number.key, number.value, total.value)


def main(url: str, lease_ms: int, *options: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def tell(what: str) -> None:
        print(what, flush=True)

    with penstock.open(url, upkeep_interval_ms=0) as log:
        with at_work(
            log, plan(app), InlineBackend(), tell=tell, stop=stop,
            options=RunnerOptions(lease_ms=lease_ms, backoff_ms=50),
            take_over="--take-over" in options,
        ) as runner:  # fmt: skip
            while not stop.wait(0.05) and not runner.is_over():
                pass
        failure = runner.failure()
        if failure is not None:
            tell(f"{failure.code}: {failure}")
            sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    except PenstockError as error:
        sys.exit(f"{error.code}: {error}")
