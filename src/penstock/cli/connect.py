"""Sources that ship, as programs: `penstock connect NAME …`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    JsonOption,
    UntilIdleOption,
    examples,
    parse_setting,
)
from penstock.cli.output import count, note, say, say_json, stopping
from penstock.connect.clients.source import ConnectorOptions, Source, SourceConnector
from penstock.connect.credentials import BY_NAME, reveal
from penstock.connect.sources.file import FileSource
from penstock.errors import UsageError

connect = typer.Typer(
    no_args_is_help=True,
    help="Run a connector: a source sends to a listener (`penstock listen`), a sink receives what "
    "apps push (`app.sink`).",
)
TICK_S = 0.2
ToOption = Annotated[
    str,
    typer.Option("--to", metavar="HOST:PORT", help="Address of `penstock listen`, or auto:NAME."),
]
CookieOption = Annotated[
    str,
    typer.Option(
        "--cookie",
        envvar="PENSTOCK_COOKIE",
        parser=reveal,
        metavar="SECRET",
        help=f"The secret shared with the other side. {BY_NAME}",
    ),
]
RedisArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", parser=reveal, show_default=False, help=f"redis://HOST:PORT/DB. {BY_NAME}"
    ),
]
PostgresArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        parser=reveal,
        show_default=False,
        help=f"postgresql://USER@HOST/DATABASE. {BY_NAME}",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the connector stream. Default: derived from what it reads.",
    ),
]
InstanceOption = Annotated[
    str,
    typer.Option(
        "--instance",
        metavar="NAME",
        help="Name of this connector. Default: host, pid and a random part.",
    ),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        "-s",
        metavar="NAME=VALUE",
        help=f"A setting of librdkafka; may be repeated. {BY_NAME}",
    ),
]
LISTENER = "127.0.0.1:6067"


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Say which extra is missing, where a connector's package is."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this connector needs the package {error.name}: pip install 'penstock[{extra}]'"
        ) from None


# Sources


@connect.command(
    "file",
    epilog=examples(
        "penstock connect file /var/log/app.log", "penstock connect file orders.jsonl --until-idle"
    ),
)
def file_source(  # noqa: PLR0913  one parameter per option
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to read; it may be rotated.")
    ],
    name: NameOption = None,
    until_idle: UntilIdleOption = False,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Directory for the record of files already read. Default: beside the file.",
        ),
    ] = None,
    on_gone: Annotated[
        Literal["fail", "skip"],
        typer.Option("--on-gone", help="What to do if the next data no longer exists."),
    ] = "fail",
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the lines of a file, including lines added later."""
    whole = path.resolve()
    called = name or f"file/{socket.gethostname()}{whole}"
    source = FileSource(called, whole, until_end=until_idle, on_gone=on_gone, state=state)
    run_source(source, to, cookie, instance, json)


@connect.command(
    "kafka",
    epilog=examples("penstock connect kafka broker:9092 clicks views --group penstock"),
)
def kafka_source(  # noqa: PLR0913  one parameter per option
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, separated by commas.")],
    topics: Annotated[list[str], typer.Argument(help="The topics to read.")],
    group: Annotated[
        str,
        typer.Option(
            "--group", metavar="NAME", help="Consumer group in which several share the work."
        ),
    ],
    start: Annotated[
        Literal["earliest", "latest"],
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where to start reading a new partition: earliest or latest.",
        ),
    ] = "earliest",
    on_gone: Annotated[
        Literal["fail", "earliest", "latest"],
        typer.Option("--on-gone", help="What to do if Kafka has removed the next message."),
    ] = "fail",
    setting: SettingOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the messages of Kafka topics; each partition is a connector stream."""
    with needing("kafka"):
        from penstock.connect.sources.kafka import KafkaTopics

    options = ConnectorOptions(program="kafka", instance=instance, cookie=cookie, tell=note)
    found = KafkaTopics(
        to, servers, topics, group, start=start, on_gone=on_gone, options=options,
        settings=dict(parse_setting(item) for item in setting or []),
    )  # fmt: skip
    stop = threading.Event()
    with stopping(stop, "closing the connection"), found:
        note(f"sending {', '.join(topics)} to {to}")
        while not stop.wait(TICK_S):
            found.check()
    _say_sent(", ".join(topics), found.connector.counts.messages, json)


@connect.command(
    "redis",
    epilog=examples(
        "penstock connect redis redis://localhost/0 orders",
        "penstock connect redis redis://localhost/0 orders --group penstock",
        "penstock connect redis redis://localhost/0 news --subscribe",
    ),
)
def redis_source(  # noqa: PLR0913  one parameter per option
    url: RedisArgument,
    key: Annotated[str, typer.Argument(metavar="NAME", help="The stream or channel.")],
    group: Annotated[
        str,
        typer.Option(
            "--group", metavar="NAME", help="Read the stream through this consumer group."
        ),
    ] = "",
    subscribe: Annotated[
        bool, typer.Option("--subscribe", help="NAME is a channel, delivered at most once.")
    ] = False,
    on_gone: Annotated[
        Literal["fail", "skip"],
        typer.Option("--on-gone", help="What to do if the next data no longer exists."),
    ] = "fail",
    name: NameOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the entries of a Redis stream, or the messages of a channel."""
    with needing("redis"):
        from penstock.connect.sources import redis, redis_channel
        from penstock.connect.systems.redis import parse_server

    host, rest = parse_server(url)
    server = f"redis/{_host(host)}:{rest}"
    source: Source
    if subscribe:
        called = name or f"{server}/channel/{key}"
        source = redis_channel.RedisSubscribeSource(called, url, key)
    elif group:
        called = name or f"{server}/group/{group}/{key}"
        source = redis.RedisGroupSource(called, url, key, group, on_gone=on_gone)
    else:
        source = redis.RedisStreamSource(name or f"{server}/{key}", url, key, on_gone=on_gone)
    run_source(source, to, cookie, instance, json)


@connect.command(
    "postgres",
    epilog=examples(
        "penstock connect postgres postgresql://app@localhost/shop orders --table orders",
        "penstock connect postgres postgresql://app@localhost/shop news",
    ),
)
def postgres_source(  # noqa: PLR0913  one parameter per option
    url: PostgresArgument,
    channel: Annotated[str, typer.Argument(help="The channel to listen on.")],
    table: Annotated[
        str,
        typer.Option(
            "--table",
            metavar="NAME",
            help="Send the rows of this table; notifications only announce new ones.",
        ),
    ] = "",
    id_column: Annotated[
        str,
        typer.Option("--id-column", metavar="COLUMN", help="The column that numbers the rows."),
    ] = "id",
    name: NameOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the rows of a PostgreSQL table, each once, or notifications, at most once."""
    with needing("postgres"):
        from penstock.connect.sources.postgres import PostgresListenSource
        from penstock.connect.systems.postgres import parse_database

    host, rest = parse_database(url)
    server = f"postgres/{_host(host)}:{rest}"
    called = name or (f"{server}/{table}" if table else f"{server}/channel/{channel}")
    source = PostgresListenSource(called, url, channel, table=table, id_column=id_column)
    run_source(source, to, cookie, instance, json)


def _host(name: str) -> str:
    """A host as others know it, for a name that no two sources should share."""
    is_here = name in ("", "localhost", "127.0.0.1", "::1") or name.startswith("/")
    return socket.gethostname() if is_here else name


def run_source(source: Source, to: str, cookie: str, instance: str, json: bool) -> None:
    """Run a source until it ends or is stopped; raises why it cannot go on."""
    options = ConnectorOptions(
        program=type(source).__name__, instance=instance, cookie=cookie, tell=note
    )
    stop = threading.Event()
    with (
        stopping(stop, "closing the connection"),
        SourceConnector(to, [source], options) as connector,
    ):
        note(f"sending {source.name} to {to}")
        while not stop.wait(TICK_S):
            connector.check()
            if source.name in connector.done:
                break
    _say_sent(source.name, connector.counts.messages, json)


def _say_sent(name: str, messages: int, json: bool) -> None:
    if json:
        say_json({"sent": messages, "of": name})
    else:
        say(f"sent {count(messages, 'message')} from {name}")
