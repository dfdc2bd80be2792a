"""`penstock connector …`: what is kept of connectors, and changing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock import App, CreateStream, Log, Record, declare, read_events
from penstock import open as open_log
from penstock.cli.main import main
from penstock.connect.clients.writer import SourceClient
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import amend, numbered_records, records
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.sinks.file import FileSink
from penstock.testing.apps import AppTest


class Order(Record):
    n: int


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("orders", Order))])
        yield opened


def write(log: Log, *numbers: int, name: str = "shop", partition: str | None = None) -> None:
    options = ListenerOptions(routes=[("*", "orders")], on_damage="skip")
    with Listener(log, options) as listener:
        with SourceClient("{}:{}".format(*listener.address), name) as client:
            for n in numbers:
                data = b"no" if n < 0 else b'{"n": %d}' % n
                client.write(data, partition=partition, sequence=abs(n))


def run(log: Log, *arguments: str) -> int:
    return main(["connector", *arguments, "--log", log.url])


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]


def test_a_connector_is_shown(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, 0, 1, -2, 3)
    write(log, 7, partition="eu")
    write(log, 1, name="shopping")
    assert run(log, "show", "shop", "--json") == 0
    first, second = printed(capsys)
    assert (first["connector"], first["up_to"], first["messages"]) == ("shop", 3, 4)
    assert (first["damaged"], first["stream"], first["kind"]) == (1, "orders", "source")
    assert "message 2 of shop: " in str(first["error"])
    assert first["error_time"] is not None
    assert (second["connector"], second["up_to"], second["error"]) == ("shop.eu", 7, None)
    assert run(log, "show", "shopp*") == 0
    said = capsys.readouterr().out
    assert "connector    shopping\n" in said
    assert "state        not connected\n" in said
    assert "error" not in said


def test_who_has_a_stream_is_shown_and_it_is_not_changed(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ListenerOptions(routes=[("*", "orders")])
    with Listener(log, options) as listener:
        with SourceClient("{}:{}".format(*listener.address), "shop") as client:
            client.write(b'{"n": 1}', sequence=5)
            client.flush()
            assert run(log, "show", "shop", "--json") == 0
            (row,) = printed(capsys)
            assert row["program"] == "penstock"
            assert str(row["instance"]) in str(row["state"])
            for command in (
                ["forget", "shop", "--yes"],
                ["rewind", "shop", "--after", "1", "--yes"],
            ):
                assert run(log, *command) == 1
                said = capsys.readouterr().err
                assert (
                    f"connector penstock {row['instance']} has stream shop: stop it first" in said
                )
    (record,) = records(log)
    assert record.point_of_ref == 5


def test_a_connector_is_forgotten(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, 0, 1)
    write(log, 3, partition="eu")
    write(log, 4, name="other")
    assert run(log, "forget", "shop") == 2
    assert "use --yes" in capsys.readouterr().err
    assert len(list(records(log))) == 3
    assert run(log, "forget", "shop", "--yes", "--json") == 0
    assert printed(capsys) == [
        {"forgot": "shop", "was_up_to": 1}, {"forgot": "shop.eu", "was_up_to": 3},
    ]  # fmt: skip
    assert [record.name for record in records(log)] == ["other"]
    write(log, 0)
    assert [event.id for event in read_events(log, "orders")].count("shop/0") == 2


def test_a_connector_is_set_back(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, 0, 1, 2, 3)
    assert run(log, "rewind", "shop", "--after", "1", "--dry-run", "--json") == 0
    assert printed(capsys) == [{"rewound": "shop", "from": 3, "to": 1, "dry_run": True}]
    assert next(records(log)).point_of_ref == 3
    assert run(log, "rewind", "shop", "--after", "1") == 2
    assert "use --yes" in capsys.readouterr().err
    assert run(log, "rewind", "shop", "--after", "1", "--yes") == 0
    assert capsys.readouterr().out == "rewound shop, from 3, to 1\n"
    write(log, 0, 1, 2, 3)
    ids = sorted(event.id for event in read_events(log, "orders"))
    assert ids == ["shop/0", "shop/1", "shop/2", "shop/2", "shop/3", "shop/3"]
    assert run(log, "rewind", "shop", "--after", "start", "--yes", "--json") == 0
    assert printed(capsys) == [{"rewound": "shop", "from": 3, "to": None}]


def test_a_connector_with_a_longer_name_is_another_one(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shop.eu` may be a partition of `shop`; what has partitions itself is not."""
    write(log, 1)
    write(log, 1, partition="eu")
    write(log, 1, name="shop.eu", partition="north")
    assert run(log, "forget", "shop", "--yes", "--json") == 0
    assert [row["forgot"] for row in printed(capsys)] == ["shop", "shop.eu"]
    assert [record.name for record in records(log)] == ["shop.eu.north"]


def test_nothing_is_left_out_though_it_was_set_back_meanwhile(
    log: Log, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else sets it back further, while this one is asked whether it may."""
    write(log, 0, 1, 2, 3)
    ((number, _),) = numbered_records(log)

    def set_back(*told: str, yes: bool) -> None:
        amend(log, number, lambda record: msgspec.structs.replace(record, point_of_ref=0))

    monkeypatch.setattr("penstock.cli.connectors.confirm", set_back)
    assert run(log, "rewind", "shop", "--after", "2") == 2
    assert "the messages between would never be stored" in capsys.readouterr().err
    assert next(records(log)).point_of_ref == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["show", "shp"], "there is no connector 'shp': did you mean shop or shop.eu?"),
        (["show", "xyz"], "there is no connector 'xyz': see `penstock connector list`"),
        (["forget", "xyz", "--yes"], "there is no connector 'xyz'"),
        (["rewind", "shop", "--after", "9", "--yes"], "the messages between would never be stored"),
        (["rewind", "shop", "--after", "-1", "--yes"], "'-1' is not a valid message number"),
        (
            ["rewind", "s*", "--after", "0", "--yes"],
            "matches several connector streams (shop, shop.eu)",
        ),
    ],
)
def test_mistakes_are_told(
    log: Log, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(log, 0, 1)
    write(log, 1, partition="eu")
    assert run(log, *arguments) == 2
    assert why in capsys.readouterr().err


def test_a_sink_is_shown_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        app = App("shop")
        orders = app.stream("orders", Order)
        app.sink(orders, "{}:{}".format(*host.address), workers=1, name="out")
        with AppTest(app, tmp_path) as test:
            test.send(orders, Order(1))
            test.until_idle()
            assert run(test.log, "show", "shop.out-*", "--json") == 0
            (row,) = printed(capsys)
            assert (row["kind"], row["connector"], row["messages"]) == ("sink", "shop.out-0", 1)
            for command in (["forget", "shop.out-0", "--yes"],
                            ["rewind", "shop.out-0", "--after", "start", "--yes"]):  # fmt: skip
                assert run(test.log, *command) == 2
                assert "is a sink: `penstock reset" in capsys.readouterr().err
