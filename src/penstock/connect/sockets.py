"""How every connection is set up: nothing waits for more, and a dead peer is noticed; and how
many there can be.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable

IDLE_S = 10
INTERVAL_S = 5
PROBES = 3
GONE_MS = 30_000
CONNECTION_FILES = 4
"""A connection is a file to the system, and what is done for it opens others."""
OTHER_FILES = 100


def set_up(peer: socket.socket) -> None:
    """A peer whose machine or network has died is gone after about half a minute."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", INTERVAL_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", GONE_MS),
    ):
        if hasattr(socket, name):  # not every system has all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connections_for(wanted: int, tell: Callable[[str], None]) -> int:
    """How many of the connections that are wanted this process has files for.

    Where it has too few it asks for more, as many as the system gives; what was done is told.
    """
    needed = wanted * CONNECTION_FILES + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        tell(f"the limit of open files raised from {soft:,} to {most:,} (ulimit -n)")
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fewer = max(1, (soft - OTHER_FILES) // CONNECTION_FILES)
    tell(f"at most {fewer:,} connections, not {wanted:,}: only {soft:,} files can be open "
         f"(ulimit -n); {needed:,} would do")  # fmt: skip
    return fewer
