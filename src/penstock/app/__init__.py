"""Apps: streams, tables, agents, windows and joins, declared without Spark."""

from penstock.app.declaring.app import App
from penstock.app.declaring.context import Context, TableView
from penstock.app.declaring.descriptions import SinkDescription, SourceDescription
from penstock.app.declaring.entry import Entry, WindowedEntry
from penstock.app.declaring.streams import AppStream, Emit
from penstock.app.declaring.tables import AppTable, window_key
from penstock.app.declaring.windows import hopping, session, tumbling
from penstock.app.running.feeds import Channel
from penstock.log.letters import DeadLetter

__all__ = [
    "App",
    "AppStream",
    "AppTable",
    "Channel",
    "Context",
    "DeadLetter",
    "Emit",
    "Entry",
    "SinkDescription",
    "SourceDescription",
    "TableView",
    "WindowedEntry",
    "hopping",
    "session",
    "tumbling",
    "window_key",
]
