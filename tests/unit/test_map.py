"""ARCHITECTURE.md is the map: every module is on it, and nothing that is not there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
_WAY = re.compile(r"`([\w/]+)\.([A-Za-z_][\w.]*)`")
_NAME = re.compile(r"`([\w/]+)`")


def modules() -> set[str]:
    """Every module by its place, such as `log/sqlite/log`; packages by their folder's."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).with_suffix("")
        if place.name not in ("__init__", "__main__"):
            found.add(str(place))
    return found


def mapped() -> set[str]:
    """What the tables of packages name in their first column."""
    found: set[str] = set()
    package = ""
    for line in (ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines():
        if line.startswith("Inside "):
            package = _NAME.findall(line)[0] + "/"
        elif line.startswith("## "):
            package = ""
        elif line.startswith("| `"):
            cell = line.split("|")[1]
            found |= {f"{package}{name}" for name in _NAME.findall(cell)}
    return found


def test_every_module_is_on_the_map() -> None:
    missing = modules() - mapped()
    assert not missing, f"not in ARCHITECTURE.md: {sorted(missing)}"


def test_the_map_names_nothing_that_is_gone() -> None:
    there = modules()
    packages = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")}
    assert not mapped() - there - packages, "ARCHITECTURE.md names modules that are not there"


WAYS = ("## The way of an event", "## A message through a sink, step by step")


def way(*headings: str) -> list[tuple[str, str]]:
    """Modules and what is named in them, step by step."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    sections = [text.split(heading)[1].split("\n## ")[0] for heading in headings]
    return sorted({found for section in sections for found in _WAY.findall(section)})


@pytest.mark.parametrize(("module", "name"), way(*WAYS))
def test_each_step_names_what_is_there(module: str, name: str) -> None:
    found = importlib.import_module(f"penstock.{module.replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)


def test_the_way_of_an_event_goes_through_both_engines() -> None:
    steps = way(WAYS[0])
    modules = {module for module, _ in steps}
    assert {"log/sqlite/writing", "log/kafka/writing", "log/writing/fate"} <= modules
    assert len(steps) > 40
    assert len(way(WAYS[1])) > 20
