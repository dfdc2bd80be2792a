"""Where connectors meet: `host:port`, or `auto:NAME`, a free port of this machine under a name.

Whoever listens takes a free port and leaves a note of it; whoever dials looks the name up each
time, so it follows when the other is started again. Only for programs of one user on one machine.
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
from penstock.log.folders import cache_folder

PREFIX = "auto:"
ENVIRONMENT = "PENSTOCK_PORTS"
_NAME = re.compile(r"[\w-]{1,100}\Z")
LOOPBACK = "127.0.0.1"


class NobodyListensError(ConnectionRefusedError):
    """No program has taken a port under that name; raised where a connection would be refused."""


def check_address(text: str) -> None:
    """Raises `UsageError` saying what is wrong with an address."""
    if text.startswith(PREFIX):
        _check_name(text.removeprefix(PREFIX))
    else:
        _parsed(text)


def resolved(address: str) -> tuple[str, int]:
    """The host and port to dial now. Raises `NobodyListensError`, a kind of `OSError`."""
    if not address.startswith(PREFIX):
        return _parsed(address)
    name = address.removeprefix(PREFIX)
    try:
        return _parsed(_note(name).read_text())
    except FileNotFoundError:
        raise NobodyListensError(f"nobody listens as {name} on this machine yet") from None


def listening_at(address: str) -> tuple[str, int, str]:
    """The host and port to listen at, and the name to announce it under, or none."""
    if address.startswith(PREFIX):
        return LOOPBACK, 0, address.removeprefix(PREFIX)
    return *_parsed(address, least=0), ""


def is_closed(address: str, cookie: str) -> bool:
    """Whether only those who may can come in there: on loopback, or with a cookie."""
    return bool(cookie) or listening_at(address)[0] in (LOOPBACK, "::1", "localhost")


@contextlib.contextmanager
def announced(name: str, address: tuple[str, int]) -> Iterator[None]:
    """Have `auto:NAME` lead here while the block lasts; without a name, nothing."""
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
            if note.read_text() == said:  # nobody else has taken the name meanwhile
                note.unlink()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else changes notes while the block lasts; a process that dies lets go."""
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
            f"{name!r} names no port: write letters, digits, - and _, as in auto:texts"
        )


def _parsed(text: str, least: int = 1) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not least <= int(port) < 1 << 16:
        raise UsageError(
            f"{text!r} is no address: write host:port, as in 127.0.0.1:6067, or auto:NAME"
        )
    return host.strip("[]"), int(port)
