"""The demo: the shop of `shop.py` under load, killed with -9 halfway, and checked to the cent.

make demo
"""

from __future__ import annotations

import datetime as dt
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from examples.shop import Order, app
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid

import penstock
from penstock.app.declaring.plan import plan
from penstock.app.running.reports import agent_rows
from penstock.app.running.streams import make_streams

SECONDS = 3
ITEMS = ("tea", "milk", "jam", "bread", "honey", "salt")
console = Console(highlight=False)


class Customers(threading.Thread):
    """Customers who order in bursts; remembers what they ordered."""

    def __init__(self, log: penstock.Log) -> None:
        super().__init__(daemon=True)
        self._log = log
        self.sent: list[Order] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        with penstock.Producer(self._log) as producer:
            while not self.stopped.wait(0.05):
                for _ in range(random.randrange(200)):
                    amount = Decimal(random.randrange(1, 10_000)) / 100
                    user, item = f"user-{random.randrange(30):02}", random.choice(ITEMS)
                    order = Order(len(self.sent), user, item, amount, dt.datetime.now(dt.UTC))
                    producer.send("orders", order)
                    self.sent.append(order)


def start(path: Path) -> subprocess.Popen[bytes]:
    shop = Path(__file__).with_name("shop.py")
    command = [sys.executable, "-m", "penstock.cli", "run", str(shop), "--log", str(path)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)


def entries(log: penstock.Log, table: str) -> dict[str, Any]:
    try:
        held = penstock.Table[Any](log, table)
        return {key.decode(): value for key, value in held.items()}
    except penstock.PenstockError:
        return {}  # its query has not started yet


def view(log: penstock.Log, said: str) -> Group:
    """The current state of streams, tables and agents."""
    streams = Grid("stream", "events", box=None, header_style="bold cyan")
    for stream in log.streams():
        if stream.name.namespace != "_system":
            rows = sum(offsets.next for offsets in log.offsets(str(stream.name)).values())
            streams.add_row(str(stream.name), f"{rows:,}")
    sales = Grid("sales", "sold", "value", box=None, header_style="bold cyan")
    for item, row in entries(log, "sales").items():
        sales.add_row(item, f"{row.sold:,}", f"{row.value:,}")
    agents = Grid(
        "query", "partition", "offset", "lag", "state", box=None, header_style="bold cyan"
    )
    for place in agent_rows(log):
        agents.add_row(
            place.agent, str(place.partition), f"{place.offset:,}", f"{place.lag:,}", place.state
        )
    side = Grid.grid(padding=(0, 4))
    side.add_row(streams, sales)
    return Group(f"[bold]{said}[/bold]", "", side, "", agents)


def watch(
    log: penstock.Log, live: Live | None, said: str, until: Callable[[], bool], seconds: float
) -> None:
    """Show what happens until the condition holds, and for some seconds after that."""
    if live is None:
        console.print(said)
    give_up = time.monotonic() + 120
    happened: float | None = None
    while happened is None or time.monotonic() < happened + seconds:
        if happened is None and (until() or time.monotonic() > give_up):
            happened = time.monotonic()
        if live is not None:
            live.update(view(log, said), refresh=True)
        time.sleep(0.2)


def works(log: penstock.Log) -> bool:
    """Whether every query has handled something."""
    return {row.agent for row in agent_rows(log) if row.offset} >= set(app.definitions)


def positions(log: penstock.Log) -> int:
    return sum(row.offset for row in agent_rows(log))


def is_done(log: penstock.Log) -> bool:
    rows = agent_rows(log)
    return {row.agent for row in rows} >= set(app.definitions) and not any(r.lag for r in rows)


def check(log: penstock.Log, sent: list[Order]) -> bool:
    """Check that every definition has counted everything sent exactly once, to the cent."""
    amount = sum(order.amount for order in sent)
    totals, sales = entries(log, "totals"), entries(log, "sales")
    big = [order.id for order in sent if order.amount >= 80]
    rows: list[Any] = [event.data for event in penstock.read_events(log, "big_orders")]
    greeted = sum(1 for _ in penstock.read_events(log, "greetings"))
    found = [
        ("orders", len(sent), sum(row.sold for row in sales.values())),
        ("their value", amount, sum(row.value for row in sales.values())),
        ("spent, added up by an agent", amount, sum(row.value for row in totals.values())),
        ("big orders", sorted(big), sorted(row.id for row in rows)),
        ("greetings", len({(order.user, order.item) for order in sent}), greeted),
    ]
    grid = Grid("", "sent", "counted", "", box=None, header_style="bold cyan")
    for what, wanted, got in found:
        shown = [len(side) if isinstance(side, list) else side for side in (wanted, got)]
        mark = "[green]equal[/]" if wanted == got else "[red]DIFFERENT[/]"
        grid.add_row(what, f"{shown[0]:,}", f"{shown[1]:,}", mark)
    console.print(grid)
    return all(wanted == got for _, wanted, got in found)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, penstock.open(Path(folder, "shop.db")) as log:
        path = Path(folder, "shop.db")
        make_streams(log, plan(app))
        customers = Customers(log)
        live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        runner = start(path)
        if live is not None:
            live.start()
        try:
            customers.start()
            said = "customers place orders; a shop on Spark starts to handle them …"
            watch(log, live, said, lambda: works(log), SECONDS)
            runner.send_signal(signal.SIGKILL)
            runner.wait()
            said = "kill -9: nothing handles the orders, but customers keep ordering …"
            watch(log, live, said, lambda: True, 2)
            runner = start(path)
            before = positions(log)
            said = "restarted; it continues where it stopped …"
            watch(log, live, said, lambda: positions(log) > before, SECONDS)
            customers.stopped.set()
            customers.join()
            said = "the shop is closed; the remaining orders are handled …"
            watch(log, live, said, lambda: is_done(log), 0.5)
            runner.send_signal(signal.SIGTERM)
            runner.wait(60)
        finally:
            runner.kill()
            if live is not None:
                live.stop()
        is_right = check(log, customers.sent)
    console.print("exact, to the cent" if is_right else "[red]something is wrong[/]")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
