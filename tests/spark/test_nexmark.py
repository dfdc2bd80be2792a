"""NEXMark: every query gives the rows that plain Python finds, and those that it always gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from bench.nexmark import QUERIES, Generator, Row, expected, fill, nexmark_app
from pyspark.sql import SparkSession

from penstock.testing.apps import AppTest

GENERATOR = Generator(count=20_000, step_us=2000)
GOLDEN = {
    "q0": (18400, "5dc2c787a1aa3b5a"),
    "q1": (18400, "a2574486c2aafc38"),
    "q2": (1232, "e4153618716c217a"),
    "q3": (173, "72fa2b48a953bd38"),
    "q5": (18, "ee4e61341178cb4f"),
    "q7": (3, "47206255997e66ad"),
    "q8": (96, "42df94341054c993"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Row]]:
    return expected(GENERATOR)


def told(rows: list[Row]) -> tuple[int, str]:
    return len(rows), xxhash.xxh3_64_hexdigest(msgspec.json.encode(rows))


def test_the_generator_gives_what_it_always_gave(answers: dict[str, list[Row]]) -> None:
    assert {name: told(rows) for name, rows in answers.items()} == GOLDEN


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_of_nexmark(
    name: str, answers: dict[str, list[Row]], spark: SparkSession, tmp_path: Path
) -> None:
    app, stream = nexmark_app(name)
    with AppTest(app, tmp_path, spark) as run:
        fill(run.log, GENERATOR, QUERIES[name].inputs)
        run.until_idle()
        found: list[Any] = run.events(stream)
    rows = sorted(msgspec.structs.astuple(row) for row in found)
    assert rows == answers[name]
