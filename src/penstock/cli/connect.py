"""Connectors that ship, as programs: `penstock connect NAME …`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import AtOption, check_closed, examples
from penstock.cli.output import flush, note, say, stopping
from penstock.connect.credentials import BY_NAME, hide, reveal
from penstock.connect.sink import Sink, SinkHost, SinkOptions
from penstock.connect.sinks.file import FileSink
from penstock.connect.source import ConnectorOptions, Source, SourceConnector
from penstock.connect.sources.file import FileSource
from penstock.errors import UsageError

connect = typer.Typer(
    no_args_is_help=True,
    help="Run a connector: a source feeds a listener (`penstock listen`), a sink takes what apps "
    "push (`app.sink`).",
)
TICK_S = 0.2
ToOption = Annotated[
    str,
    typer.Option(
        "--to", metavar="HOST:PORT", help="Where `penstock listen` listens; or auto:NAME."
    ),
]
CookieOption = Annotated[
    str,
    typer.Option(
        envvar="PENSTOCK_COOKIE",
        parser=reveal,
        metavar="SECRET",
        help=f"What the other side wants to know. {BY_NAME}",
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
    typer.Option("--name", help="The connector stream's name; by default, such as file/x.log."),
]
InstanceOption = Annotated[
    str, typer.Option("--instance", help="What this connector is called; by default host and pid.")
]
UntilEndOption = Annotated[
    bool, typer.Option("--until-end", help="Stop at what is the end now, when all is safe.")
]
StateOption = Annotated[
    Path, typer.Option("--state", help="The folder in which the sink keeps its transactions.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help=f"Any setting of librdkafka; may be repeated. {BY_NAME}"
    ),
]
LISTENER = "127.0.0.1:6067"
SINK = "127.0.0.1:6068"


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Say which extra is missing, where a connector's package is."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this connector needs more packages ({error.name}): pip install 'penstock[{extra}]'"
        ) from None


def register(app: typer.Typer) -> None:
    app.add_typer(connect, name="connect")


# Sources


@connect.command(
    "file",
    epilog=examples(
        "penstock connect file /var/log/app.log", "penstock connect file orders.jsonl --until-end"
    ),
)
def file_source(
    path: Annotated[Path, typer.Argument(help="The file; it may be rotated.")],
    name: NameOption = None,
    until_end: UntilEndOption = False,
    on_gone: Annotated[
        Literal["fail", "skip"], typer.Option(help="Where what comes next is not there any more.")
    ] = "fail",
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
) -> None:
    """Send the lines of a file, and those that are added to it."""
    whole = path.resolve()
    called = name or f"file/{socket.gethostname()}{whole}"
    source = FileSource(called, whole, until_end=until_end, on_gone=on_gone)
    run_source(source, to, cookie, instance)


@connect.command(
    "kafka",
    epilog=examples("penstock connect kafka broker:9092 clicks views --group penstock"),
)
def kafka_source(  # noqa: PLR0913  one parameter per option
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, with commas.")],
    topics: Annotated[list[str], typer.Argument(help="The topics to read.")],
    group: Annotated[str, typer.Option(help="The group in which several share the work.")],
    start: Annotated[
        Literal["earliest", "latest"], typer.Option(help="Where a new partition begins.")
    ] = "earliest",
    on_gone: Annotated[
        Literal["fail", "earliest", "latest"],
        typer.Option(help="Where Kafka has removed what comes next."),
    ] = "fail",
    setting: SettingOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
) -> None:
    """Send the messages of Kafka's topics; each partition is a connector stream."""
    with needing("kafka"):
        from penstock.connect.sources.kafka import KafkaTopics

    options = ConnectorOptions(program="kafka", instance=instance, cookie=cookie, tell=note)
    found = KafkaTopics(
        to, servers, topics, group, start=start, on_gone=on_gone, options=options,
        settings=dict(_setting(item) for item in setting or []),
    )  # fmt: skip
    stop = threading.Event()
    with stopping(stop, "the connection is ended"), found:
        while not stop.wait(TICK_S):
            found.check()


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
    key: Annotated[str, typer.Argument(metavar="NAME", help="The stream, or the channel.")],
    group: Annotated[str, typer.Option(help="Read the stream through this consumer group.")] = "",
    subscribe: Annotated[
        bool, typer.Option("--subscribe", help="NAME is a channel: at most once.")
    ] = False,
    on_gone: Annotated[
        Literal["fail", "skip"], typer.Option(help="Where what comes next is not there any more.")
    ] = "fail",
    name: NameOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
) -> None:
    """Send the entries of a Redis stream, or the messages of a channel."""
    with needing("redis"):
        from penstock.connect.sources import redis, redis_channel

    host, rest = redis.server_of(url)
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
    run_source(source, to, cookie, instance)


@connect.command(
    "postgres",
    epilog=examples(
        "penstock connect postgres postgresql://app@localhost/shop orders --table orders",
        "penstock connect postgres postgresql://app@localhost/shop news",
    ),
)
def postgres_source(
    url: PostgresArgument,
    channel: Annotated[str, typer.Argument(help="The channel to listen on.")],
    table: Annotated[
        str, typer.Option(help="Send the rows of this table; notifications only announce them.")
    ] = "",
    id_column: Annotated[str, typer.Option(help="The column that numbers the rows.")] = "id",
    name: NameOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
) -> None:
    """Send the rows of a PostgreSQL table, each once; or notifications, at most once."""
    with needing("postgres"):
        from penstock.connect.sources.postgres import PostgresListenSource, database_of

    host, rest = database_of(url)
    server = f"postgres/{_host(host)}:{rest}"
    called = name or (f"{server}/{table}" if table else f"{server}/channel/{channel}")
    source = PostgresListenSource(called, url, channel, table=table, id_column=id_column)
    run_source(source, to, cookie, instance)


def _host(name: str) -> str:
    """A host as others know it, for a name that no two sources should share."""
    is_here = name in ("", "localhost", "127.0.0.1", "::1") or name.startswith("/")
    return socket.gethostname() if is_here else name


def run_source(source: Source, to: str, cookie: str, instance: str) -> None:
    """Run a source until it ends or is stopped; raises why it cannot go on."""
    options = ConnectorOptions(
        program=type(source).__name__, instance=instance, cookie=cookie, tell=note
    )
    stop = threading.Event()
    with (
        stopping(stop, "the connection is ended"),
        SourceConnector(to, [source], options) as connector,
    ):
        note(f"sending {source.name} to {to}")
        while not stop.wait(TICK_S):
            connector.check()
            if source.name in connector.done:
                break
    say(f"sent {connector.counts.messages:,} messages of {source.name}")


def _setting(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not name or not mark:  # not shown: it may be the value
        raise UsageError("a --setting without a name, or without =: write NAME=VALUE")
    return name, reveal(value)


# Sinks


@connect.command("file-sink", epilog=examples("penstock connect file-sink out --at 127.0.0.1:6068"))
def file_sink(
    folder: Annotated[Path, typer.Argument(help="Where the files are; one for each worker.")],
    at: AtOption = SINK,
    cookie: CookieOption = "",
) -> None:
    """Append what apps push to files; what is not committed is cut off again."""
    run_sink(
        lambda worker: FileSink(folder, worker), folder,
        SinkOptions(address=at, cookie=cookie),
    )  # fmt: skip


@connect.command(
    "redis-sink",
    epilog=examples(
        "penstock connect redis-sink redis://localhost/0 --hash users --state sink",
        "penstock connect redis-sink redis://localhost/0 --channel news --state sink",
    ),
)
def redis_sink(
    url: RedisArgument,
    state: StateOption,
    hash_: Annotated[str, typer.Option("--hash", help="Keep a hash NAME:KEY for each key.")] = "",
    channel: Annotated[str, typer.Option(help="Publish to this channel.")] = "",
    stream: Annotated[str, typer.Option(help="Add to this stream.")] = "",
    at: AtOption = SINK,
    cookie: CookieOption = "",
) -> None:
    """Bring what apps push into Redis: hashes by key, a channel, or a stream."""
    with needing("redis"):
        from penstock.connect.sinks import redis

    if sum(map(bool, (hash_, channel, stream))) != 1:
        raise UsageError("say where it goes: one of --hash, --channel and --stream")

    def make(worker: str) -> redis.RedisHashSink | redis.RedisPublishSink:
        if hash_:
            return redis.RedisHashSink(url, worker, hash_)
        return redis.RedisPublishSink(url, worker, channel=channel, stream=stream)

    run_sink(make, state, SinkOptions(address=at, cookie=cookie), lambda: make("").check())


@connect.command(
    "postgres-sink",
    epilog=examples(
        "penstock connect postgres-sink postgresql://localhost/shop totals --key item --state x"
    ),
)
def postgres_sink(
    url: PostgresArgument,
    table: Annotated[str, typer.Argument(help="The table, with a unique index on its keys.")],
    key: Annotated[list[str], typer.Option(help="A column by which rows are found.")],
    state: StateOption,
    rehearse: Annotated[
        bool, typer.Option(help="Try rows before voting for them; without, half the work.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds for a transaction; the app waits for its answer too.")
    ] = 50.0,
    at: AtOption = SINK,
    cookie: CookieOption = "",
) -> None:
    """Bring what apps push into a PostgreSQL table: rows are inserted or updated by key."""
    with needing("postgres"):
        from penstock.connect.sinks.postgres import PostgresSink

    def make(worker: str) -> PostgresSink:
        return PostgresSink(url, worker, table, key, rehearse=rehearse, timeout_s=timeout)

    run_sink(make, state, SinkOptions(address=at, cookie=cookie), lambda: make("").check())


@connect.command(
    "kafka-sink",
    epilog=examples("penstock connect kafka-sink broker:9092 totals --state totals-sink"),
)
def kafka_sink(
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, with commas.")],
    topic: Annotated[str, typer.Argument(help="The topic to write to.")],
    state: StateOption,
    setting: SettingOption = None,
    at: AtOption = SINK,
    cookie: CookieOption = "",
) -> None:
    """Bring what apps push into a topic of Kafka, each commit as one transaction there."""
    with needing("kafka"):
        from penstock.connect.sinks.kafka import KafkaSink

    settings = dict(_setting(item) for item in setting or [])

    def make(worker: str) -> KafkaSink:
        return KafkaSink(servers, worker, topic, state, settings=settings)

    run_sink(make, state, SinkOptions(address=at, cookie=cookie), lambda: make("").check())


def run_sink(
    make: Callable[[str], Sink],
    state: Path,
    options: SinkOptions,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run a sink until it is stopped; raises why its target cannot be used, if it cannot.

    `check` looks at the target before anybody comes; one that is only away is waited for.
    """
    check_closed(options.address, options.cookie)
    try:
        check()
    except UsageError:
        raise
    except Exception as error:
        note(f"the target is away ({hide(str(error))}): workers are told to try again")
    stop = threading.Event()
    with stopping(stop, "connections are ended"), SinkHost(make, state, options, note) as host:
        say("listening at {}:{}".format(*host.address))
        flush()
        while not stop.wait(TICK_S):
            host.check()
