"""Durations and sizes as people write them: "7 days", "10 GB"."""

from __future__ import annotations

import re

from penstock.errors import UsageError

_MS = {
    "ms": 1, "millisecond": 1, "s": 1000, "second": 1000, "m": 60_000, "minute": 60_000,
    "h": 3_600_000, "hour": 3_600_000, "d": 86_400_000, "day": 86_400_000,
    "w": 604_800_000, "week": 604_800_000,
}  # fmt: skip
_BYTES = {
    "b": 1, "byte": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_duration_ms(text: str | int) -> int:
    """Milliseconds of "7 days", "12 h", "500 ms"; a bare integer is milliseconds."""
    return _parse(text, _MS, "a duration, such as 7 days, 12 hours or 500 ms")


def format_duration(duration_ms: int | None) -> str:
    """Milliseconds in the largest unit that fits: 7 days."""
    if duration_ms is None:
        return "for ever"
    for unit in ("day", "hour", "minute", "second"):
        if duration_ms % _MS[unit] == 0:
            count = duration_ms // _MS[unit]
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{duration_ms} ms"


def parse_bytes(text: str | int) -> int:
    """Bytes of "10 GB", "512 MiB"; a bare integer is bytes."""
    return _parse(text, _BYTES, "a size, such as 10 GB or 512 MiB")


def _parse(text: str | int, units: dict[str, int], wanted: str) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if isinstance(text, str):
        if text.strip().isdigit():
            return int(text)
        match = _QUANTITY.fullmatch(text)
        if match:
            unit = match[2].lower()
            factor = units.get(unit) or units.get(unit.removesuffix("s"))
            if factor:
                return int(float(match[1]) * factor)
    raise UsageError(f"{text!r} is not {wanted}")
