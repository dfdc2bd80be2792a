"""Windows: how time is divided, for derived streams and tables and for the entries of agents."""

from __future__ import annotations

import datetime as dt
from typing import Literal, NamedTuple

import msgspec

from penstock.errors import UsageError
from penstock.log.declaring.quantities import format_duration, parse_duration_ms
from penstock.records.event import from_microseconds, microseconds
from penstock.records.ranges import TIME_US_MAX, TIME_US_MIN

Duration = str | int | dt.timedelta
"""A length of time: "10 minutes", a timedelta, or milliseconds."""


def duration_us(length: Duration, what: str) -> int:
    """A positive length of time in microseconds; `UsageError` if it is invalid."""
    if isinstance(length, dt.timedelta):
        found = length // dt.timedelta(microseconds=1)
    else:
        found = parse_duration_ms(length) * 1000
    if found <= 0:
        raise UsageError(f"{what} is {length!r}: it must be longer than zero")
    return found


class Window(NamedTuple):
    """A span of time, from `start` up to but not including `end`."""

    start: dt.datetime
    end: dt.datetime


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """A way to divide time into windows; made by `tumbling`, `hopping` and `session`.

    `expires_us` is how long after its end an agent's entry of a window is kept.
    """

    kind: Literal["tumbling", "hopping", "session"]
    size_us: int
    step_us: int
    expires_us: int | None = None

    def __str__(self) -> str:
        size = format_duration(self.size_us // 1000)
        if self.kind == "hopping":
            return f"hopping {size}, every {format_duration(self.step_us // 1000)}"
        return f"{self.kind} {size}"

    def containing(self, time: dt.datetime) -> list[Window]:
        """The windows that contain this time, the latest first."""
        at = microseconds(time)
        start = at - at % self.step_us
        found = []
        while start > at - self.size_us:
            found.append(self.starting(start))
            if start <= TIME_US_MIN:
                break
            start -= self.step_us
        return found

    def starting(self, start_us: int) -> Window:
        """The window that starts there, truncated to the range of valid times."""
        end_us = min(start_us + self.size_us, TIME_US_MAX)
        return Window(from_microseconds(max(start_us, TIME_US_MIN)), from_microseconds(end_us))


def tumbling(size: Duration, *, expires: Duration | None = None) -> Windows:
    """Windows that follow each other without gaps or overlaps: `tumbling("10 minutes")`."""
    size_us = duration_us(size, "the window")
    return Windows(kind="tumbling", size_us=size_us, step_us=size_us, expires_us=_expiry(expires))


def hopping(size: Duration, step: Duration, *, expires: Duration | None = None) -> Windows:
    """Windows that overlap: `hopping("10 minutes", "1 minute")` starts one every minute."""
    size_us, step_us = duration_us(size, "the window"), duration_us(step, "the step")
    if step_us > size_us:
        raise UsageError(
            f"the step {step!r} is longer than the window {size!r}: events between two windows "
            "would belong to none; choose a step no longer than the window"
        )
    return Windows(kind="hopping", size_us=size_us, step_us=step_us, expires_us=_expiry(expires))


def session(gap: Duration) -> Windows:
    """Windows that end when a key has had no event for `gap`. For derived streams only."""
    gap_us = duration_us(gap, "the gap")
    return Windows(kind="session", size_us=gap_us, step_us=gap_us)


def _expiry(expires: Duration | None) -> int | None:
    return None if expires is None else duration_us(expires, "the expiry")
