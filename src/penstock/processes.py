"""Identifying processes uniquely, and finding out whether one has ended."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process on some machine.

    `started` distinguishes it from others that had, or will have, the same pid. `space` says
    where pids are comparable: containers may share a host name, but not their processes.
    """

    host: str
    pid: int
    started: str
    space: str

    def is_gone(self) -> bool:
        """Whether it has certainly ended: it ran on this machine, and no longer exists."""
        is_here = self.host == socket.gethostname() and self.space == _space() != ""
        return is_here and self.started not in ("", start_time_of(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    pid = os.getpid()
    return Process(host=socket.gethostname(), pid=pid, started=start_time_of(pid), space=_space())


def start_time_of(pid: int) -> str:
    """When a process was started, in the kernel's units; empty if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


@functools.cache
def _space() -> str:
    """Where pids are comparable: one boot of the machine, and one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
