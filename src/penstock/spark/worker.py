"""In a worker process of Spark: the logs it has open, kept between tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.log import OptionValue, open_log
from penstock.log.api import Log

_open: dict[tuple[int, str, tuple[tuple[str, OptionValue], ...]], Log] = {}


def worker_log(url: str, options: Mapping[str, OptionValue] | None = None) -> Log:
    """The log at `url`, opened once in a process and left to the process to close.

    Workers are many and short of memory, and upkeep is the runner's task: they do none.
    """
    settings = {"upkeep_interval_ms": 0, **(options or {})}
    name = (os.getpid(), url, tuple(sorted(settings.items())))
    if name not in _open:
        _open[name] = open_log(url, create=False, **settings)
    return _open[name]
