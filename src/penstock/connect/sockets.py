"""How every connection is set up: nothing waits for more, and a dead peer is noticed."""

from __future__ import annotations

import socket

IDLE_S = 10
INTERVAL_S = 5
PROBES = 3
GONE_MS = 30_000


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
