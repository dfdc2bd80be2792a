"""Stream descriptions: both halves of a stream from one class; the word count, with everything."""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock import App, DeadLetter, Record, SinkDescription, SourceDescription, read_events
from penstock.connect.addresses import ENVIRONMENT
from penstock.connect.clients.writer import SourceClient
from penstock.connect.hosts.registry import records
from penstock.errors import AppError, UsageError
from penstock.testing.apps import AppTest
from penstock.testing.brokers import Brokers
from penstock.testing.processes import RunnerProcess, wait_until
from penstock.testing.servers import RedisServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "words"


class Number(Record):
    n: int


class Numbers(SourceDescription[Number]):
    name = "numbers"
    record = Number
    settings = {"partitions": 2}  # noqa: RUF012  as a class says it


class Squares(SinkDescription[Number]):
    name = "squares"
    record = Number


class Lines(SourceDescription[str]):
    name = "lines"


@pytest.fixture(autouse=True)
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "ports"))


@pytest.mark.row("W8", engine="any")
def test_both_halves_meet(tmp_path: Path) -> None:
    """On ports that nobody chose."""
    app = App("squares")
    numbers = Numbers.from_arguments([]).in_app(app)
    squares = app.stream("squared", Number)

    @app.agent(numbers, to=squares)
    def square(number: Number) -> Iterator[Number]:
        yield Number(number.n**2)

    Squares.from_arguments([]).in_app(app, squares)
    with (
        Squares.from_arguments([]).in_script(tmp_path / "sink") as out,
        AppTest(app, tmp_path),
        Numbers.from_arguments([]).in_script() as into,
    ):
        for n in range(5):
            into.write(Number(n), partition=n % 2, sequence=n)
        into.flush()
        assert sorted(out.read(timeout=60).n for _ in range(5)) == [0, 1, 4, 9, 16]


class Pair(Record):
    word: str
    n: int


class Written(SourceDescription[Pair]):
    """Not JSON: what an older program writes."""

    name = "written"
    record = Pair

    def encode(self, message: Pair) -> bytes:
        return f"{message.word}={message.n}".encode()

    def decode(self, data: bytes) -> Pair:
        word, _, n = data.decode().partition("=")
        return Pair(word, int(n))


class Told(SinkDescription[Pair]):
    name = "told"
    record = Pair

    def encode(self, message: Pair) -> bytes:
        return f"{message.n} {message.word}".encode()

    def decode(self, data: bytes) -> Pair:
        n, _, word = data.decode().partition(" ")
        return Pair(word, int(n))


@pytest.mark.row("W8", engine="any")
def test_both_halves_of_a_description_write_as_it_says(tmp_path: Path) -> None:
    """The app's half decodes what the program's encodes, and the other way round; what cannot be
    decoded is damage.
    """
    app = App("pairs")
    pairs = Written.from_arguments([]).in_app(app, on_damage="dead-letter")
    Told.from_arguments([]).in_app(app, pairs)
    with (
        Told.from_arguments([]).in_script(tmp_path / "sink") as out,
        AppTest(app, tmp_path) as run,
        Written.from_arguments([]).in_script() as into,
        SourceClient("auto:written", "written.raw") as raw,
    ):
        for n, word in enumerate(["to", "be", "or not"]):
            into.write(Pair(word, n))
        raw.write(b"be=many")
        for client in (into, raw):
            client.flush()
        assert sorted(out.read(timeout=60).n for _ in range(3)) == [0, 1, 2]
        assert out.last is not None
        assert out.last.data.decode() in ("0 to", "1 be", "2 or not")
        assert sorted(run.events(pairs), key=lambda p: p.n)[2] == Pair("or not", 2)
        (letter,) = read_events(run.log, "written_dead", DeadLetter)
    assert letter.data.data == "be=many"
    assert "ValueError: invalid literal for int()" in letter.data.error


def test_what_cannot_be_encoded_fails_with_the_users_own_lines(tmp_path: Path) -> None:
    class Broken(SinkDescription[Number]):
        name = "broken"
        record = Number

        def encode(self, message: Number) -> bytes:
            return f"{1 // message.n}".encode()

    app = App("broken")
    numbers = app.stream("zeros", Number)
    Broken.from_arguments([]).in_app(app, numbers)
    with Broken.from_arguments([]).in_script(tmp_path / "sink"):
        with AppTest(app, tmp_path, tries_max=1) as run:
            run.send(numbers, Number(0))
            failure = str(run.until_failed())
    assert "ZeroDivisionError" in failure
    assert 'return f"{1 // message.n}".encode()' in failure


def test_a_decoder_needs_something_to_decode_to() -> None:
    class Odd(SourceDescription[str]):
        name = "odd"

        def decode(self, data: bytes) -> str:
            return data.decode()

    with pytest.raises(UsageError, match="odd overrides decode but has no record"):
        Odd().in_app(App("a"))


def test_what_connectors_do_wrong_is_seen_while_an_app_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("seen")
    numbers = app.stream("numbers", Number, on_damage="skip")
    app.listen(numbers, "auto:numbers")
    with AppTest(app, tmp_path) as run, SourceClient("auto:numbers", "numbers") as client:
        client.write(b"no number")
        client.write(b'{"n": 1}')
        client.flush()
        assert run.events(numbers) == [Number(1)]
        (record,) = records(run.log)
        assert (record.damaged, record.messages) == (1, 2)
        assert "of numbers: " in record.error
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "skipped" in line
    assert line.startswith("numbers_listener: connector ")


def test_arguments_are_shared() -> None:
    arguments = ["--squares", "10.0.0.1:7", "--numbers", "auto:x", "--numbers-cookie", "c", "file"]
    assert Squares.from_arguments(arguments).address == "10.0.0.1:7"
    numbers = Numbers.from_arguments(arguments)
    assert (numbers.address, numbers.cookie) == ("auto:x", "c")
    assert Numbers.from_arguments([]).address == "auto:numbers"
    with pytest.raises(UsageError, match="'nowhere' is not a valid address"):
        Numbers.from_arguments(["--numbers", "nowhere"])
    parser = argparse.ArgumentParser()
    Numbers.add_arguments(parser)
    assert "--numbers HOST:PORT" in parser.format_help()


def test_messages_without_a_record_are_bytes() -> None:
    lines = Lines()
    assert lines.encode("é") == "é".encode()
    app = App("a")
    stream = lines.in_app(app)
    assert stream.spec is not None
    assert stream.spec.content == "bytes"


def test_listening_for_anybody_needs_a_cookie() -> None:
    with pytest.raises(AppError, match=r"test_words.py:\d+: anyone who can reach 0.0.0.0:1 could"):
        Numbers("0.0.0.0:1").in_app(App("a"))
    Numbers("0.0.0.0:1", cookie="c").in_app(App("b"))


class Place:
    """The example in a folder: its app, and its scripts, to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        self._scripts: list[subprocess.Popen[bytes]] = []

    def app(self) -> RunnerProcess:
        arguments = ["--checkpoints", str(self.folder / "spark")]
        log = self.folder / "words.db"
        return RunnerProcess(EXAMPLE / "app.py", log, arguments=arguments, output=self.output)

    def start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(EXAMPLE / f"{script}.py"), *arguments]
        with self.output.open("ab") as out:
            made = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out)
        self._scripts.append(made)
        return made

    def stop(self) -> None:
        for script in self._scripts:
            script.kill()
            script.wait()
        self._scripts = []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    try:
        yield found
    finally:
        found.stop()


class Topics:
    """Topics of Kafka: texts in, counts out."""

    def __init__(self, broker: Brokers) -> None:
        self.servers = broker.addresses[0]
        self.texts, self.counts = (f"{n}-{secrets.token_hex(4)}" for n in ("texts", "counts"))
        admin = AdminClient({"bootstrap.servers": self.servers})
        new = [NewTopic(self.texts, 2, 1), NewTopic(self.counts, 1, 1)]
        for made in admin.create_topics(new).values():
            made.result(30)
        self._producer = Producer({"bootstrap.servers": self.servers})
        settings = {"group.id": f"g{self.counts}", "auto.offset.reset": "earliest"}
        self._settings = {"bootstrap.servers": self.servers, **settings}
        self.seen: list[tuple[str, int]] = []

    def send(self, text: str, times: int) -> Counter[str]:
        """Which words that were."""
        for _ in range(times):
            self._producer.produce(self.texts, text)
        assert self._producer.flush(30) == 0
        return Counter(text.split() * times)

    def latest(self) -> dict[str, int]:
        """What has been told, the last for each word."""
        while (message := self._consumer.poll(0.1)) is not None:
            if message.error() is None:
                self.seen.append(((message.key() or b"").decode(), int(message.value() or b"")))
        return dict(self.seen)

    def __enter__(self) -> Self:
        self._consumer = Consumer(self._settings)
        self._consumer.subscribe([self.counts])
        return self

    def __exit__(self, *error: object) -> None:
        self._consumer.close()


@pytest.mark.row("W8", engine="any")
@pytest.mark.timeout(600)
def test_the_word_count(place: Place, redis_server: RedisServer, broker: Brokers) -> None:
    """First by Redis; then by Kafka, with each part killed in turn."""
    topics = Topics(broker)
    words = Counter({"to": 2, "be": 2, "or": 1, "not": 1})
    with topics, place.app():
        by_redis(place, redis_server)
        place.stop()
        place.start("kafka_consumer", topics.servers, topics.texts)
        place.start("kafka_producer", topics.servers, topics.counts)
        words += topics.send("that is the question", 20)
        words += topics.send("to be", 20)
        wait_until(lambda: topics.latest().get("question"), 60, "the first counts")
    place.stop()  # all at once, the app too
    with topics, place.app():
        for text in ("whether tis nobler", "to suffer", "to be"):
            consumer = place.start("kafka_consumer", topics.servers, topics.texts)
            producer = place.start("kafka_producer", topics.servers, topics.counts)
            words += topics.send(text, 20)
            last = text.split()[-1]
            wait_until(lambda: topics.latest().get(last), 60, text)  # noqa: B023
            consumer.kill()
            producer.kill()
        place.start("kafka_consumer", topics.servers, topics.texts)
        place.start("kafka_producer", topics.servers, topics.counts)
        told = {word: n for word, n in words.items() if word not in ("or", "not")}
        wait_until(lambda: topics.latest() == told, 60, f"{told}")
    for word, count in told.items():
        counts = {n for w, n in topics.seen if w == word}
        first = 3 if word in ("to", "be") else 1
        assert counts == set(range(first, count + 1)), f"{word}: none is missing, none too much"


def by_redis(place: Place, server: RedisServer) -> None:
    place.start("redis_subscriber", server.url, "texts")
    place.start("redis_publisher", server.url, "counts")
    with redis.Redis.from_url(server.url) as client:
        heard = client.pubsub(ignore_subscribe_messages=True)
        heard.subscribe("counts")
        wait_until(lambda: client.publish("texts", "to be or not to be"), 60, "a subscriber")
        seen: list[str] = []

        def is_told() -> bool:
            message: dict[str, Any] | None = heard.get_message(timeout=0.2)
            if message is not None:
                seen.append(message["data"].decode())
            return len(seen) == 6

        wait_until(
            is_told, 120, f"six counts; there are {seen}\n{place.output.read_text()[-2000:]}"
        )
        heard.close()
    assert sorted(seen) == ["be 1", "be 2", "not 1", "or 1", "to 1", "to 2"]
