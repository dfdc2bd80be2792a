"""Feeds the app with what is published on a Redis channel.

python examples/words/redis_subscriber.py redis://localhost/0 texts
"""

from __future__ import annotations

import sys

import redis
from descriptions import Text, Texts


def main(url: str, channel: str) -> None:
    subscription = redis.Redis.from_url(url).pubsub(ignore_subscribe_messages=True)
    subscription.subscribe(channel)
    with Texts.from_arguments().in_script() as out:
        print(f"subscribed to {channel}", flush=True)
        for message in subscription.listen():
            out.write(Text(message["data"].decode()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
