"""Habits that a reader relies on, held by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.app.query import QueryLimits
from penstock.app.runner import RunnerOptions
from penstock.log.api import Limits
from penstock.log.objects import Defaults, StreamSpec
from penstock.log.sqlite.log import SqliteOptions
from penstock.producer import ProducerOptions
from penstock.spark.options import SourceOptions

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
BANNED_NAMES = {"utils", "helpers", "common", "base", "misc", "manager"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_stays_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith('"""'), "a module starts with what it is"
    assert len(text.splitlines()) <= 500, "would two nouns read better?"
    assert path.stem not in BANNED_NAMES
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert not re.search(r"\b(pickle|eval|exec)\(|\bimport pickle\b", text)


def test_every_limit_and_option_is_in_the_docs() -> None:
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    kinds = (
        Limits, Defaults, SqliteOptions, ProducerOptions, StreamSpec, RunnerOptions, QueryLimits,
        SourceOptions,
    )  # fmt: skip
    for kind in kinds:
        for name in {*kind.__struct_fields__} - {"checkpoint"}:  # that is Spark's own
            assert f"`{name}`" in pages, f"{kind.__name__}.{name} is not in the docs"
