"""Subscribe and publish: a table of sets, and a changelog that records each change to them.

    python examples/subscribe.py

Expected output:

    tea: add ada
    tea: add bob
    tea: remove ada
    to bob: the kettle is on
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
from penstock import Entry, TableView
from penstock.spark import running

app = penstock.App("chat")


class Subscription(penstock.Record):
    topic: str
    account: str
    leave: bool = False


class Post(penstock.Record):
    topic: str
    message: str


class Message(penstock.Record):
    account: str
    message: str


subscriptions = app.stream("subscriptions", Subscription, key="topic")
posts = app.stream("posts", Post, key="topic")
messages = app.stream("messages", Message, key="account")
subscribers = app.table("subscribers", value=set[str])


@app.agent(subscriptions, state=subscribers)
def subscribe(wish: Subscription, members: Entry[set[str]]) -> None:
    if wish.leave:
        members.value.discard(wish.account)
    else:
        members.value.add(wish.account)


@app.agent(posts, reads=subscribers, to=messages)
def publish(post: Post, subscribers: TableView[set[str]]) -> Iterator[Message]:
    for account in sorted(subscribers.get(post.topic) or ()):
        yield Message(account, post.message)


def main() -> None:
    wishes = [
        Subscription("tea", "ada"),
        Subscription("tea", "bob"),
        Subscription("tea", "ada", leave=True),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.open(os.environ.get("PENSTOCK_LOG") or Path(folder, "chat.db")) as log,
    ):
        with (
            running(app, log, checkpoints=Path(folder, "spark")) as runner,
            penstock.Producer(log) as producer,
        ):
            for wish in wishes:
                producer.send("subscriptions", wish)
                producer.flush()
                runner.until_idle(120)
            producer.send("posts", Post("tea", "the kettle is on"))
            producer.flush()
            runner.until_idle(120)
        for event in penstock.read_events(log, "subscribers"):
            change: Any = event.data
            print(f"{(event.key or b'').decode()}: {change.action} {change.value}")
        for told in penstock.read_events(log, "messages", Message):
            print(f"to {told.data.account}: {told.data.message}")


if __name__ == "__main__":
    main()
