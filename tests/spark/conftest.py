"""One Spark session for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from penstock.spark.session import close_session
from penstock.testing.apps import test_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = test_session()
    yield session
    close_session(session)
    test_session.cache_clear()
