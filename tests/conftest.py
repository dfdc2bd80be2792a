"""What all tests share: the report of checklist rows, a Spark session, and a broker."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from penstock.spark.session import close_session
from penstock.testing.apps import test_session
from penstock.testing.brokers import Brokers, BrokersError, jars
from tests.connect.hosting import SinkProcess
from tests.rows import RowPlugin


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RowPlugin(), "penstock-rows")
    # Before Spark starts, whose workers materialise tables too.
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-tables-")
    # Whoever is started in the background of a shell ignores interrupts, and so would every
    # program that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Most programs of tests live for seconds: Java need not make the best of its code.
    os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


LONGEST = (
    "kafka/test_kills.py",
    "kafka/test_exactly_once.py",
    "spark/test_pushing.py",
    "spark/test_apps.py",
    "fault/test_exactly_once.py",
    "kafka/test_cluster.py",
    "groups/test_kills.py",
    "connect/test_push.py",
    "kafka/test_spark_cluster.py",
    "spark/test_readme.py",
    "kafka/test_connectors.py",
    "cli/test_apps.py",
    "spark/test_declarative.py",
    "spark/test_refusals.py",
    "spark/test_nexmark.py",
    "spark/test_examples.py",
    "spark/test_standby.py",
)
"""Files that take a minute or more each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: a process that gets one of them at the end would be waited for."""
    rank = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))
    items.sort(key=lambda item: not uses_spark(item.path))


@functools.cache
def uses_spark(file: Path) -> bool:
    """Whether tests of a file need the Spark session."""
    return "spark: SparkSession" in file.read_text("utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return ByFile(config, log)


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file is run by one process, and all files with the Spark session by one and the same."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "spark" if uses_spark(self.config.rootpath / file) else file


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop("PENSTOCK_CACHE"), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = children()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test ends what it starts; what it leaves behind must not meet the next one."""
    yield
    before = item.stash[_BEFORE] if _BEFORE in item.stash else children()
    left = children() - before
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {sorted(left)} were left running"


_BEFORE = pytest.StashKey[frozenset[int]]()


def children() -> frozenset[int]:
    """The Python programs that this one has started and that still run; servers are shared."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            program = stat.with_name("cmdline").read_bytes().split(b"\0")[0].decode()
            if int(parent) == os.getpid() and state != "Z" and program == sys.executable:
                found.add(int(stat.parent.name))
    return frozenset(found)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests."""
    session = test_session()
    yield session
    close_session(session)
    test_session.cache_clear()


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """Kafka itself; where it cannot be had, tests are skipped, and in CI they fail."""
    try:
        return jars()
    except BrokersError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"NO KAFKA, NOTHING OF IT IS TESTED: {error}")


@pytest.fixture(scope="session")
def broker(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """One broker for all tests of a process that need no more."""
    with Brokers(1, tmp_path_factory.mktemp("kafka")) as brokers:
        yield brokers
        brokers.kill(0)  # nobody needs its data


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new log on the engine that the test is parametrised with."""
    if request.param == "embedded":
        return str(tmp_path / "log.db")
    broker: Brokers = request.getfixturevalue("broker")
    return f"{broker.url}/t{secrets.token_hex(4)}"


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Other numbers in every run; the seed is printed, and PENSTOCK_SEED replays one."""
    seed = int(os.environ.get("PENSTOCK_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{request.node.name}: PENSTOCK_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[SinkProcess]:
    """A file sink that is not started yet."""
    found = SinkProcess(tmp_path / "sink")
    try:
        yield found
    finally:
        found.stop()
