"""Kafka compacts the changelogs of tables, and what is left still tells every entry."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from penstock import App, CreateStream, Log, Table
from penstock import open as open_log
from penstock.app.declaring.tables import AppTable
from penstock.app.tasks.state import State
from penstock.log.api import Commit
from penstock.log.kafka import elements
from penstock.log.reading.read import ReadOptions, read_batches, span_of
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.compose import Composer
from penstock.testing.brokers import Brokers
from penstock.testing.processes import wait_until

KEYS = [b"ada", b"bob", b'a\0"x"', b"a"]
ELEMENTS = ["x", "y", "z", "\0", "é", '"', ""]
STEPS = 30
FEW_STEPS = 2
ADDED_MAX = 20
SEGMENT_S = 0.5


@pytest.mark.row("F11", engine="kafka")
@pytest.mark.parametrize("kind", [set[str], list[str]])
def test_what_compaction_leaves_is_the_table(
    kafka: Log, broker: Brokers, url: str, tmp_path: Path, chance: random.Random, kind: Any
) -> None:
    table: AppTable[Any] = App("any").table("members", value=kind)
    assert table.spec is not None
    kafka.apply([CreateStream(table.spec)])
    topic = f"{url.rpartition('/')[2]}.default.members"
    compact_soon(broker, topic)
    model = walk(kafka, table, chance, {}, STEPS)
    written = stored(broker, topic)
    assert len(set(written.values())) < len(written)
    threading.Event().wait(2 * SEGMENT_S)
    model = walk(kafka, table, chance, model, FEW_STEPS)  # in a segment of its own

    def is_compacted() -> bool:
        found = stored(broker, topic)
        repeated = len(found) - len(set(found.values()))
        return not written.keys() <= found.keys() and repeated <= FEW_STEPS * 2 * ADDED_MAX

    wait_until(is_compacted, 60, "compaction")
    assert read_anew(url, tmp_path / "first") == model
    left = read_last(kafka, len(stored(broker, topic)) + 1)
    for last in (1, 5, len(left) - 1):
        assert read_last(kafka, last) == left[-last:]

    model = walk(kafka, table, chance, model, STEPS)
    assert read_anew(url, tmp_path / "second") == model
    assert {key: value for key, value in Table[Any](kafka, "members").items() if value} == model


def walk(
    log: Log, table: AppTable[Any], chance: random.Random, model: dict[bytes, Any], steps: int
) -> dict[bytes, Any]:
    """Change entries at random, each step a commit; what they are then."""
    composer = Composer("walk", log.limits)
    held = dict(model)
    holder = log.hold("walk")
    for sequence in itertools.islice(itertools.count(next_sequence(log, "walk")), steps):
        state = State(log, table)
        for key in chance.sample(KEYS, 2):
            entry = state.entry(key)
            if (after := changed(entry.value, chance)) is None:
                entry.delete()
                held.pop(key, None)
            else:
                entry.value = held[key] = after
        part = state.part(composer)
        log.commit(holder, sequence, Commit(parts=[] if part is None else [part]))
    # An empty collection is one that nobody has touched.
    return {key: value for key, value in held.items() if value}


def changed(value: Any, chance: random.Random) -> Any:
    """What a collection is next: longer, shorter, or gone."""
    if chance.random() < 0.02:
        return None
    if isinstance(value, set):
        return value ^ set(chance.sample(ELEMENTS, chance.randrange(1, len(ELEMENTS))))
    if chance.random() < 0.2:
        return value[: chance.randrange(10)]
    return value + chance.choices(ELEMENTS, k=chance.randrange(1, ADDED_MAX + 1))


def read_anew(url: str, cache: Path) -> dict[bytes, Any]:
    """The table as whoever never saw it before finds it."""
    with open_log(url, cache=str(cache), upkeep_interval_ms=0) as log:
        return {key: value for key, value in Table[Any](log, "members").items() if value}


def read_last(log: Log, last: int) -> list[tuple[int, int]]:
    """Where the last events are, as `read --last` finds them."""
    span = span_of(log, "members", ReadOptions(partitions=[0]), last=last)
    batches = read_batches(log, "members", ReadOptions(partitions=[0]), span)
    return [(0, offset) for batch in batches for offset in batch.offsets().to_pylist()]


def compact_soon(broker: Brokers, topic: str) -> None:
    wanted = {
        "min.compaction.lag.ms": "0", "delete.retention.ms": "0",
        "segment.ms": f"{SEGMENT_S * 1000:.0f}", "min.cleanable.dirty.ratio": "0.01",
    }  # fmt: skip
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in wanted.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": broker.addresses[0]})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)


def stored(broker: Brokers, topic: str) -> dict[tuple[int, int], tuple[int, bytes]]:
    """By place, what compaction goes by: the partition and key of every message."""
    settings = {
        "bootstrap.servers": broker.addresses[0],
        "group.id": "-",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings)
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        found: dict[tuple[int, int], tuple[int, bytes]] = {}
        ended = 0
        while ended < len(partitions):
            for message in consumer.consume(1000, 0.2):
                if message.error() is not None:
                    ended += 1
                else:
                    partition = message.partition() or 0
                    found[partition, message.offset() or 0] = (partition, message.key() or b"")
        return found
    finally:
        consumer.close()


@pytest.mark.parametrize("key", KEYS)
def test_a_removal_has_no_value_and_comes_back_as_it_was(kafka: Log, key: bytes) -> None:
    table: AppTable[Any] = App("any").table("members", value=set[str])
    assert table.spec is not None
    kafka.apply([CreateStream(table.spec)])
    stream = kafka.stream("members")
    told = [b'{"action":"%s","value":"\\u0000x","values":null}' % a for a in (b"add", b"remove")]
    whole = b'{"action":"delete","value":null,"values":null}'
    keys, values = elements.to_messages(stream, [key] * 3, [*told, whole])
    assert keys[0] == keys[1] != keys[2]
    assert values == [told[0], None, whole]
    found = [elements.document(*message) for message in zip(keys, values, strict=True)]
    assert found[1] == b'{"action":"remove","value":"\\u0000x"}'
    assert [elements.event_key(message) for message in keys] == [key] * 3
