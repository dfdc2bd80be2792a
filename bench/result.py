"""What a benchmark gives: a figure beside its reference, and the ratio of the two."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import apsw
import msgspec
import pyarrow as pa


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `at_least` or `at_most` is what the ratio should keep to."""

    what: str
    measured: str
    beside: str
    ratio: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> float | None:
        return self.at_least if self.at_least is not None else self.at_most

    @property
    def wanted_text(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def good(self) -> bool:
        if self.ratio is None:
            return True
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.at_most is None or self.ratio <= self.at_most


def environment() -> str:
    versions = f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}"
    return f"{os.cpu_count()} cores, {versions}, pyarrow {pa.__version__}"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Medians of both, measured in turns, so that a noisy moment meets both alike."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
