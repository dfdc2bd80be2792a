"""Every example runs, and prints what it says it prints."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["word_count", "page_views", "fraud", "joins", "subscribe"]


def promised(path: Path) -> list[str]:
    """The output that the example's first lines promise."""
    text = path.read_text().split('"""')[1].split("Expected output:")[1]
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.row("F12", engine="embedded")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_it_promises(
    name: str, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    runpy.run_path(str(path), run_name="__main__")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed == promised(path)


def test_every_example_is_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there - {"tour", "shop", "demo"} == set(NAMES)
