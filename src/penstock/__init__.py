"""Penstock: transactional event streams for Python.

    import penstock

    class Order(penstock.Record):
        user: str
        amount: float

    with penstock.open("penstock.db") as log:
        log.apply([penstock.CreateStream(penstock.declare("orders", Order, key="user"))])
        with penstock.Producer(log) as producer:
            producer.send("orders", Order(user="ada", amount=9.5))
        for event in penstock.read_events(log, "orders", Order):
            print(event.data)

The names below are the public API; docs/log.md is the place to start.
"""

from penstock.app import (
    App,
    AppStream,
    AppTable,
    Channel,
    Context,
    DeadLetter,
    Emit,
    Entry,
    SinkDescription,
    SourceDescription,
    TableView,
    WindowedEntry,
    hopping,
    session,
    tumbling,
    window_key,
)
from penstock.errors import PenstockError
from penstock.groups.group import Group
from penstock.groups.messages import GroupMessage
from penstock.groups.outcomes import GroupRules
from penstock.groups.transactions import GroupTransaction
from penstock.log import open_log as open  # noqa: A004  penstock.open reads as it should
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Limits, Log, Pin
from penstock.log.batch import Batch
from penstock.log.declaring.objects import (
    AlterStream,
    CreateNamespace,
    CreateStream,
    DropNamespace,
    DropStream,
    GrowStream,
    Stream,
    StreamSpec,
    declare,
)
from penstock.log.reading.read import ReadOptions, read_batches, read_changes, read_events
from penstock.log.reading.table import Table
from penstock.log.writing.pool import TransactionPool
from penstock.log.writing.transaction import Transaction
from penstock.producer import Place, Producer, ProducerOptions
from penstock.records import Digits, Event, Record, StoredEvent

__version__ = "0.1.0"

__all__ = [
    "AlterStream",
    "App",
    "AppStream",
    "AppTable",
    "Batch",
    "Channel",
    "Commit",
    "CommitOptions",
    "Committed",
    "Context",
    "CreateNamespace",
    "CreateStream",
    "DeadLetter",
    "Digits",
    "DropNamespace",
    "DropStream",
    "Emit",
    "Entry",
    "Event",
    "Group",
    "GroupMessage",
    "GroupRules",
    "GroupTransaction",
    "GrowStream",
    "Holder",
    "Limits",
    "Log",
    "PenstockError",
    "Pin",
    "Place",
    "Producer",
    "ProducerOptions",
    "ReadOptions",
    "Record",
    "SinkDescription",
    "SourceDescription",
    "StoredEvent",
    "Stream",
    "StreamSpec",
    "Table",
    "TableView",
    "Transaction",
    "TransactionPool",
    "WindowedEntry",
    "declare",
    "hopping",
    "open",
    "read_batches",
    "read_changes",
    "read_events",
    "session",
    "tumbling",
    "window_key",
]
