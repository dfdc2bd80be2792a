"""Catalogue files: plans, repeats, refusals, and errors that name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import CatalogueError
from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.catalogue import load, make_plan
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.declaring.quantities import parse_bytes, parse_duration_ms
from penstock.records.schema import Digits, Maybe, Scalar

SHOP = """
[defaults]
partitions = 2
retention = "7 days"

[namespaces.shop]

[records.Address]
street = "str"

[records.Order]
user = "str"
amount = "Decimal(10, 2)"
note = "str | None"
ship_to = "list[Address]"

[streams."shop.orders"]
record = "Order"
key = "user"
partitions = 4

[streams.clicks]
retention_bytes = "10 MB"
acks = "write"

[streams.outbox]
ids = "producer"
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.toml"


def apply(log: Log, file: Path, text: str) -> list[str]:
    file.write_text(text)
    plan = make_plan(log, load(file))
    log.apply([step.change for step in plan])
    return [f"{'! ' if step.destructive else ''}{step.description}" for step in plan]


@pytest.mark.row("H5", engine="embedded")
def test_a_catalogue_is_applied_once(log: Log, file: Path) -> None:
    assert apply(log, file, SHOP) == [
        "create namespace shop",
        "create stream shop.orders (Order, key user, 4 partitions)",
        "create stream clicks (json, 2 partitions)",
        "create stream outbox (json, ids from the producer)",
    ]
    orders = log.stream("shop.orders")
    assert orders.partitions == 4
    assert orders.spec.retention_ms == 7 * 86_400_000
    assert orders.record is not None
    assert [f.type for f in orders.record.fields][:3] == [
        Scalar("str"), Digits(10, 2), Maybe(Scalar("str")),
    ]  # fmt: skip
    assert log.stream("clicks").spec.acks == "write"
    assert log.stream("clicks").partitions == 2
    assert log.stream("outbox").partitions == 1
    assert apply(log, file, SHOP) == []


def test_changes_become_a_plan(log: Log, file: Path) -> None:
    apply(log, file, SHOP)
    changed = (
        SHOP.replace('note = "str | None"', 'note = "str | None"\nrush = "bool | None"')
        .replace("partitions = 4", "partitions = 6")
        .replace('acks = "write"', 'acks = "all"')
        .replace('retention = "7 days"', 'retention = "9 days"')
    )
    assert apply(log, file, changed) == [
        "alter stream shop.orders: retention 7 days → 9 days; record version 2 (adds rush)",
        "grow stream shop.orders from 4 to 6 partitions",
        "alter stream clicks: acks write → all; retention 7 days → 9 days",
        "alter stream outbox: retention 7 days → 9 days",
    ]
    assert apply(log, file, changed) == []
    assert log.stream("shop.orders").partitions == 6
    assert len(log.stream("shop.orders").records) == 2


def test_what_removes_events_is_destructive(log: Log, file: Path) -> None:
    apply(log, file, SHOP)
    less = SHOP.replace("[streams.outbox]\nids", "[streams.inbox]\nids").replace("7 days", "6 days")
    plan = apply(log, file, less)
    assert [step for step in plan if step.startswith("! ")] == [
        "! alter stream shop.orders: retention 7 days → 6 days",
        "! alter stream clicks: retention 7 days → 6 days",
        "! drop stream outbox and all its events",
    ]


def test_to_keep_fewer_bytes_is_destructive(log: Log, file: Path) -> None:
    for text, destructive in (
        ("", False), ("2 MiB", True), ("3 MiB", False), ("1 MiB", True), ("1 MiB", False),
    ):  # fmt: skip
        setting = f"retention_bytes = '{text}'\n" if text else ""
        plan = apply(log, file, f"[streams.s]\n{setting}")
        assert any(step.startswith("! ") for step in plan) == destructive


def test_a_file_drops_only_what_it_created(log: Log, file: Path, tmp_path: Path) -> None:
    log.apply([CreateStream(declare("by-hand"))])
    apply(log, file, SHOP)
    assert apply(log, tmp_path / "other.toml", "[streams.theirs]\n") == [
        "create stream theirs (json)"
    ]
    assert apply(log, file, SHOP) == []
    with pytest.raises(CatalogueError, match=r"other\.toml:3: .*belongs to catalogue 'shop'"):
        apply(log, tmp_path / "other.toml", "\n\n[streams.clicks]\n")


def test_a_class_can_be_named(log: Log, file: Path) -> None:
    (file.parent / "shop_models.py").write_text(
        "import penstock\nclass Item(penstock.Record):\n    sku: str\n"
    )
    text = '[streams.items]\nrecord = "shop_models:Item"\nkey = "sku"\n'
    assert apply(log, file, text) == ["create stream items (Item, key sku)"]
    for name in ("nowhere:Item", "shop_models:Nothing", "json:JSONDecoder"):
        with pytest.raises(CatalogueError, match=r"shop\.toml:2: "):
            apply(log, file, text.replace("shop_models:Item", name))


@pytest.mark.parametrize(
    ("text", "where", "match"),
    [
        ("[streams.orders\n", 1, "not valid TOML"),
        ("[streams.s]\n\n[streams.'default.s']\n", 3, "stream s is declared twice"),
        ("\n\nx = = 1\n", 3, "not valid TOML"),
        ("[stream.orders]\n", 1, "'stream' is not a known setting"),
        ("[streams.orders]\nkey = 'a'\npartition = 3\n", 3, "'partition' is not a known setting"),
        ("[streams.orders]\n\npartitions = 'four'\n", 3, "Expected `int"),
        ("[streams.orders]\npartitions = 0\n", 1, "0 partitions"),
        ("[streams.orders]\nacks = 'some'\n", 2, "acks"),
        ("[streams.orders]\nretention = 'long'\n", 2, "not a duration"),
        ("[streams.orders]\nretention_bytes = '3 parsecs'\n", 2, "not a size"),
        ("[streams.orders]\nrecord = 'Order'\n", 2, r"no \[records.Order\]"),
        ("[records.Order]\nuser = 'text'\n", 2, "'text' is not a type"),
        ("[records.Order]\n_user = 'str'\n", 2, "underscore"),
        ("[records.Order]\n[streams.s]\n", 1, "no fields"),
        ("[records.O]\na='str'\n[streams.s]\nrecord='O'\nkey='b'\n", 3, "no field 'b'"),
        ("[streams.'a.b.c']\n", 1, "more than one dot"),
        ("[streams.'bad name']\n", 1, "not a valid stream name"),
        ("[streams.'nowhere.orders']\n", 1, r"add \[namespaces.nowhere\]"),
        ("[namespaces._x]\n", 1, "not a valid namespace name"),
        ("[streams.'_system.objects']\n", 1, "reserved for the system"),
        ("[streams.orders]\nids='producer'\npartitions=3\n", 1, "one partition"),
        ("streams = 3\n", 1, "must be a table"),
        ("[defaults]\nkey = 'x'\n[streams.s]\n", 2, "'key' is not a known setting"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(
    log: Log, file: Path, text: str, where: int, match: str
) -> None:
    with pytest.raises(CatalogueError, match=match) as error:
        apply(log, file, text)
    assert f"shop.toml:{where}: " in str(error.value)
    assert [str(s.name) for s in log.streams()] == ["_system.metrics", "_system.objects"]


def test_what_cannot_change_is_named_with_its_line(log: Log, file: Path) -> None:
    apply(log, file, SHOP)
    line = SHOP.splitlines().index('[streams."shop.orders"]') + 1
    for old, new, match in (
        ('user = "str"', 'user = "int"', "user changed from str to int"),
        ("partitions = 4", "partitions = 1", "only grow"),
        ('key = "user"', 'key = "note"', "key cannot change"),
    ):
        with pytest.raises(CatalogueError, match=match) as error:
            apply(log, file, SHOP.replace(old, new))
        assert f"shop.toml:{line}: " in str(error.value)


def test_quantities() -> None:
    assert parse_duration_ms("1.5 hours") == 5_400_000
    assert parse_duration_ms("500ms") == 500
    assert parse_duration_ms("2 weeks") == 1_209_600_000
    assert parse_duration_ms(7) == parse_duration_ms("7") == 7
    assert parse_bytes("10 GB") == 10**10
    assert parse_bytes("1 MiB") == 2**20
