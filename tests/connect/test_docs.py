"""What the pages about connectors show works: every block of Python is run, against real parts."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from penstock import App, CreateStream, Log, Record, declare, outbox, read_events
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.connect.addresses import ENVIRONMENT
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.targets import SinkTarget
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.worker import SinkWorker
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from penstock.testing.servers import PostgresServer, free_port
from penstock.testing.sink_contract import SinkTargetContract
from tests.connect.test_outbox import emptied
from tests.pages import Page

DOCS = Path(__file__).parents[2] / "docs"


class Order(Record):
    user: str


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "ports"))


class EnoughError(Exception):
    """What ends a loop that would go on for ever."""


class Connectors:
    """The page, section by section."""

    def __init__(self, folder: Path, log: Log, postgres: PostgresServer) -> None:
        self.page = Page(DOCS / "connectors.md")
        self.folder = folder
        self.log = log
        self.postgres = postgres
        self.sink_at = f"127.0.0.1:{free_port()}"
        self.page.replace("127.0.0.1:6068", self.sink_at)

    def stored(self) -> list[bytes]:
        return [event.data for event in read_events(self.log, "raw")]  # type: ignore[misc]

    def try_listening(self) -> None:
        app = App("shop")
        orders = app.stream("orders", Order, on_damage="stop")
        self.page.run("Sources", app=app, orders=orders)
        (definition,) = plan(app).definitions
        assert definition.name == "orders_listener"
        assert definition.on_damage == "dead-letter"  # type: ignore[attr-defined]

    def try_sources(self) -> None:
        with Listener(self.log, ListenerOptions(routes=[("*", "raw")])) as listener:
            self.page.replace("127.0.0.1:6067", "{}:{}".format(*listener.address))
            (self.folder / "x.txt").write_text("one\ntwo\n")

            def serve_forever() -> None:
                wait_until(lambda: len(self.stored()) > 100, 30, "numbers having come")

            self.page.run("Sources > Writing a source", serve_forever=serve_forever)
        found = self.stored()
        assert found.count(b'{"user": "ada"}') == 1
        assert {b"1", b"2", b"one\n", b"two\n"} <= set(found)

    def try_pushing(self) -> None:
        app = App("shop")
        orders = app.stream("orders", Order)
        self.page.run("Sinks", app=app, orders=orders)
        (definition,) = plan(app).definitions
        assert definition.name == "orders_sink"

    def try_sink(self, chance: random.Random) -> None:
        def serve_forever() -> None:
            for number, texts in enumerate([["a", "b"], ["c"]]):
                with SinkWorker(self.sink_at, "shop/w", (number,)) as worker:
                    worker.send([(None, 0, text.encode()) for text in texts])
                    assert worker.vote(f"t{number}", worker.committed)
                    worker.resolve(f"t{number}", True)

        made = self.page.run("Sinks > Writing a sink", serve_forever=serve_forever)
        wait_until(lambda: len(lines_in(self.folder / "lines" / "shop%2fw")) == 3, 30, "the lines")
        assert lines_in(self.folder / "lines" / "shop%2fw") == [b"a", b"b", b"c"]
        Documented(made.Lines).check_all(self.folder)

    def try_reading(self) -> None:
        app = App("texts")
        lines = app.stream("lines", content="bytes")
        app.sink(lines, self.sink_at, workers=1)
        heard: list[object] = []

        def print_some(*values: object) -> None:
            heard.append(values)
            if len(heard) == 2:
                raise EnoughError

        with AppTest(app, self.folder) as run:
            run.send(lines, b"one", b"two", b"three")
            with pytest.raises(EnoughError):
                self.page.run("Sinks > Reading from a sink", print=print_some)
        assert heard == [("two", None), ("three", None)]

    def try_descriptions(self) -> None:
        app = App("words")
        section = "Both halves from one class"
        made = self.page.run(section, 2, app=app)
        (self.folder / "words").mkdir()
        with AppTest(app, self.folder / "words") as run:
            self.page.run(section, 1, after=made)
            assert run.events(made.texts) == [made.Text("to be or not to be")]
        letters = self.page.run(section, after=made).Letters()
        assert letters.decode(letters.encode(made.Text("é"))) == made.Text("é")

    def try_outbox(self) -> None:
        url = emptied(self.postgres)
        with psycopg.connect(url) as connection:
            connection.execute("DROP TABLE IF EXISTS accounts")
            connection.execute("CREATE TABLE accounts (name text, balance int)")
            outbox.create(connection)
        self.page.replace("postgresql://app@localhost/shop", url)
        self.page.run("Outbox")
        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT stream, data FROM penstock_outbox").fetchall()
        assert rows == [("payments", b'{"user":"ada","amount":5}')]


def lines_in(folder: Path) -> list[bytes]:
    files = sorted(folder.glob("*.txt"), key=lambda file: Mark.parse(file.stem))
    return [line for file in files for line in file.read_bytes().splitlines()]


class Documented(SinkTargetContract):
    """The sink of the page keeps what those that ship keep."""

    def __init__(self, make: Callable[[Path, str], SinkTarget]) -> None:
        self._make = make

    def check_all(self, folder: Path) -> None:
        tests = [name for name in dir(SinkTargetContract) if name.startswith("test_")]
        assert len(tests) > 5
        for name in tests:
            self._check(getattr(self, name), folder / name)

    def _check(self, test: Callable[..., None], folder: Path) -> None:
        """Give it what pytest would."""

        def make(worker: str) -> SinkTarget:
            return self._make(folder, worker)

        @contextlib.contextmanager
        def open_sink(spool: Path) -> Iterator[str]:
            with SinkHost(make, spool) as host:
                yield "{}:{}".format(*host.address)

        folder.mkdir()
        given = {
            "make": make, "target": make("w"), "open_sink": open_sink, "worker": "w",
            "visible": lambda: lines_in(folder / "w"), "tmp_path": folder,
        }  # fmt: skip
        test(**{name: given[name] for name in inspect.signature(test).parameters})


@pytest.mark.timeout(200)
def test_the_page_about_connectors(
    tmp_path: Path, log: Log, postgres: PostgresServer, chance: random.Random
) -> None:
    connectors = Connectors(tmp_path, log, postgres)
    connectors.try_listening()
    connectors.try_sources()
    connectors.try_pushing()
    connectors.try_sink(chance)
    connectors.try_reading()
    connectors.try_descriptions()
    connectors.try_outbox()
    connectors.page.check_all_ran()


def test_the_page_about_connectors_that_ship(postgres: PostgresServer) -> None:
    page = Page(DOCS / "connectors-that-ship.md")
    app = page.run("").app
    assert [definition.name for definition in plan(app).definitions] == ["orders_sink"]
    page.check_all_ran()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for block in page.blocks():
            if block.language == "sql":
                connection.execute(block.code)
        connection.execute("DROP TABLE orders, spent")


@pytest.mark.parametrize("name", ["connectors.md", "connectors-that-ship.md"])
def test_the_commands_of_a_page_are_commands(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "postgresql://app@localhost/shop")
    page = Page(DOCS / name)
    for secret in ("cookie", "kafka"):
        (tmp_path / secret).write_text("x")
        with contextlib.suppress(AssertionError):
            page.replace(f"/run/secrets/{secret}", str(tmp_path / secret))
    assert page.check_commands() > 5


def test_code_that_does_not_work_is_noticed(tmp_path: Path) -> None:
    """With the page's own line; and so is what nobody has run, and what is no command."""
    path = tmp_path / "page.md"
    path.write_text(
        "# P\n\n## A\n\n```python\nx = 1\n```\n\n```python\ny = x / 0\n```\n\n"
        "### B\n\n```python\n# not a heading\nz = 1\n```\n\n```sh\npenstock lisen orders\n```\n"
    )
    page = Page(path)
    with pytest.raises(ZeroDivisionError) as raised:
        page.run("A")
    assert raised.traceback[-1].lineno + 1 == 10
    with pytest.raises(AssertionError, match=r"nobody has run line 16 \(A > B\)"):
        page.check_all_ran()
    with pytest.raises(AssertionError, match="there is no command lisen"):
        page.check_commands()
