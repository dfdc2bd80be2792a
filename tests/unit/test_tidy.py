"""Habits that a reader relies on, held by a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from penstock.app.running.query import QueryLimits
from penstock.app.running.runner import RunnerOptions
from penstock.log.api import Limits
from penstock.log.declaring.objects import Defaults, StreamSpec
from penstock.log.sqlite.log import SqliteOptions
from penstock.producer import ProducerOptions
from penstock.spark.options import SourceOptions

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DISTANCE = re.compile(r"(\.next|next_offset|last_offset|\bends\[\w+\]) - [a-z]\w*.*")
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


def test_nobody_but_an_engine_takes_the_distance_of_two_offsets_for_a_count() -> None:
    """Offsets have gaps: `Log.count`, `advance` and `retreat` know what lies between two."""
    engines = [ROOT / "src/penstock/log" / name for name in ("sqlite", "kafka", "batch.py")]
    outside = [path for path in SOURCES if not any(path.is_relative_to(e) for e in engines)]
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in outside
        for match in DISTANCE.finditer(path.read_text("utf-8"))
    }
    assert not found


CLASS_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*\Z")


def test_a_class_name_means_one_thing() -> None:
    """Engines prefix theirs; a private name counts as well, and so does another name for a type."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "src/penstock").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        given = [node for node in tree.body if isinstance(node, ast.Assign)]
        names = [t.id for node in given for t in node.targets if isinstance(t, ast.Name)]
        for name in (*classes, *filter(CLASS_NAME.match, names)):
            found[name.lstrip("_")].add(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


PARTICIPLE = re.compile(r"([a-z]+ed|told|made|shown|given|found|kept|held|sent|begun|taken|seen)\Z")
NO_PARTICIPLE = {"feed", "need", "seed", "speed", "applied"}  # the last is a word of the protocol


def test_a_function_says_what_it_does() -> None:
    """`ask` and `translate`, not `asked` and `translated`. What is asked of a thing may be so."""
    found = set()
    for path in (ROOT / "src/penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.strip("_")
                if PARTICIPLE.match(name) and name not in NO_PARTICIPLE and not node.decorator_list:
                    found.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert not found
