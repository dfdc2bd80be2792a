"""The producer: batching, memory, retries, timeouts, and closing without loss."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.errors import (
    BufferFullError,
    ClosedError,
    CommitOutcomeUnknownError,
    DeliveryTimeoutError,
    FencedError,
    LogError,
    RecordError,
    UsageError,
)
from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.batch import decode_blob
from penstock.log.metrics import MetricWriter
from penstock.log.reading.read import read_batches
from penstock.log.sqlite.connection import connect
from penstock.producer import Place, Producer, ProducerOptions
from penstock.testing.contract import Order, create, orders
from penstock.testing.faults import Fault, FaultyVfs, faulty_disk

pytestmark = pytest.mark.row("H14", engine="embedded")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    with open_log(path, upkeep_interval_ms=0) as opened:
        create(opened, "s")
        yield opened


def commits(log: Log) -> int:
    return len({run.commit for batch in read_batches(log, "s") for run in batch.runs})


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Another process's open write transaction, for the length of a block."""
    with contextlib.closing(connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_closing_loses_nothing(log: Log) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=60_000)) as producer:
        futures = [producer.send("s", Order("a", n)) for n in range(1000)]
    assert all(future.done() for future in futures)
    assert [e.data.amount for e in orders(log, "s")] == list(range(1000))


def test_the_batch_delay_gathers_events(log: Log) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=300)) as producer:
        for n in range(20):
            producer.send("s", Order("a", n))
            time.sleep(0.001)
    assert commits(log) == 1


def test_a_full_batch_does_not_wait_for_the_delay(log: Log) -> None:
    options = ProducerOptions(batch_delay_ms=60_000, batch_rows_max=10)
    with Producer(log, options) as producer:
        futures = [producer.send("s", Order("a", n)) for n in range(20)]
        for future in futures[:10]:
            future.result(timeout=20)
    assert commits(log) >= 2
    by_size = ProducerOptions(batch_delay_ms=60_000, batch_bytes_max=500)
    with Producer(log, by_size) as producer:
        futures = [producer.send("s", Order("x" * 100, n)) for n in range(20)]
        futures[0].result(timeout=20)


def test_flush_waits_for_what_was_sent(log: Log) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=60_000)) as producer:
        futures = [producer.send("s", Order("a", n)) for n in range(5)]
        producer.flush()
        assert all(future.done() for future in futures)
        producer.flush()


def fill(producer: Producer) -> None:
    for n in range(100):
        producer.send("s", Order("x" * 100, n))


def test_a_full_buffer_raises(log: Log, path: Path) -> None:
    options = ProducerOptions(buffer_bytes_max=2000, batch_rows_max=1, on_full="error")
    with Producer(log, options) as producer, held(path):
        with pytest.raises(BufferFullError, match="buffer_bytes_max"):
            fill(producer)


def test_a_full_buffer_blocks_until_there_is_room(log: Log, path: Path) -> None:
    options = ProducerOptions(buffer_bytes_max=2000, batch_rows_max=1)
    with Producer(log, options) as producer:
        thread = threading.Thread(target=fill, args=(producer,))
        with held(path):
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(60)
        assert not thread.is_alive()
    assert sum(1 for _ in orders(log, "s")) == 100


def test_blocking_ends_after_its_limit(log: Log, path: Path) -> None:
    options = ProducerOptions(buffer_bytes_max=500, batch_rows_max=1, block_ms_max=50)
    with Producer(log, options) as producer, held(path):
        with pytest.raises(BufferFullError, match="block_ms_max"):
            fill(producer)


@pytest.fixture
def disk() -> Iterator[FaultyVfs]:
    with faulty_disk() as vfs:
        yield vfs


def test_failures_are_retried_until_they_pass(disk: FaultyVfs, path: Path) -> None:
    with open_log(path, vfs="faulty", upkeep_interval_ms=0) as log:
        create(log, "s")
        with Producer(log) as producer:
            disk.faults = [
                Fault("sync", "io", at=1), Fault("write", "full", at=3), Fault("sync", "io", at=3),
            ]  # fmt: skip
            futures = []
            for n in range(10):
                futures.append(producer.send("s", Order("a", n)))
                producer.flush()
            assert [future.result().offset for future in futures] == list(range(10))
        assert [e.data.amount for e in orders(log, "s")] == list(range(10))


def test_the_delivery_timeout_says_whether_it_may_have_happened(
    disk: FaultyVfs, path: Path
) -> None:
    options = ProducerOptions(delivery_timeout_ms=200, request_timeout_ms=100, retry_backoff_ms=1)
    with open_log(path, vfs="faulty", upkeep_interval_ms=0) as log:
        create(log, "s")
        with Producer(log, options) as producer:
            disk.faults = [Fault("write", "full", lasting=True)]
            with pytest.raises(DeliveryTimeoutError, match="delivery_timeout_ms"):
                producer.send("s", Order("a", 1)).result()
            disk.faults = [Fault("sync", "io", lasting=True)]
            with pytest.raises(CommitOutcomeUnknownError, match="may or may not"):
                producer.send("s", Order("a", 2)).result()
            disk.faults = []
            producer.send("s", Order("a", 3)).result()
        amounts = [e.data.amount for e in orders(log, "s")]
        assert 3 in amounts
        assert 1 not in amounts


def test_retries_are_limited(disk: FaultyVfs, path: Path) -> None:
    with open_log(path, vfs="faulty", upkeep_interval_ms=0) as log:
        create(log, "s")
        with Producer(log, ProducerOptions(retries=2, retry_backoff_ms=1)) as producer:
            fault = Fault("write", "full", lasting=True)
            disk.faults = [fault]
            with pytest.raises(DeliveryTimeoutError):
                producer.send("s", Order("a", 1)).result()
            assert fault.seen == 3


def test_a_fenced_producer_says_so_from_then_on(log: Log) -> None:
    with Producer(log, ProducerOptions(name="shop")) as old:
        old.send("s", Order("a", 1)).result()
        with Producer(log, ProducerOptions(name="shop")) as new:
            new.send("s", Order("a", 2)).result()
            with pytest.raises(FencedError, match="shop"):
                old.send("s", Order("a", 3)).result()
            with pytest.raises(FencedError):
                old.send("s", Order("a", 4))
            new.send("s", Order("a", 5)).result()
    assert [e.data.amount for e in orders(log, "s")] == [1, 2, 5]


def test_a_closed_producer_refuses(log: Log) -> None:
    producer = Producer(log)
    with pytest.raises(ClosedError):
        producer.send("s", Order("a", 1))
    with producer:
        pass
    producer.close()
    with pytest.raises(ClosedError):
        producer.send("s", Order("a", 1))


def test_many_threads_share_commits(log: Log) -> None:
    def work(number: int) -> None:
        for n in range(20):
            producer.send("s", Order(f"u{number}", n)).result()

    with Producer(log) as producer:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(1 for _ in orders(log, "s")) == 640
    assert commits(log) < 640 / 2
    for number in range(32):
        mine = [e.data.amount for e in orders(log, "s", key=f"u{number}")]
        assert mine == list(range(20))


def test_singles_and_columns_keep_their_order(log: Log) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=50)) as producer:
        for n in range(0, 40, 4):
            producer.send("s", Order("a", n))
            table = pa.table({"user": ["a", "a"], "amount": [n + 1, n + 2]})
            producer.append("s", table)
            producer.send("s", Order("a", n + 3))
    assert [e.data.amount for e in orders(log, "s")] == list(range(40))


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_compression_is_chosen(log: Log, path: Path, compression: str) -> None:
    table = pa.table({"user": ["a" * 50] * 5000, "amount": [1] * 5000})
    with Producer(log, ProducerOptions(compression=compression)) as producer:  # type: ignore[arg-type]
        producer.append("s", table).result()
    connection = connect(path)
    (largest,) = max(
        ((row[0],) for row in connection.execute("SELECT data FROM blobs")), key=lambda r: len(r[0])
    )
    connection.close()
    assert (len(largest) < 100_000) == (compression != "none")
    assert decode_blob(largest).num_rows == 5000
    assert sum(1 for _ in orders(log, "s")) == 5000


def test_an_event_without_fault_is_sent_beside_a_wrong_one(log: Log) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=100)) as producer:
        first = producer.send("s", Order("a", 1))
        with pytest.raises(RecordError):
            producer.send("s", Order("a", "x"))  # type: ignore[arg-type]
        second = producer.send("s", Order("a", 2))
        assert (first.result().offset, second.result().offset) == (0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "rar"},
        {"on_full": "explode"},
        {"batch_bytes_max": 0},
        {"batch_delay_ms": -1},
        {"request_timeout_ms": 10, "delivery_timeout_ms": 5},
    ],
)
def test_options_that_make_no_sense_are_refused(log: Log, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Producer(log, ProducerOptions(**options))  # type: ignore[arg-type]


def test_the_name_and_client_id_are_used(log: Log) -> None:
    with Producer(log, ProducerOptions(name="tx-1", client_id="till-7")) as producer:
        producer.send("s", Order("a", 1)).result()
    (event,) = orders(log, "s")
    assert event.source == "till-7"
    last = log.last_commit("tx-1")
    assert last is not None
    assert last.sequence == 0


def test_unknown_and_then_fenced_is_still_unknown(disk: FaultyVfs, path: Path) -> None:
    with open_log(path, vfs="faulty", upkeep_interval_ms=0) as log:
        create(log, "s")
        options = ProducerOptions(name="shop", retry_backoff_ms=300)
        with Producer(log, options) as producer:
            disk.faults = [Fault("sync", "io", late=True)]
            future = producer.send("s", Order("a", 1))
            while not disk.faults[0].seen:
                time.sleep(0.001)
            log.hold("shop")
            with pytest.raises(CommitOutcomeUnknownError, match="may"):
                future.result()
            with pytest.raises(FencedError):
                producer.send("s", Order("a", 2))


def test_a_producer_is_opened_once(log: Log) -> None:
    with Producer(log).open() as producer:
        for n in range(50):
            producer.send("s", Order("a", n))
    assert [e.data.amount for e in orders(log, "s")] == list(range(50))
    with pytest.raises(UsageError, match="open log"):
        Producer("penstock.db")  # type: ignore[arg-type]


def test_several_events_can_be_checked_before_one_is_sent(log: Log) -> None:
    with Producer(log) as producer:
        admitted = [producer.admit("s", Order("a", n)) for n in range(3)]
        assert list(orders(log, "s")) == []
        places = [producer.send_admitted(event).result() for event in admitted]
    assert [place.id for place in places] == [event.event.id for event in admitted]


def test_a_buffer_smaller_than_a_batch_does_not_wait_for_the_delay(log: Log) -> None:
    options = ProducerOptions(buffer_bytes_max=20_000, batch_delay_ms=30_000, block_ms_max=20_000)
    with Producer(log, options) as producer:
        for n in range(200):
            producer.send("s", Order("a", n))
    assert [e.data.amount for e in orders(log, "s")] == list(range(200))


def send_together(log: Log, count: int, fail_at: str | None = None) -> list[Future[Place]]:
    with Producer(log, ProducerOptions(batch_delay_ms=60_000)) as producer:
        if fail_at is not None:
            failpoints.arm(fail_at, "raise")
        return [producer.send("s", Order("a", n)) for n in range(count)]


def test_events_are_sent_once_although_upkeep_cannot_be_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "penstock-upkeep":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with open_log(path, upkeep_interval_ms=1_000) as log:
        create(log, "s")
        places = [future.result() for future in send_together(log, 4)]
        assert [place.offset for place in places] == [0, 1, 2, 3]
        assert [e.data.amount for e in orders(log, "s")] == [0, 1, 2, 3]
        assert "can't start new thread" in str(log.facts()["upkeep_error"])
        monkeypatch.undo()
        send_together(log, 1)
        assert log.facts()["upkeep_error"] is None


@pytest.mark.parametrize("point", ["commit.prepared", "commit.begun", "commit.committed"])
def test_an_error_that_nobody_knows_is_asked_again_under_the_same_name(
    log: Log, point: str
) -> None:
    places = [future.result() for future in send_together(log, 8, fail_at=point)]
    assert [place.offset for place in places] == list(range(8))
    assert [e.data.amount for e in orders(log, "s")] == list(range(8))
    assert commits(log) == 1


def test_an_error_that_nobody_knows_and_that_stays_is_an_unknown_outcome(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ProducerOptions(retries=3, retry_backoff_ms=1)
    with open_log(path, upkeep_interval_ms=0) as log:
        create(log, "s")
        with Producer(log, options) as producer:
            monkeypatch.setattr("penstock.log.sqlite.log.failpoint", fail_at("commit.prepared"))
            with pytest.raises(CommitOutcomeUnknownError, match="MemoryError"):
                producer.send("s", Order("a", 1)).result()
            monkeypatch.undo()
            producer.send("s", Order("a", 2)).result()
        assert [e.data.amount for e in orders(log, "s")] == [2]


def fail_at(point: str) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name == point:
            raise MemoryError("no memory")

    return fail


def test_a_failure_of_the_log_is_not_blamed_on_the_events(log: Log, path: Path) -> None:
    with contextlib.closing(connect(path)) as other:
        with Producer(log, ProducerOptions(batch_delay_ms=60_000)) as producer:
            futures = [producer.send("s", Order("a", n)) for n in range(1000)]
            other.execute("ALTER TABLE blobs RENAME TO elsewhere")
            producer.flush()
            found = {id(future.exception()) for future in futures}
            assert len(found) == 1, "one commit for all, and one error"
            assert isinstance(futures[0].exception(), LogError)
            other.execute("ALTER TABLE elsewhere RENAME TO blobs")
            later = producer.send("s", Order("a", 1000))
            producer.flush()
            assert later.result().offset == 0


def test_a_producer_without_a_name_that_was_forgotten_goes_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(log) as unnamed, Producer(log, ProducerOptions(name="shop")) as named:
        unnamed.send("s", Order("a", 1)).result()
        named.send("s", Order("a", 2)).result()
        monkeypatch.setattr("penstock.log.sqlite.upkeep.PRODUCER_KEPT_US", -3_600_000_000)
        assert log.maintain().producers_forgotten == 1
        unnamed.send("s", Order("a", 3)).result()
        named.send("s", Order("a", 4)).result()
    assert [e.data.amount for e in orders(log, "s")] == [1, 2, 3, 4]


def test_metrics_are_written_again_after_their_producer_was_forgotten(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricWriter(log, "listener", "listener/1")
    writer.write([], {"a": b"1"})
    monkeypatch.setattr("penstock.log.sqlite.upkeep.PRODUCER_KEPT_US", -3_600_000_000)
    log.maintain()
    with pytest.raises(FencedError, match="without use"):
        writer.write([], {"a": b"2"})
    writer.write([], {"a": b"3"})
    assert log.progress("a") == b"3"


def test_who_waits_for_room_hears_that_the_producer_is_closed(log: Log, path: Path) -> None:
    sent: list[Future[Place]] = []
    told: list[Exception] = []

    def send() -> None:
        try:
            while True:
                sent.append(producer.send("s", Order("a", 1)))
        except ClosedError as error:
            told.append(error)

    with Producer(log, ProducerOptions(buffer_bytes_max=2000, batch_rows_max=1)) as producer:
        sender, closer = threading.Thread(target=send), threading.Thread(target=producer.close)
        with held(path):
            sender.start()
            sender.join(0.2)
            assert sender.is_alive(), "it waits for room"
            before = len(sent)
            closer.start()
            sender.join(30)
            assert len(told) == 1
        closer.join(30)
    assert len(sent) == before
    assert sum(1 for _ in orders(log, "s")) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_producer_that_broke_down(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(log, ProducerOptions(batch_delay_ms=60_000, batch_rows_max=2)) as producer:
        monkeypatch.setattr(producer, "_deliver", lambda group: 1 / 0)
        futures = [producer.send("s", Order("a", n)) for n in range(2)]
        for future in futures:
            assert isinstance(future.exception(30), ClosedError)
        with pytest.raises(ClosedError, match="unexpected error"):
            producer.send("s", Order("a", 9))


def test_a_fenced_producer_tells_everybody_who_waits(log: Log, path: Path) -> None:
    with Producer(log, ProducerOptions(name="shop", batch_rows_max=1)) as producer:
        log.hold("shop")
        with held(path):
            futures = [producer.send("s", Order("a", n)) for n in range(5)]
        for future in futures:
            assert isinstance(future.exception(30), FencedError)
    assert list(orders(log, "s")) == []
