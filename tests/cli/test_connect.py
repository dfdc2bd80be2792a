"""`penstock connect`: what is missing, or wrong, is said."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["redis", "redis://localhost", "x"], "redis", "redis"),
        (["kafka-sink", "localhost:1", "x", "--state", "s"], "confluent_kafka", "kafka"),
        (["postgres", "postgresql://localhost", "x"], "psycopg", "postgres"),
    ],
)
def test_an_extra_that_is_missing_names_itself(command: list[str], module: str, extra: str) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; import penstock.cli.__main__"
    given = [sys.executable, "-c", without, "connect", *command]
    done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert f"pip install 'penstock[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
