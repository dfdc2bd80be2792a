"""Options of every connection: data is sent without delay, and a dead peer is noticed. Also, how
many connections there can be.
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
"""Open files to allow per connection: its socket, and others that serving it needs."""
OTHER_FILES = 100


def set_up(peer: socket.socket) -> None:
    """Set options so that a peer whose machine or network died is noticed in about 30 seconds."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", INTERVAL_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", GONE_MS),
    ):
        if hasattr(socket, name):  # not available on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connections_for(wanted: int, tell: Callable[[str], None]) -> int:
    """How many of the wanted connections this process can have, given its limit of open files.

    If the limit is too low it is raised, as far as the system allows; either is reported.
    """
    needed = wanted * CONNECTION_FILES + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        tell(f"raised the limit on open files from {soft:,} to {most:,} (ulimit -n)")
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fewer = max(1, (soft - OTHER_FILES) // CONNECTION_FILES)
    tell(f"accepting at most {fewer:,} connections, not {wanted:,}: only {soft:,} files can be "
         f"open (ulimit -n), and {needed:,} are needed")  # fmt: skip
    return fewer
