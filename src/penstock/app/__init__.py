"""Apps: streams, tables, agents, windows and joins, declared without Spark."""

from penstock.app.app import App
from penstock.app.context import Context, TableView
from penstock.app.descriptions import SinkDescription, SourceDescription
from penstock.app.entry import Entry, WindowedEntry
from penstock.app.feeds import Channel
from penstock.app.streams import AppStream, Emit
from penstock.app.tables import AppTable, window_key
from penstock.app.windows import hopping, session, tumbling
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
