"""Addresses and clients of Redis for sources and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.errors import UsageError

HOPELESS = (
    redis.AuthenticationError, redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
)  # fmt: skip
HOW = (
    "use redis://HOST:PORT/DATABASE, where DATABASE is a number; in a password, write : / @ and % "
    "as %3A, %2F, %40 and %25"
)
CONNECT_TIMEOUT_S = 2.0
TIMEOUT_S = 5.0


def parse_server(url: str) -> tuple[str, str]:
    """The host of a Redis, and its port and database.

    Raises `UsageError` if the address cannot be parsed. The message gives no details: the invalid
    part may be the password.
    """
    try:
        found = urlsplit(url)
        host, port, name = found.hostname or "", found.port or 6379, found.path.strip("/") or "0"
    except ValueError:
        raise UsageError(f"the Redis address cannot be parsed: {HOW}") from None
    if found.scheme == "unix":
        return "", f"{port}/{name}"
    if found.scheme not in ("redis", "rediss") or not name.isdigit():
        raise UsageError(f"the Redis address cannot be parsed: {HOW}")
    return host, f"{port}/{name}"


def make_client(url: str, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """A client that connects on first use, waits at most `timeout_s`, and does not retry."""
    parse_server(url)
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=30,
    )


@contextmanager
def refuse_hopeless() -> Iterator[None]:
    """Raise `UsageError` if Redis does not permit what the block does."""
    try:
        yield
    except HOPELESS as error:
        raise UsageError(f"Redis refuses the connection: {error}") from error
