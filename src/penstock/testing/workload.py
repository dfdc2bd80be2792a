"""A workload that is killed on purpose, and the oracle that judges what it left behind.

`python -m penstock.testing.workload LOG --seed 7 --commits 20` performs a sequence of operations
that depends only on the seed, and reports on standard output what it tried and what was
acknowledged. If it is started again after a kill, it continues where it stopped. `judge` compares
the reports with what the log holds.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec

from penstock import failpoints
from penstock.errors import ObjectExistsError, PenstockError
from penstock.log import open_log
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Log, Part
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.reading.read import ReadOptions, read_changes, read_events
from penstock.log.reading.table import Table
from penstock.log.writing.compose import Composer, EventOptions
from penstock.log.writing.transaction import Transaction
from penstock.records.schema import Record
from penstock.testing.faults import Fault, FaultyVfs

T = TypeVar("T")
STREAMS = ("plain", "table", "unique", "short")
TRIES_MAX = 5


class WorkItem(Record):
    """An event of the workload: the commit it belongs to, and its number within it."""

    producer: str
    sequence: int
    number: int
    key: str
    aborted: bool = False


def items_of(producer: str, sequence: int, seed: int) -> list[WorkItem]:
    """The events of a commit, which depend only on its name and the seed."""
    rng = random.Random(f"{seed}/{producer}/{sequence}")
    count = rng.randrange(1, 8)
    return [WorkItem(producer, sequence, n, f"k{rng.randrange(5)}") for n in range(count)]


def create_streams(log: Log) -> None:
    """Create the workload's streams that do not exist yet."""
    present = {str(stream.name) for stream in log.streams()}
    specs = (
        declare("plain", WorkItem, key="key", partitions=3),
        declare("table", WorkItem, key="key", table=True),
        declare("unique", WorkItem, ids="producer"),
        declare("short", WorkItem, retention_bytes=2000),
    )
    for spec in specs:
        if spec.name not in present:
            with contextlib.suppress(ObjectExistsError):  # another process was faster
                log.apply([CreateStream(spec)])


def retry(work: Callable[[], T]) -> T:
    """Retry after an injected failure, as a careful program would."""
    for attempt in range(TRIES_MAX):
        try:
            return work()
        except (PenstockError, failpoints.FailpointError) as error:
            _say("raised", type(error).__name__, str(error).replace("\n", " "))
            fatal = isinstance(error, PenstockError) and not error.retriable
            if fatal or attempt == TRIES_MAX - 1:
                raise
    raise AssertionError("unreachable")


class WorkloadWorker:
    """Performs the operations of one producer, and reports what it does."""

    def __init__(self, log: Log, producer: str, seed: int) -> None:
        self._log = log
        self._producer = producer
        self._seed = seed
        self._composer = Composer(producer, log.limits)
        self._holder: Holder | None = None

    def run(self, commits: int) -> None:
        """Commit the sequences below `commits` that are not committed yet."""
        self._holder = retry(lambda: self._log.hold(self._producer))
        last = self._log.last_commit(self._producer)
        for sequence in range(last.sequence + 1 if last else 0, commits):
            self._step(sequence)

    def _step(self, sequence: int) -> None:
        rng = random.Random(f"{self._seed}/{self._producer}/{sequence}/step")
        if rng.random() < 0.2:
            retry(lambda: self._abort(sequence))
        if sequence % 6 == 3:
            retry(self._log.maintain)
        if sequence % 8 == 5:
            retry(lambda: self._make_stream(f"extra-{self._producer}-{sequence}"))
        if sequence % 7 == 6:
            self._holder = retry(lambda: self._log.hold(self._producer))
        _say("try", self._producer, sequence)
        done = retry(lambda: self._commit(sequence, staged=rng.random() < 0.5))
        _say("ack", self._producer, done.sequence)

    def _make_stream(self, name: str) -> None:
        if name not in {str(stream.name) for stream in self._log.streams()}:
            self._log.apply([CreateStream(declare(name))])

    def _abort(self, sequence: int) -> None:
        """Roll back a transaction that has sent and spilled events: none may become visible."""
        holder = self._hold_now()
        with Transaction(self._log, holder, sequence=sequence) as transaction:
            for item in items_of(self._producer, sequence, self._seed):
                aborted = msgspec.structs.replace(item, aborted=True)
                transaction.send("plain", aborted)
                transaction.send("table", aborted)
            transaction.roll_back()

    def _hold_now(self) -> Holder:
        assert self._holder is not None
        return self._holder

    def _commit(self, sequence: int, staged: bool) -> Committed:
        last = self._log.last_commit(self._producer)
        if last is not None and last.sequence == sequence:
            return last  # an earlier attempt, whose outcome was unknown, was committed
        items = items_of(self._producer, sequence, self._seed)
        parts = [self._part(name, items) for name in STREAMS]
        progress: dict[str, bytes | None] = {f"work/{self._producer}": str(sequence).encode()}
        if not staged:
            return self._log.commit(
                self._hold_now(), sequence, Commit(parts=parts, progress=progress)
            )
        lost = self._log.stage(self._hold_now(), sequence, parts[0])  # a task that was run again
        del lost
        pieces = [self._log.stage(self._hold_now(), sequence, part) for part in parts]
        commit = Commit(pieces=pieces, progress=progress)
        return self._log.commit(
            self._hold_now(), sequence, commit, CommitOptions(compression="zstd")
        )

    def _part(self, name: str, items: Sequence[WorkItem]) -> Part:
        stream = self._log.stream(name)
        events = [
            self._composer.admit(stream, item, EventOptions(id=_id(name, item))) for item in items
        ]
        return self._composer.part(stream, events)


def _id(stream: str, item: WorkItem) -> str | int | None:
    """Ids of the unique stream: some integers, some text, each used by two commits."""
    if stream != "unique":
        return None
    number = (item.sequence // 2) * 100 + item.number
    return number if item.producer == "even" else f"{item.producer}/{number}"


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


# The oracle


class Said(msgspec.Struct):
    """What workloads reported before they ended or were killed."""

    tried: set[tuple[str, int]]
    acked: set[tuple[str, int]]
    raised: list[str]


def heard(lines: Iterable[str]) -> Said:
    said = Said(set(), set(), [])
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word in ("try", "ack"):
            producer, _, sequence = rest.partition(" ")
            (said.tried if word == "try" else said.acked).add((producer, int(sequence)))
        elif word == "raised":
            said.raised.append(rest)
    return said


def judge(log: Log, said: Said, seed: int) -> list[str]:
    """The broken promises, one sentence each; empty if all hold."""
    return [
        *_judge_commits(log, "plain", said, seed),
        *_judge_commits(log, "table", said, seed),
        *_judge_unique(log, said, seed),
        *_judge_table(log),
        *_judge_progress(log, said),
        *_judge_offsets(log),
        *(f"verify: {damage.message}" for damage in log.verify()),
    ]


def _judge_commits(log: Log, stream: str, said: Said, seed: int) -> Iterator[str]:
    found: Counter[tuple[str, int, int]] = Counter()
    for event in read_changes(log, stream, WorkItem):
        item = event.data
        if item is None:
            yield f"{stream}: an event without data is visible"
            continue
        if item.aborted:
            yield f"{stream}: an aborted event is visible: {item}"
        found[(item.producer, item.sequence, item.number)] += 1
    for name, count in found.items():
        if count > 1:
            yield f"{stream}: {name} is visible {count} times"
    visible = {(producer, sequence) for producer, sequence, _ in found}
    for commit in said.acked - visible:
        yield f"{stream}: {commit} was acknowledged but is lost"
    for commit in visible - said.tried:
        yield f"{stream}: {commit} was never tried but is visible"
    for producer, sequence in visible:
        wanted = {(producer, sequence, item.number) for item in items_of(producer, sequence, seed)}
        if not wanted <= set(found):
            yield f"{stream}: only part of {(producer, sequence)} is visible"


def _judge_unique(log: Log, said: Said, seed: int) -> Iterator[str]:
    ids = Counter(event.id for event in read_events(log, "unique", WorkItem))
    for id_, count in ids.items():
        if count > 1:
            yield f"unique: the id {id_} is visible {count} times"
    for producer, sequence in said.acked:
        for item in items_of(producer, sequence, seed):
            if str(_id("unique", item)) not in ids:
                yield f"unique: {item} was acknowledged but its id is missing"


def _judge_table(log: Log) -> Iterator[str]:
    wanted = {event.key: event.data for event in read_changes(log, "table", WorkItem)}
    table = dict(Table(log, "table", WorkItem).items())
    if table != wanted:
        yield f"table: its entries do not match its changelog: {table} != {wanted}"


def _judge_progress(log: Log, said: Said) -> Iterator[str]:
    for producer in {producer for producer, _ in said.tried}:
        value = log.progress(f"work/{producer}")
        last = log.last_commit(producer)
        if value != (str(last.sequence).encode() if last else None):
            yield f"the progress of {producer} is {value!r}, but its latest commit is {last}"


def _judge_offsets(log: Log) -> Iterator[str]:
    for name in STREAMS:
        for partition, bounds in log.offsets(name).items():
            expected = bounds.first
            for event in read_events(log, name, None, ReadOptions(partitions=[partition])):
                if event.offset < expected:
                    yield f"{name}/{partition}: offset {event.offset} after {expected - 1}"
                expected = event.offset + 1


def work(
    url: str,
    seed: int,
    commits: int,
    producer: str = "even",
    options: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> None:
    """Run the workload in this process."""
    given = {"transaction_memory_bytes_max": 200, "upkeep_interval_ms": 0, **options}
    with open_log(url, create=True, **given) as log:
        retry(lambda: create_streams(log))
        WorkloadWorker(log, producer, seed).run(commits)
    _say("done")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--producer", default="even")
    parser.add_argument("--fault", help="a testing.faults.Fault as JSON")
    given = parser.parse_args()
    vfs: FaultyVfs | None = None
    options: dict[str, str | int | bool] = {}
    if given.fault:
        vfs = FaultyVfs("workload")
        vfs.faults.append(msgspec.json.decode(given.fault, type=Fault))
        options["vfs"] = "workload"
    work(given.log, given.seed, given.commits, given.producer, options)


if __name__ == "__main__":
    main()
