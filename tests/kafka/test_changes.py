"""Changes of streams that are killed, frozen and raced: all of a change happened, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from confluent_kafka import Producer as Other
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from penstock import (
    AlterStream,
    Commit,
    CreateNamespace,
    CreateStream,
    DropStream,
    GrowStream,
    Log,
    declare,
)
from penstock import open as open_log
from penstock.errors import ObjectExistsError, UnknownObjectError
from penstock.failpoints import ENVIRONMENT
from penstock.log.declaring.objects import Change, ObjectChanged
from penstock.log.kafka import applier, objects
from penstock.log.kafka.log import KafkaLog
from penstock.log.kafka.topics import Topics as Removals
from penstock.testing.brokers import Brokers
from penstock.testing.contract import Order, commit_as, create, make_part, orders
from tests.fault.test_kills import wait_until_stopped

APPLY = """
import sys, msgspec, penstock
from penstock.log.declaring.objects import Change
changes = msgspec.json.decode(sys.argv[2], type=list[Change])
with penstock.open(sys.argv[1], upkeep_interval_ms=0) as log:
    log.apply(changes)
"""
COMMIT = """
import sys, penstock
from penstock.testing.contract import Order
with penstock.open(sys.argv[1], upkeep_interval_ms=0) as log:
    with penstock.Transaction(log, "slow") as tx:
        tx.send("s", Order("ada", 7))
"""
#: every step of a change that makes, grows, alters and removes topics, in order
STEPS = {
    "made": "objects.changed=kill@1",
    "grown": "objects.changed=kill@2",
    "committed": "objects.event=kill",
    "configured": "objects.changed=kill@3",
    "removed": "objects.changed=kill@4",
    "removed both": "objects.changed=kill@5",
}


def start(script: str, *arguments: str, failpoint: str = "") -> subprocess.Popen[bytes]:
    environment = {**os.environ, ENVIRONMENT: failpoint}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment)


def applying(url: str, changes: Sequence[Change], failpoint: str) -> subprocess.Popen[bytes]:
    return start(APPLY, url, msgspec.json.encode(changes).decode(), failpoint=failpoint)


def amounts(log: Log, stream: str) -> list[int]:
    return [event.data.amount for event in orders(log, stream)]


class Topics:
    """The topics of one log, as another client sees them."""

    def __init__(self, brokers: Brokers, url: str) -> None:
        self.admin = AdminClient({"bootstrap.servers": brokers.addresses[0]})
        self.prefix = url.rpartition("/")[2]

    def partitions(self) -> dict[str, int]:
        found = self.admin.list_topics(timeout=30).topics
        return {
            name.removeprefix(f"{self.prefix}.default."): len(topic.partitions)
            for name, topic in found.items()
            if name.startswith(f"{self.prefix}.default.")
        }

    def setting(self, stream: str, name: str) -> str:
        topic = ConfigResource(ConfigResource.Type.TOPIC, f"{self.prefix}.default.{stream}")
        return str(self.admin.describe_configs([topic])[topic].result(30)[name].value)


@pytest.fixture
def topics(broker: Brokers, url: str) -> Topics:
    return Topics(broker, url)


@pytest.mark.parametrize("step", STEPS)
def test_a_change_killed_at_any_step_happened_or_did_not(
    kafka: Log, url: str, topics: Topics, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("again", "gone", "grown", "altered"):
        create(kafka, name)
    holder = kafka.hold("p")
    for number, name in enumerate(("again", "gone", "grown", "altered")):
        commit_as(kafka, holder, number, name, [1, 2])
    before = {name: kafka.stream(name) for name in ("again", "grown", "altered")}
    day_ms = 24 * 3600 * 1000
    changes: list[Change] = [
        DropStream("again"),
        CreateStream(declare("again", Order, key="user", partitions=2)),
        DropStream("gone"),
        CreateStream(declare("new", Order, key="user")),
        GrowStream("grown", 3),
        AlterStream(declare("altered", Order, key="user", retention_ms=day_ms)),
    ]
    assert applying(url, changes, STEPS[step]).wait(60) == -signal.SIGKILL
    kafka.stream("again")  # as everybody does, within the time that a look may be old
    with open_log(url, upkeep_interval_ms=0) as other:
        day = str(day_ms)
        happened = other.stream("again").id != before["again"].id
        assert happened == (step not in ("made", "grown"))
        assert (other.stream("grown").partitions == 3) == happened
        assert (other.stream("altered").spec.retention_ms == day_ms) == happened
        assert ("new" in [str(stream.name) for stream in other.streams()]) == happened
        assert amounts(other, "again") == ([] if happened else [1, 2])
        assert (topics.setting("altered", "retention.ms") == day) == happened
        # Whoever writes now is not undone by whoever comes next.
        commit_as(other, other.hold("q"), 0, "again", [5])
        other.apply([CreateNamespace("any")])
        assert amounts(other, "again") == ([5] if happened else [1, 2, 5])
        assert amounts(other, "grown") == amounts(other, "altered") == [1, 2]
        if not happened:
            other.apply(changes)
            assert amounts(other, "again") == []
        with pytest.raises(UnknownObjectError):
            other.stream("gone")
        assert topics.setting("altered", "retention.ms") == day
        monkeypatch.setattr(applier, "LEFT_ALONE_US", 0)
        other.maintain()
        assert sorted(topics.partitions().values()) == [1, 1, 2, 3], "what is gone is removed"


def test_what_is_committed_while_a_stream_is_made_anew_stays(kafka: Log, url: str) -> None:
    """The process that changes it is frozen after its change has happened."""
    create(kafka, "s")
    commit_as(kafka, kafka.hold("p"), 0, "s", [1, 2])
    changes: list[Change] = [DropStream("s"), CreateStream(kafka.stream("s").spec)]
    frozen = applying(url, changes, "objects.event=stop")
    wait_until_stopped(frozen.pid)
    with open_log(url, upkeep_interval_ms=0) as other:
        assert amounts(other, "s") == []
        commit_as(other, other.hold("q"), 0, "s", [5])
        os.kill(frozen.pid, signal.SIGCONT)
        assert frozen.wait(60) == 0
        assert amounts(other, "s") == [5]


def test_a_commit_knows_the_stream_as_it_is(
    kafka: Log, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last look at the catalogue is not old enough for another one.

    What goes to other streams is undone with the rest, and sent again.
    """
    for name in ("other", "s"):
        create(kafka, name)
    holder = kafka.hold("p")
    commit_as(kafka, holder, 0, "s", [1])
    parts = [make_part(kafka, name, [5]) for name in ("other", "s")]
    with open_log(url, upkeep_interval_ms=0) as other:
        monkeypatch.setattr(objects, "FRESH_S", 3600.0)
        kafka.streams()
        other.apply([DropStream("s"), CreateStream(other.stream("s").spec)])
        kafka.commit(holder, 1, Commit(parts=parts))
        assert amounts(other, "s") == amounts(kafka, "s") == amounts(kafka, "other") == [5]


@pytest.mark.parametrize("step", ["commit.begun", "commit.blobs", "commit.index"])
def test_a_commit_under_way_goes_where_the_stream_is(kafka: Log, url: str, step: str) -> None:
    """Its messages were on their way to the topic of the one that was dropped."""
    create(kafka, "s")
    commit_as(kafka, kafka.hold("p"), 0, "s", [1, 2])
    slow = start(COMMIT, url, failpoint=f"{step}=stop")
    wait_until_stopped(slow.pid)
    kafka.apply([DropStream("s"), CreateStream(kafka.stream("s").spec)])
    os.kill(slow.pid, signal.SIGCONT)
    assert slow.wait(60) == 0
    assert amounts(kafka, "s") == [7]


def test_a_stream_is_in_the_topic_of_its_name_wherever_that_is_free(
    kafka: Log, topics: Topics
) -> None:
    create(kafka, "s")
    assert list(topics.partitions()) == ["s"]
    kafka.apply([DropStream("s")])
    create(kafka, "s")
    assert list(topics.partitions()) == ["s"]
    kafka.apply([DropStream("s"), CreateStream(kafka.stream("s").spec)])
    assert list(topics.partitions()) == [f"s._{kafka.stream('s').id}"]
    kafka.apply([DropStream("s"), CreateStream(kafka.stream("s").spec)])
    assert list(topics.partitions()) == ["s"]


def test_a_process_that_wakes_up_while_it_removes_a_topic_removes_nobody_elses(
    kafka: Log, url: str, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka removes topics by name: so the name is not given to another stream."""
    create(kafka, "s")
    frozen = applying(url, [DropStream("s")], "objects.event=stop")
    wait_until_stopped(frozen.pid)
    monkeypatch.setattr(applier, "LEFT_ALONE_US", 0)
    kafka.apply([CreateNamespace("any")])
    assert list(topics.partitions()) == []
    create(kafka, "s")
    commit_as(kafka, kafka.hold("p"), 0, "s", [5])
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert list(topics.partitions()) == [f"s._{kafka.stream('s').id}"]
    assert amounts(kafka, "s") == [5]


def test_a_process_that_wakes_up_while_it_alters_a_topic_leaves_it_as_it_is_now(
    kafka: Log, url: str, topics: Topics
) -> None:
    create(kafka, "s")
    old, new = (declare("s", Order, key="user", retention_ms=hours) for hours in (10**7, 10**8))
    frozen = applying(url, [AlterStream(old)], "objects.event=stop")
    wait_until_stopped(frozen.pid)
    kafka.apply([AlterStream(new)])
    assert topics.setting("s", "retention.ms") == str(10**8)
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert topics.setting("s", "retention.ms") == str(10**8)


def test_messages_in_partitions_that_nobody_told_of_are_read(
    kafka: Log, broker: Brokers, url: str, topics: Topics
) -> None:
    """A process died that let the topic grow, and another client writes there."""
    create(kafka, "s", partitions=1)
    growing = applying(url, [GrowStream("s", 3)], "objects.changed=kill@1")
    assert growing.wait(60) == -signal.SIGKILL
    assert topics.partitions() == {"s": 3}
    kafka.maintain()
    assert kafka.stream("s").partitions == 1, "a growth that did not happen"
    other = Other({"bootstrap.servers": broker.addresses[0]})
    other.produce(f"{topics.prefix}.default.s", b'{"user": "u", "amount": 4}', partition=2)
    other.flush(30)
    kafka.maintain()
    assert kafka.stream("s").grown == (1, 3)
    assert amounts(kafka, "s") == [4]


def test_a_topic_of_somebody_else_is_not_made_anew(
    kafka: KafkaLog, broker: Brokers, topics: Topics
) -> None:
    topic = f"{topics.prefix}.default.theirs"
    topics.admin.create_topics([NewTopic(topic, 1)])[topic].result(30)
    deadline = time.monotonic() + 30
    while "theirs" not in topics.partitions():
        assert time.monotonic() < deadline
    kafka.adopt(declare("theirs", Order, key="user"))
    commit_as(kafka, kafka.hold("p"), 0, "theirs", [1])
    before = kafka.stream("theirs")
    with pytest.raises(ObjectExistsError, match="contains messages"):
        kafka.apply([DropStream("theirs"), CreateStream(declare("theirs", Order, key="user"))])
    assert kafka.stream("theirs") == before
    assert amounts(kafka, "theirs") == [1]


def test_what_an_older_version_left_to_be_removed_is_kept_where_a_stream_needs_it(
    kafka: KafkaLog, topics: Topics
) -> None:
    """It made streams anew in topics of the same name."""
    create(kafka, "s")
    commit_as(kafka, kafka.hold("p"), 0, "s", [1])
    topic = kafka.health().partitions[-1].topic
    assert topic.endswith(".default.s")

    def note(draft: objects.Draft) -> list[ObjectChanged]:
        draft._write(f"dropped/{topic}", next(iter(Removals(kafka._cluster).ids([topic]).values())))
        return []

    kafka._applier.change(note)
    kafka.apply([CreateNamespace("any")])
    assert amounts(kafka, "s") == [1]
    kafka.apply([DropStream("s")])
    assert list(topics.partitions()) == []


def test_what_another_has_made_meanwhile_is_not_taken_for_a_strangers(
    kafka: KafkaLog, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stream of a name would be in the topic where theirs is, with events already."""
    create(kafka, "s")
    commit_as(kafka, kafka.hold("p"), 0, "s", [1])
    changes: list[Change] = [DropStream("s"), CreateStream(kafka.stream("s").spec)]
    look = kafka._cluster.topics
    with open_log(url, upkeep_interval_ms=0) as other:

        def look_late() -> dict[str, int]:
            if amounts(other, "s") != [2]:
                other.apply(changes)
                commit_as(other, other.hold("q"), 0, "s", [2])
            return look()

        monkeypatch.setattr(kafka._cluster, "topics", look_late)
        kafka.apply(changes)
        monkeypatch.undo()
        assert amounts(other, "s") == amounts(kafka, "s") == []


def test_two_processes_make_a_stream_anew_while_a_third_writes(kafka: Log, url: str) -> None:
    """What is there in the end is what was committed last, without a gap."""
    create(kafka, "s")
    acked: list[int] = []
    stop = threading.Event()

    def write() -> None:
        holder = kafka.hold("p")
        while not stop.is_set():
            number = len(acked)
            commit_as(kafka, holder, number, "s", [number])
            acked.append(number)

    def remake() -> None:
        with open_log(url, upkeep_interval_ms=0) as other:
            for _ in range(4):
                other.apply([DropStream("s"), CreateStream(other.stream("s").spec)])

    with ThreadPoolExecutor(3) as threads:
        writing = threads.submit(write)
        for done in [threads.submit(remake) for _ in range(2)]:
            done.result(120)
        before = len(acked)
        while len(acked) < before + 3:
            assert not writing.done() or writing.result(0) is None
        stop.set()
        writing.result(60)
    found = amounts(kafka, "s")
    assert len(found) >= 3
    assert found == acked[-len(found) :]
