"""The contract suite: what every engine of the log promises, as tests.

An engine's own test module subclasses `LogContract` and gives it a harness:

    class TestEmbedded(LogContract):
        engine = "embedded"

        @pytest.fixture
        def harness(self, tmp_path): ...

Where engines differ, `penstock.log.api` says so in words; the tests hold for all of them.
"""

from penstock.testing.contract.commits import Commits
from penstock.testing.contract.events import Events
from penstock.testing.contract.objects import Objects
from penstock.testing.contract.reading import Reading
from penstock.testing.contract.refusals import Refusals
from penstock.testing.contract.setting import (
    Harness,
    Order,
    commit,
    commit_as,
    create,
    make_part,
    orders,
)
from penstock.testing.contract.staging import Staging
from penstock.testing.contract.tables import Tables
from penstock.testing.contract.times import Times
from penstock.testing.contract.upkeep import Upkeep


class LogContract(Reading, Commits, Events, Refusals, Times, Staging, Objects, Tables, Upkeep):
    """Every promise; subclass it with a `harness` fixture."""


__all__ = [
    "Harness",
    "LogContract",
    "Order",
    "commit",
    "commit_as",
    "create",
    "make_part",
    "orders",
]
