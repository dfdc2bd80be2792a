"""Publishes the app's counts on a Redis channel.

python examples/words/redis_publisher.py redis://localhost/0 counts
"""

from __future__ import annotations

import sys

import redis
from descriptions import Counts


def main(url: str, channel: str) -> None:
    client = redis.Redis.from_url(url)
    with Counts.from_arguments().in_script() as counts:
        for count in counts:
            client.publish(channel, f"{count.word} {count.count}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
