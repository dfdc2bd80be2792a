"""Messages of NATS JetStream: ten members of one pull consumer, each message acknowledged and that
confirmed. Its own venv.

python nats_job.py ADDRESS COUNT → seconds from the first message taken to the last confirmed
"""

from __future__ import annotations

import asyncio
import sys
import time

import nats
from nats.errors import TimeoutError as NoMessage
from nats.js.client import JetStreamContext

MEMBERS = 10
TAKEN = 64


async def member(jetstream: JetStreamContext, left: list[int]) -> None:
    subscription = await jetstream.pull_subscribe("jobs", "bench", stream="JOBS")
    while left[0] > 0:
        try:
            messages = await subscription.fetch(TAKEN, timeout=1)
        except NoMessage:
            continue
        await asyncio.gather(*(message.ack_sync(timeout=30) for message in messages))
        left[0] -= len(messages)


async def main(address: str, count: int) -> None:
    client = await nats.connect(address)
    jetstream = client.jetstream(publish_async_max_pending=4096)
    await jetstream.add_stream(name="JOBS", subjects=["jobs"])
    body = b'{"user": "u1", "amount": 1.0}'
    for first in range(0, count, 1000):
        some = range(first, min(first + 1000, count))
        await asyncio.gather(*[await jetstream.publish_async("jobs", body) for _ in some])
    left = [count]
    began = time.monotonic()
    await asyncio.gather(*(member(jetstream, left) for _ in range(MEMBERS)))
    print(time.monotonic() - began)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
