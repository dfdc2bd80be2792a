"""The logs that a Spark worker process has open, kept between tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.log import OptionValue, open_log
from penstock.log.api import Log

_open: dict[tuple[int, str, tuple[tuple[str, OptionValue], ...]], Log] = {}


def quiet_log(url: str, options: Mapping[str, OptionValue]) -> Log:
    """The log at `url`, opened without upkeep, which is left to the runner or the producer."""
    return open_log(url, create=False, **{"upkeep_interval_ms": 0, **options})


def worker_log(url: str, options: Mapping[str, OptionValue]) -> Log:
    """The log at `url`, opened once per process and closed when the process ends."""
    name = (os.getpid(), url, tuple(sorted(options.items())))
    if name not in _open:
        _open[name] = quiet_log(url, options)
    return _open[name]
