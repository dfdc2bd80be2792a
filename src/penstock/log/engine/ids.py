"""The ids that an `ids="producer"` stream holds, and which ids of a batch are new.

New ids are compared with the whole set, not with the highest: ids of a database sequence may
arrive out of order. Integers are kept as ranges, so a sequence without gaps is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from penstock.resources import statements

ID_SQL = statements(__package__, "ids.sql")
"""Statements over the tables `ids` and `id_ranges`, by name."""
_INT64 = range(-(2**63), 2**63)


class IdTables(Protocol):
    """A write transaction on the tables `ids` and `id_ranges`; statements are given by name."""

    @property
    def time_us(self) -> int: ...

    def run(self, name: str, *values: object) -> None: ...

    def look(self, name: str, *values: object) -> tuple[Any, ...] | None: ...

    def look_all(self, name: str, *values: object) -> Sequence[tuple[Any, ...]]: ...


def as_integer(text: str) -> int | None:
    """The integer that `text` represents in canonical form, if SQLite can hold it."""
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        return None
    number = int(text)
    return number if str(number) == text and number in _INT64 else None


def take_new(write: IdTables, stream_id: int, ids: Sequence[str]) -> list[int]:
    """Remember the ids; return the rows whose id the stream already held, or that repeat one."""
    numbers = [as_integer(text) for text in ids]
    seen: set[str] = set()
    held = _held_numbers(write, stream_id, [n for n in numbers if n is not None])
    dropped, new_numbers, new_texts = [], [], []
    for row, (text, number) in enumerate(zip(ids, numbers, strict=True)):
        known = number in held if number is not None else _holds(write, stream_id, text)
        if known or text in seen:
            dropped.append(row)
            continue
        seen.add(text)
        if number is None:
            new_texts.append(text)
        else:
            new_numbers.append(number)
    for text in new_texts:
        write.run("insert_id", stream_id, text, write.time_us)
    for first, last in ranges_of(new_numbers):
        _add_range(write, stream_id, first, last)
    return dropped


def _holds(write: IdTables, stream_id: int, text: str) -> bool:
    return write.look("has_id", stream_id, text) is not None


def _held_numbers(write: IdTables, stream_id: int, numbers: list[int]) -> set[int]:
    held: set[int] = set()
    for low, high in ranges_of(sorted(set(numbers))):
        for first, last in _touching(write, stream_id, low, high):
            held.update(range(max(first, low), min(last, high) + 1))
    return held


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Integers as ranges, both ends included: 1 2 3 7 → (1, 3) (7, 7)."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] + 1 == number:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _touching(write: IdTables, stream_id: int, low: int, high: int) -> list[tuple[int, int]]:
    values = {"stream": stream_id, "low": low, "high": high}
    return [(first, last) for first, last in write.look_all("ranges_touching", values)]


def _add_range(write: IdTables, stream_id: int, first: int, last: int) -> None:
    """Add a range of ids that are all new, joined with adjacent ranges."""
    low, high = max(first - 1, _INT64[0]), min(last + 1, _INT64[-1])
    for other_first, other_last in _touching(write, stream_id, low, high):
        write.run("delete_range", stream_id, other_first)
        first, last = min(first, other_first), max(last, other_last)
    write.run("insert_range", stream_id, first, last)
