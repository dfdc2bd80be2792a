"""Which checklist rows the last test run proved: a pytest plugin and the report.

Tests carry `@pytest.mark.row("H10")`; the engine is the mark's `engine`, or the `engine` of
the test's class, or "any". `python -m tests.rows` prints one line per row and
engine, from `docs/rows.toml` and the results of the last run.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

RESULTS = Path(".work/rows.json")
ROWS = Path("docs/rows.toml")
PROPERTY = "penstock-row"


class RowPlugin:
    """Collects outcomes by row; works with and without several test processes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = _known(_rows()) if ROWS.exists() else None
        for item in items:
            for mark in item.iter_markers("row"):
                engine = mark.kwargs.get("engine") or _engine_of(item)
                for name in (f"{row} {engine}" for row in mark.args):
                    if known is not None and name not in known:
                        raise pytest.UsageError(f"{item.nodeid}: there is no row {name} in {ROWS}")
                    item.user_properties.append((PROPERTY, name))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._counts[f"{value} {report.outcome}"] += 1

    def pytest_sessionfinish(self) -> None:
        if self._counts:
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(self._counts, indent=1, sort_keys=True))


def _engine_of(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "cls", None), "engine", "any"))


def _rows() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(ROWS.read_text("utf-8"))["rows"]  # type: ignore[no-any-return]


def _known(rows: dict[str, dict[str, list[str]]]) -> set[str]:
    return {f"{row} {engine}" for row, body in rows.items() for engine in body["engines"]}


def report() -> list[str]:
    """One line per row and engine: `H10 embedded 3 passed`, or `missing`."""
    rows = _rows()
    counts = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    lines = []
    for row, body in rows.items():
        for engine in body["engines"]:
            found = {
                outcome: counts.get(f"{row} {engine} {outcome}", 0)
                for outcome in ("failed", "passed", "skipped")
            }
            told = [f"{count} {outcome}" for outcome, count in found.items() if count]
            lines.append(f"{row} {engine} {', '.join(told) or 'missing'}")
    strange = {key.rsplit(" ", 1)[0] for key in counts} - _known(rows)
    lines += [f"{name} is marked in a test and not in {ROWS}" for name in sorted(strange)]
    return lines


def main() -> int:
    lines = report()
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(" failed" in line or " is marked " in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
