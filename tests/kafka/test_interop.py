"""Other programs on the same topics: what we write they read, and what they write we read."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import subprocess
from decimal import Decimal

import msgspec
import pytest

from penstock import (
    CreateStream,
    DropStream,
    Log,
    Producer,
    ReadOptions,
    Record,
    Table,
    declare,
    read_events,
)
from penstock.cli.main import main
from penstock.errors import DamagedError, ObjectExistsError, UnknownObjectError, UsageError
from penstock.log.kafka.log import KafkaLog
from penstock.records.cloudevents import from_binary
from penstock.testing.brokers import Brokers

AT = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)


class Order(Record):
    user: str
    amount: int
    price: Decimal
    at: dt.datetime
    note: str | None = None


@pytest.fixture
def kcat() -> str:
    """A Kafka client that is not ours: Debian's package of this name."""
    found = shutil.which("kcat")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("there is no kcat: apt-get install kcat")
        pytest.skip("NO KCAT, OTHER CLIENTS ARE NOT TESTED: apt-get install kcat")
    return found


class Client:
    """kcat on one topic."""

    def __init__(self, program: str, brokers: Brokers, topic: str) -> None:
        self._command = [program, "-b", brokers.addresses[0], "-t", topic]

    def write(self, *lines: str, headers: dict[str, str] | None = None, keys: bool = False) -> None:
        given = [
            part for name, value in (headers or {}).items() for part in ("-H", f"{name}={value}")
        ]
        command = [*self._command, "-P", *given, *(["-K", "|"] if keys else [])]
        subprocess.run(command, input="\n".join(lines), text=True, timeout=60, check=True)

    def delete(self, key: str) -> None:
        """Write a message without a value."""
        command = [*self._command, "-P", "-K", "|", "-Z"]
        subprocess.run(command, input=f"{key}|", text=True, timeout=60, check=True)

    def read(self) -> list[dict[str, object]]:
        """Messages as kcat tells them in JSON."""
        command = [*self._command, "-C", "-e", "-q", "-J", "-X", "isolation.level=read_committed"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def prefix(url: str) -> str:
    return url.rpartition("/")[2]


@pytest.mark.row("H12", engine="kafka")
def test_another_client_reads_what_we_write(
    kafka: Log, broker: Brokers, kcat: str, prefix: str
) -> None:
    kafka.apply([CreateStream(declare("orders", Order, key="user", partitions=2))])
    with Producer(kafka) as producer:
        sent = Order("ada", 3, Decimal("1.50"), AT)
        producer.send("orders", sent, type="order.placed", id="one", time=AT,
                      headers={"traceparent": "00-abc"})  # fmt: skip
    (message,) = Client(kcat, broker, f"{prefix}.default.orders").read()
    assert message["key"] == "ada"
    flat = message["headers"]
    assert isinstance(flat, list)
    headers = dict(zip(flat[::2], flat[1::2], strict=True))
    assert headers.pop("content-type") == "application/json"
    attributes = {name.removeprefix("ce_"): value for name, value in headers.items()}
    assert all(name.startswith("ce_") for name in headers)
    event = from_binary(attributes, str(message["payload"]).encode())
    assert (event.id, event.type, event.time) == ("one", "order.placed", AT)
    assert event.headers == {"traceparent": "00-abc"}
    assert event.data == {
        "user": "ada", "amount": 3, "price": "1.500000000000000000",
        "at": "2026-01-02T03:04:05.000006Z", "note": None,
    }  # fmt: skip


@pytest.mark.row("H12", engine="kafka")
def test_we_read_what_another_client_writes(
    kafka: Log, broker: Brokers, kcat: str, prefix: str
) -> None:
    kafka.apply([CreateStream(declare("orders", Order, key="user"))])
    client = Client(kcat, broker, f"{prefix}.default.orders")
    document = {"user": "bob", "amount": 1, "price": "2", "at": "2026-01-02T03:04:05.000006Z"}
    client.write(f"bob|{json.dumps({**document, 'unknown': 1})}", keys=True)
    attributes = {"ce_specversion": "1.0", "ce_id": "x1", "ce_source": "/kcat", "ce_type": "t",
                  "ce_time": "2020-02-02T00:00:00Z", "ce_region": "eu"}  # fmt: skip
    client.write(json.dumps(document), headers=attributes)
    plain, whole = read_events(kafka, "orders", Order)
    assert plain.data == whole.data == Order("bob", 1, Decimal(2), AT)
    assert (plain.key, plain.type, plain.source) == (b"bob", "Order", "orders")
    assert plain.id != ""
    assert (whole.id, whole.source, whole.type) == ("x1", "/kcat", "t")
    assert whole.time == dt.datetime(2020, 2, 2, tzinfo=dt.UTC)
    assert whole.headers == {"region": "eu"}


def test_a_time_that_is_none_in_utc_counts_as_not_said(
    kafka: Log, broker: Brokers, kcat: str, prefix: str
) -> None:
    kafka.apply([CreateStream(declare("notes"))])
    client = Client(kcat, broker, f"{prefix}.default.notes")
    for time in ("9999-12-31T23:59:59-05:00", "no time", "2020-02-02T00:00:00Z"):
        client.write("{}", headers={"ce_time": time})
    late, wrong, good = [event.time.year for event in read_events(kafka, "notes")]
    assert late == wrong == dt.datetime.now(dt.UTC).year
    assert good == 2020


@pytest.mark.parametrize("typed", [True, False])
def test_a_topic_of_somebody_else_is_adopted(
    kafka: Log, broker: Brokers, kcat: str, prefix: str, typed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"{prefix}.default.theirs"
    admin = AdminClient({"bootstrap.servers": broker.addresses[0]})
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(30)
    client = Client(kcat, broker, topic)
    lines = [json.dumps({"user": f"u{n}", "amount": n}) for n in range(30)]
    client.write(*lines)

    class Small(Record):
        user: str
        amount: int

    with pytest.raises(ObjectExistsError, match="contains messages"):
        kafka.apply([CreateStream(declare("theirs", Small, partitions=3))])
    with pytest.raises(ObjectExistsError, match="with 3 partitions instead of 2"):
        kafka.apply([CreateStream(declare("theirs", Small, partitions=2))])
    assert isinstance(kafka, KafkaLog)
    with pytest.raises(UsageError, match="has 3 partitions, not 2"):
        kafka.adopt(declare("theirs", Small, partitions=2))
    with pytest.raises(UnknownObjectError, match="no topic"):
        kafka.adopt(declare("nobodys"))
    fields = ["-F", "user=str", "-F", "amount=int"] if typed else []
    assert main(["stream", "adopt", "theirs", "--key", "user", "--log", kafka.url, *fields]) == 0
    assert capsys.readouterr().out == "adopted stream theirs with 3 partitions\n"
    assert kafka.stream("theirs").partitions == 3
    assert len(list(read_events(kafka, "theirs"))) == 30
    with Producer(kafka) as producer:
        producer.send("theirs", {"user": "me", "amount": 99})
    client.write(json.dumps({"user": "late", "amount": 100}))
    found = [msgspec.to_builtins(event.data) for event in read_events(kafka, "theirs")]
    amounts = sorted(data["amount"] for data in found)
    assert amounts == [*range(30), 99, 100]
    assert len(client.read()) == 32
    kafka.apply([DropStream("theirs")])
    with pytest.raises(UnknownObjectError):
        kafka.stream("theirs")
    assert len(client.read()) == 32, "a topic of somebody else is let go of, not removed"


@pytest.mark.parametrize("bad", ["no json", '{"user": 1}', "[]", '{"user": "a"}', "{}"])
def test_a_message_that_is_no_record_is_named_and_the_others_are_kept(
    kafka: Log, broker: Brokers, kcat: str, prefix: str, bad: str
) -> None:
    kafka.apply([CreateStream(declare("orders", Order, key="user"))])
    client = Client(kcat, broker, f"{prefix}.default.orders")
    good = [
        json.dumps({"user": "a", "amount": n, "price": "1", "at": "2026-01-01T00:00:00Z"})
        for n in range(5)
    ]
    client.write(*good[:2], bad, *good[2:4], bad, good[4])
    with pytest.raises(DamagedError, match="offset 2 is not a valid Order") as raised:
        list(read_events(kafka, "orders", Order))
    assert (raised.value.first_offset, raised.value.last_offset) == (2, 2)
    told: list[DamagedError] = []
    options = ReadOptions(on_damage=told.append)
    amounts = [event.data.amount for event in read_events(kafka, "orders", Order, options)]
    assert amounts == [0, 1, 2, 3, 4]
    assert [damage.first_offset for damage in told] == [2, 5]
    assert [damage.first_offset for damage in kafka.verify()] == [2, 5]


def test_a_table_takes_deletions_of_another_client(
    kafka: Log, broker: Brokers, kcat: str, prefix: str
) -> None:
    kafka.apply([CreateStream(declare("people", Order, key="user", table=True))])
    with Producer(kafka) as producer:
        for name in ("ada", "bob"):
            producer.send("people", Order(name, 1, Decimal(1), AT))
    client = Client(kcat, broker, f"{prefix}.default.people")
    client.delete("ada")
    assert [key for key, _ in Table(kafka, "people", Order).items()] == [b"bob"]
