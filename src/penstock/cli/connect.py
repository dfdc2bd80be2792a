"""Connectors that ship, as programs: `penstock connect NAME …`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    AtOption,
    JsonOption,
    UntilIdleOption,
    check_closed,
    examples,
    parse_duration,
    parse_setting,
)
from penstock.cli.output import count, note, say, say_json, say_listening, stopping
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
        "--cookie",
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
    typer.Option(
        "--name",
        metavar="NAME",
        help="The connector stream's name; by default such as file/x.log.",
    ),
]
InstanceOption = Annotated[
    str,
    typer.Option(
        "--instance", metavar="NAME", help="What this connector is called; by default host and pid."
    ),
]
StateOption = Annotated[
    Path,
    typer.Option("--state", metavar="DIR", help="Where the sink keeps its transactions."),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        "-s",
        metavar="NAME=VALUE",
        help=f"Any setting of librdkafka; may be repeated. {BY_NAME}",
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
        "penstock connect file /var/log/app.log", "penstock connect file orders.jsonl --until-idle"
    ),
)
def file_source(  # noqa: PLR0913  one parameter per option
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file; it may be rotated.")],
    name: NameOption = None,
    until_idle: UntilIdleOption = False,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Where it keeps which files it has read; by default, beside the file.",
        ),
    ] = None,
    on_gone: Annotated[
        Literal["fail", "skip"],
        typer.Option("--on-gone", help="Where what comes next is not there any more."),
    ] = "fail",
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the lines of a file, and those that are added to it."""
    whole = path.resolve()
    called = name or f"file/{socket.gethostname()}{whole}"
    source = FileSource(called, whole, until_end=until_idle, on_gone=on_gone, state=state)
    run_source(source, to, cookie, instance, json)


@connect.command(
    "kafka",
    epilog=examples("penstock connect kafka broker:9092 clicks views --group penstock"),
)
def kafka_source(  # noqa: PLR0913  one parameter per option
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, with commas.")],
    topics: Annotated[list[str], typer.Argument(help="The topics to read.")],
    group: Annotated[
        str,
        typer.Option("--group", metavar="NAME", help="The group in which several share the work."),
    ],
    start: Annotated[
        Literal["earliest", "latest"],
        typer.Option(
            "--from", metavar="WHERE", help="Begin a new partition here: earliest or latest."
        ),
    ] = "earliest",
    on_gone: Annotated[
        Literal["fail", "earliest", "latest"],
        typer.Option("--on-gone", help="Where Kafka has removed what comes next."),
    ] = "fail",
    setting: SettingOption = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
    json: JsonOption = False,
) -> None:
    """Send the messages of Kafka's topics; each partition is a connector stream."""
    with needing("kafka"):
        from penstock.connect.sources.kafka import KafkaTopics

    options = ConnectorOptions(program="kafka", instance=instance, cookie=cookie, tell=note)
    found = KafkaTopics(
        to, servers, topics, group, start=start, on_gone=on_gone, options=options,
        settings=dict(parse_setting(item) for item in setting or []),
    )  # fmt: skip
    stop = threading.Event()
    with stopping(stop, "the connection is ended"), found:
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
    key: Annotated[str, typer.Argument(metavar="NAME", help="The stream, or the channel.")],
    group: Annotated[
        str,
        typer.Option(
            "--group", metavar="NAME", help="Read the stream through this consumer group."
        ),
    ] = "",
    subscribe: Annotated[
        bool, typer.Option("--subscribe", help="NAME is a channel: at most once.")
    ] = False,
    on_gone: Annotated[
        Literal["fail", "skip"],
        typer.Option("--on-gone", help="Where what comes next is not there any more."),
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
            help="Send the rows of this table; notifications only announce them.",
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
    """Send the rows of a PostgreSQL table, each once; or notifications, at most once."""
    with needing("postgres"):
        from penstock.connect.sources.postgres import PostgresListenSource, database_of

    host, rest = database_of(url)
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
        stopping(stop, "the connection is ended"),
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
        say(f"sent {count(messages, 'message')} of {name}")


# Sinks


@connect.command("file-sink", epilog=examples("penstock connect file-sink out --at 127.0.0.1:6068"))
def file_sink(
    folder: Annotated[Path, typer.Argument(help="Where the files are; one for each worker.")],
    at: AtOption = SINK,
    cookie: CookieOption = "",
    json: JsonOption = False,
) -> None:
    """Append what apps push to files; what is not committed is cut off again."""
    options = SinkOptions(address=at, cookie=cookie)
    run_sink(lambda worker: FileSink(folder, worker), folder, options, json)


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
    hash_: Annotated[
        str, typer.Option("--hash", metavar="NAME", help="Keep a hash NAME:KEY for each key.")
    ] = "",
    channel: Annotated[
        str, typer.Option("--channel", metavar="NAME", help="Publish to this channel.")
    ] = "",
    stream: Annotated[
        str, typer.Option("--stream", metavar="NAME", help="Add to this stream.")
    ] = "",
    at: AtOption = SINK,
    cookie: CookieOption = "",
    json: JsonOption = False,
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

    options = SinkOptions(address=at, cookie=cookie)
    run_sink(make, state, options, json, lambda: make("").check())


@connect.command(
    "postgres-sink",
    epilog=examples(
        "penstock connect postgres-sink postgresql://localhost/shop totals --key item --state x"
    ),
)
def postgres_sink(  # noqa: PLR0913  one parameter per option
    url: PostgresArgument,
    table: Annotated[str, typer.Argument(help="The table, with a unique index on its keys.")],
    key: Annotated[
        list[str],
        typer.Option("--key", metavar="COLUMN", help="A column by which rows are found."),
    ],
    state: StateOption,
    rehearse: Annotated[
        bool, typer.Option(help="Try rows before voting for them; without, half the work.")
    ] = True,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            help="How long a transaction may take; the app waits for its answer too.",
        ),
    ] = "50s",
    at: AtOption = SINK,
    cookie: CookieOption = "",
    json: JsonOption = False,
) -> None:
    """Bring what apps push into a PostgreSQL table: rows are inserted or updated by key."""
    with needing("postgres"):
        from penstock.connect.sinks.postgres import PostgresSink

    timeout_s = parse_duration(timeout, "--timeout") / 1000

    def make(worker: str) -> PostgresSink:
        return PostgresSink(url, worker, table, key, rehearse=rehearse, timeout_s=timeout_s)

    options = SinkOptions(address=at, cookie=cookie)
    run_sink(make, state, options, json, lambda: make("").check())


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
    json: JsonOption = False,
) -> None:
    """Bring what apps push into a topic of Kafka, each commit as one transaction there."""
    with needing("kafka"):
        from penstock.connect.sinks.kafka import KafkaSink

    settings = dict(parse_setting(item) for item in setting or [])

    def make(worker: str) -> KafkaSink:
        return KafkaSink(servers, worker, topic, state, settings=settings)

    options = SinkOptions(address=at, cookie=cookie)
    run_sink(make, state, options, json, lambda: make("").check())


def run_sink(
    make: Callable[[str], Sink],
    state: Path,
    options: SinkOptions,
    json: bool,
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
        say_listening(*host.address, json)
        while not stop.wait(TICK_S):
            host.check()
