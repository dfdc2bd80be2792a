"""Processes, told from every other there has been, and whether one is gone."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of some machine.

    `started` tells it from others that had, or will have, its number; `space` says where such
    numbers mean the same: containers may share the name of a host, and not its processes.
    """

    host: str
    pid: int
    started: str
    space: str

    def is_gone(self) -> bool:
        """Whether it is surely no more: it was on this machine, and is not there."""
        is_here = self.host == socket.gethostname() and self.space == _space() != ""
        return is_here and self.started not in ("", started(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    pid = os.getpid()
    return Process(host=socket.gethostname(), pid=pid, started=started(pid), space=_space())


def started(pid: int) -> str:
    """When a process was started, as the kernel counts; empty if it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


@functools.cache
def _space() -> str:
    """What the numbers of processes are the same in: a start of the machine, and a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
