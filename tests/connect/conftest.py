"""Servers that connectors are tested with; where they cannot be had, tests are skipped, and in
CI they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from penstock.testing.servers import PostgresServer, RedisServer, ServerError


@contextmanager
def needed(what: str) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"NO {what}, NOTHING OF IT IS TESTED: {error}")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with needed("REDIS"), RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with needed("POSTGRESQL"), PostgresServer(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    """A Redis with nothing in it."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as found:
        yield found
