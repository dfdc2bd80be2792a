"""Addresses of connectors: `host:port`, or `auto:NAME`, a free port of this machine by name.

The listening program takes a free port and records it in a file; the connecting program looks the
name up each time, and so finds the new port after a restart. Only for programs of one user on one
machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import UsageError
from penstock.resources import cache_folder

PREFIX = "auto:"
ENVIRONMENT = "PENSTOCK_PORTS"
_NAME = re.compile(r"[\w-]{1,100}\Z")
LOOPBACK = "127.0.0.1"


class NobodyListensError(ConnectionRefusedError):
    """No program listens under that name; raised where a connection would be refused."""


def check_address(text: str) -> None:
    """Raise `UsageError` if an address is not valid."""
    if text.startswith(PREFIX):
        _check_name(text.removeprefix(PREFIX))
    else:
        _parse_host_port(text)


def resolve_address(address: str) -> tuple[str, int]:
    """The host and port to connect to now. Raises `NobodyListensError`, a kind of `OSError`."""
    if not address.startswith(PREFIX):
        return _parse_host_port(address)
    name = address.removeprefix(PREFIX)
    try:
        return _parse_host_port(_note(name).read_text())
    except FileNotFoundError:
        raise NobodyListensError(f"no program on this machine listens as {name} yet") from None


def listening_at(address: str) -> tuple[str, int, str]:
    """The host and port to listen at, and the name to announce it under, which may be empty."""
    if address.startswith(PREFIX):
        return LOOPBACK, 0, address.removeprefix(PREFIX)
    return *_parse_host_port(address, least=0), ""


def is_closed(address: str, cookie: str) -> bool:
    """Whether an address is protected from strangers: by being on loopback, or by a cookie."""
    return bool(cookie) or listening_at(address)[0] in (LOOPBACK, "::1", "localhost")


@contextlib.contextmanager
def announce(name: str, address: tuple[str, int]) -> Iterator[None]:
    """Make `auto:NAME` resolve to this address for the block; without a name, do nothing."""
    if not name:
        yield
        return
    note, said = _note(name), "{}:{}".format(*address)
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = note.with_suffix(f".{secrets.token_hex(4)}")
    fresh.write_text(said)
    with _alone(note.parent):
        fresh.replace(note)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError), _alone(note.parent):
            if note.read_text() == said:  # no other program has taken the name since
                note.unlink()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder for the duration of the block; the lock ends if the process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _note(name: str) -> Path:
    _check_name(name)
    return cache_folder("ports", ENVIRONMENT) / name


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise UsageError(
            f"{name!r} is not a valid port name: use letters, digits, - and _, as in auto:texts"
        )


def _parse_host_port(text: str, least: int = 1) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not least <= int(port) < 1 << 16:
        raise UsageError(
            f"{text!r} is not a valid address: use host:port, such as 127.0.0.1:6067, or auto:NAME"
        )
    return host.strip("[]"), int(port)
