"""Windows at the two ends of time."""

from __future__ import annotations

import datetime as dt

import pytest

from penstock import hopping, tumbling
from penstock.app.declaring.windows import Windows

FIRST = dt.datetime.min.replace(tzinfo=dt.UTC)
LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


@pytest.mark.parametrize("windows", [tumbling("7 days"), hopping("7 days", "1 day")])
@pytest.mark.parametrize("time", [FIRST, LAST, FIRST + dt.timedelta(days=3)])
def test_every_time_is_in_a_window(windows: Windows, time: dt.datetime) -> None:
    found = windows.containing(time)
    assert found
    assert all(window.start <= time <= window.end for window in found)
    assert len({window.start for window in found}) == len(found)
