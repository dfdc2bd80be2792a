"""Groups from asyncio, on both engines."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock import CreateStream, Log, Table, declare, read_events
from penstock.aio import AsyncGroup
from penstock.errors import ClosedError, LeaseLostError
from penstock.groups.outcomes import GroupRules
from tests.groups.conftest import Order, on_both, send

pytestmark = on_both("H17")
WAIT_S = 30.0


def test_tasks_take_and_acknowledge(log: Log) -> None:
    send(log, [(f"u{n % 7}", n) for n in range(60)])
    done: list[int] = []

    async def member(group: AsyncGroup[Order]) -> None:
        async for message in group:
            done.append(message.data.number)
            await message.ack()

    async def work() -> None:
        async with AsyncGroup(log, "orders", "billing", Order) as group:
            members = [asyncio.create_task(member(group)) for _ in range(5)]
            async with asyncio.timeout(WAIT_S * 2):
                while len(done) < 60:
                    await asyncio.sleep(0.01)
        await asyncio.gather(*members)  # closing ends them
        with pytest.raises(ClosedError):
            await group.take()

    before = threading.active_count()
    asyncio.run(work())
    assert sorted(done) == list(range(60))
    for user in range(7):
        assert [n for n in done if n % 7 == user] == sorted(n for n in done if n % 7 == user)
    assert threading.active_count() <= before + 4  # the executor's own, which are idle
    asyncio.run(_check_all_done(log))


async def _check_all_done(log: Log) -> None:
    async with AsyncGroup(log, "orders", "billing", Order) as group:
        assert await group.take(0.5) is None


def test_a_task_that_is_cancelled_has_taken_nothing(log: Log) -> None:
    async def work() -> None:
        async with AsyncGroup(log, "orders", "billing", Order) as group:
            waiting = [asyncio.create_task(group.take_many(5)) for _ in range(20)]
            await asyncio.sleep(0.2)
            for task in waiting:
                task.cancel()
            await asyncio.to_thread(send, log, [("ada", 1)])
            message = await group.take(WAIT_S)
            assert message is not None
            assert message.deliveries == 1
            await message.nack(0.0)
            again = await group.take(WAIT_S)
            assert again is not None
            assert again.deliveries == 2
            with pytest.raises(LeaseLostError):
                await message.ack()
            await group.ack([again])

    asyncio.run(work())


def test_a_transaction(log: Log) -> None:
    log.apply(
        [
            CreateStream(declare("receipts", Order)),
            CreateStream(
                declare("seen", Order, key="user", table=True, writer="group/orders/billing")
            ),
        ]
    )
    send(log, [("ada", 1), ("bob", 2)])

    async def work() -> None:
        rules = GroupRules(lease_s=60)
        async with AsyncGroup(log, "orders", "billing", Order, rules=rules) as group:
            for _ in range(2):
                message = await group.take(WAIT_S)
                assert message is not None
                with pytest.raises(ZeroDivisionError):
                    async with group.transaction() as tx:
                        tx.ack(message)
                        await tx.send("receipts", message.data)
                        raise ZeroDivisionError
                async with group.transaction(("till", message.data.number)) as tx:
                    assert await tx.get("seen", message.data.user, Order) is None
                    tx.ack(message)
                    await tx.send("receipts", message.data)
                    await tx.put_if("seen", message.data.user, message.data, None)
                with pytest.raises(LeaseLostError):
                    await message.ack()
            assert await group.take(0.3) is None

    asyncio.run(work())
    assert sorted(e.data.number for e in read_events(log, "receipts", Order)) == [1, 2]
    assert Table(log, "seen", Order).get("bob") == Order("bob", 2)
