"""Where what blocks is done: in threads of our own, not in those of the loop's executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Do it in a thread of the executor, and wait for that."""
    return await asyncio.get_running_loop().run_in_executor(executor, work)
