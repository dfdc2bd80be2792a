"""Jobs on PostgreSQL, by procrastinate: ten at a time, one of a lock at a time. Its own venv.

python procrastinate_job.py DATABASE COUNT KEYS → seconds from the first job taken to the last done
"""

from __future__ import annotations

import asyncio
import sys
import time

from procrastinate import App, PsycopgConnector


async def main(database: str, count: int, keys: int) -> None:
    app = App(connector=PsycopgConnector(conninfo=database))

    @app.task(name="handle")
    async def handle(number: int) -> None:
        del number

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for first in range(0, count, 1000):
            some = range(first, min(first + 1000, count))
            for lock in {n % keys for n in some}:
                mine = [{"number": n} for n in some if n % keys == lock]
                await handle.configure(lock=f"u{lock}").batch_defer_async(*mine)
        began = time.monotonic()
        await app.run_worker_async(concurrency=10, wait=False, listen_notify=False)
        print(time.monotonic() - began)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
