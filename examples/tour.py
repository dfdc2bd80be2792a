"""A short tour of the log: streams, a transaction, a table, and a kill -9 in the middle.

Run it with `python examples/tour.py`. It works in a temporary folder and leaves nothing behind.
"""

from __future__ import annotations

import datetime as dt
import random
import signal
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from rich.console import Console

import penstock

EVENTS = 40_000
console = Console(highlight=False)


class Order(penstock.Record):
    user: str
    number: int
    amount: Annotated[Decimal, penstock.Digits(10, 2)]
    at: dt.datetime


class Spend(penstock.Record):
    user: str
    total: Annotated[Decimal, penstock.Digits(12, 2)]


def order(number: int) -> Order:
    rng = random.Random(number)
    amount = Decimal(rng.randrange(100, 99_999)) / 100
    return Order(f"user-{rng.randrange(5)}", number, amount, dt.datetime.now(dt.UTC))


def shop(path: str, start: int) -> None:
    """The process that is killed: sends orders and reports which are safe."""
    with penstock.open(path) as log, penstock.Producer(log) as producer:
        for number in range(start, EVENTS):
            producer.send("orders", order(number), id=number)
            if number % 500 == 0:
                producer.flush()
                print(number, flush=True)


def run_shop(path: Path, start: int, kill_at: int | None) -> int:
    """Run the shop; returns the last order that it reported as safe."""
    command = [sys.executable, __file__, str(path), str(start)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None  # noqa: S101  asked for above
    safe = start
    for line in child.stdout:
        safe = int(line)
        if kill_at is not None and safe >= kill_at:
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    return safe


def add_up(log: penstock.Log) -> dict[str, Decimal]:
    """Read every order once and write the totals and the position as one transaction."""
    totals: dict[str, Decimal] = {}
    seen = 0
    for event in penstock.read_events(log, "orders", Order):
        totals[event.data.user] = totals.get(event.data.user, Decimal(0)) + event.data.amount
        seen = event.offset
    with penstock.Transaction(log, "add-up") as tx:
        for user, total in totals.items():
            tx.send("spend", Spend(user, total))
        tx.save("add-up/position", str(seen).encode())
    return totals


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "penstock.db"
        console.print("[bold]1.[/] A log is one file. Two streams: orders, and a table of totals.")
        with penstock.open(path) as log:
            orders = penstock.declare("orders", Order, time="at", ids="producer")
            spend = penstock.declare("spend", Spend, key="user", table=True)
            log.apply([penstock.CreateStream(orders), penstock.CreateStream(spend)])

        console.print(
            f"[bold]2.[/] A shop sends {EVENTS:,} orders. Halfway through, it is killed with -9 …"
        )
        safe = run_shop(path, 0, kill_at=EVENTS // 2)
        console.print(f"   … after it learned that everything up to order {safe:,} is safe.")
        console.print("[bold]3.[/] It starts again a little earlier, to be sure; ids drop repeats.")
        run_shop(path, max(0, safe - 5000), kill_at=None)

        with penstock.open(path) as log:
            console.print("[bold]4.[/] A transaction writes the totals and its position as one:")
            totals = add_up(log)
            table = penstock.Table(log, "spend", Spend)
            for key, entry in table.items():
                console.print(f"   {key.decode()}  {entry.total:>12,}")
            found = [event.data.number for event in penstock.read_events(log, "orders", Order)]
            sent = sum((order(number).amount for number in range(EVENTS)), Decimal(0))
            counted = sum(totals.values(), Decimal(0))
            damage = list(log.verify())
        once = sorted(found) == list(range(EVENTS))
        good = once and sent == counted and not damage
        console.print("[bold]5.[/] The check:")
        console.print(
            f"   orders sent {EVENTS:,}, orders in the log {len(found):,}, each once: {once}"
        )
        console.print(f"   amount sent {sent:,}, amount counted {counted:,}")
        console.print("[green]exact, to the cent[/]" if good else "[red]something is wrong[/]")
        return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) == 3:
        shop(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
