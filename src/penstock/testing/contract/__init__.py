"""The contract suite: what every engine of the log promises, as tests.

The test module of an engine subclasses `LogContract` and provides a harness:

    class TestEmbedded(LogContract):
        engine = "embedded"

        @pytest.fixture
        def harness(self, tmp_path): ...

`penstock.log.api` describes where engines differ; the tests hold for all of them.
"""

from penstock.testing.contract.commits import CommitContract
from penstock.testing.contract.events import EventContract
from penstock.testing.contract.objects import ObjectContract
from penstock.testing.contract.reading import ReadingContract
from penstock.testing.contract.refusals import RefusalContract
from penstock.testing.contract.setting import (
    Harness,
    Order,
    commit,
    commit_as,
    create,
    make_part,
    orders,
)
from penstock.testing.contract.staging import StagingContract
from penstock.testing.contract.tables import TableContract
from penstock.testing.contract.times import TimeContract
from penstock.testing.contract.transactions import TransactionContract
from penstock.testing.contract.upkeep import UpkeepContract


class LogContract(
    ReadingContract,
    CommitContract,
    TransactionContract,
    EventContract,
    RefusalContract,
    TimeContract,
    StagingContract,
    ObjectContract,
    TableContract,
    UpkeepContract,
):
    """All promises; subclass it with a `harness` fixture."""


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
