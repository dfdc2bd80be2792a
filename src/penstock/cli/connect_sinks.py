"""Sinks that ship, as programs: `penstock connect NAME-sink …`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.connect import (
    TICK_S,
    CookieOption,
    PostgresArgument,
    RedisArgument,
    SettingOption,
    connect,
    needing,
)
from penstock.cli.options import (
    AtOption,
    JsonOption,
    check_closed,
    examples,
    parse_duration,
    parse_setting,
    parse_size,
)
from penstock.cli.output import note, say, say_json, say_listening, stopping
from penstock.connect.credentials import hide
from penstock.connect.hosts.sink_host import SinkHost, SinkOptions
from penstock.connect.hosts.spool import SPOOL_BYTES_MAX, DeadMessage, read_dead
from penstock.connect.hosts.targets import TargetMaker
from penstock.connect.sinks.file import FileSink
from penstock.errors import UsageError
from penstock.records.event import JsonValue

SINK = "127.0.0.1:6068"
DATA_CHARS_MAX = 500
StateOption = Annotated[
    Path,
    typer.Option(
        "--state", metavar="DIR", help="Directory for messages that the target does not have yet."
    ),
]
SpoolOption = Annotated[
    str,
    typer.Option(
        "--spool-max",
        metavar="SIZE",
        help="How much committed data may wait for the target before the app waits.",
    ),
]
SPOOL = f"{SPOOL_BYTES_MAX >> 30} GiB"


def register(app: typer.Typer) -> None:
    """Add `penstock connect`, with its sources and sinks."""
    app.add_typer(connect, name="connect")


@connect.command("file-sink", epilog=examples("penstock connect file-sink out --at 127.0.0.1:6068"))
def file_sink(
    folder: Annotated[Path, typer.Argument(help="Directory for the files, one per worker.")],
    at: AtOption = SINK,
    cookie: CookieOption = "",
    spool_max: SpoolOption = SPOOL,
    json: JsonOption = False,
) -> None:
    """Append what apps push to files, once it is committed."""
    options = sink_options(at, cookie, spool_max)
    run_sink(lambda worker: FileSink(folder, worker), folder, options, json)


@connect.command(
    "redis-sink",
    epilog=examples(
        "penstock connect redis-sink redis://localhost/0 --hash users --state sink",
        "penstock connect redis-sink redis://localhost/0 --channel news --state sink",
    ),
)
def redis_sink(  # noqa: PLR0913  one parameter per option
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
    spool_max: SpoolOption = SPOOL,
    json: JsonOption = False,
) -> None:
    """Write what apps push to Redis: hashes by key, a channel, or a stream."""
    with needing("redis"):
        from penstock.connect.sinks import redis

    if sum(map(bool, (hash_, channel, stream))) != 1:
        raise UsageError("give exactly one of --hash, --channel and --stream")

    def make(worker: str) -> redis.RedisHashSink | redis.RedisPublishSink:
        if hash_:
            return redis.RedisHashSink(url, worker, hash_)
        return redis.RedisPublishSink(url, worker, channel=channel, stream=stream)

    options = sink_options(at, cookie, spool_max)
    run_sink(make, state, options, json, lambda: make("").check_server())


@connect.command(
    "postgres-sink",
    epilog=examples(
        "penstock connect postgres-sink postgresql://localhost/shop totals --key item --state x"
    ),
)
def postgres_sink(  # noqa: PLR0913  one parameter per option
    url: PostgresArgument,
    table: Annotated[str, typer.Argument(help="The table; its key needs a unique index.")],
    key: Annotated[
        list[str],
        typer.Option("--key", metavar="COLUMN", help="A key column; may be repeated."),
    ],
    state: StateOption,
    rehearse: Annotated[
        bool, typer.Option(help="Try rows before voting: half as fast, but fewer are set aside.")
    ] = True,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            help="How long a transaction may take; the app waits for the answer.",
        ),
    ] = "50s",
    at: AtOption = SINK,
    cookie: CookieOption = "",
    spool_max: SpoolOption = SPOOL,
    json: JsonOption = False,
) -> None:
    """Write what apps push to a PostgreSQL table: rows are inserted or updated by key."""
    with needing("postgres"):
        from penstock.connect.sinks.postgres import PostgresSink

    timeout_s = parse_duration(timeout, "--timeout") / 1000

    def make(worker: str) -> PostgresSink:
        return PostgresSink(url, worker, table, key, rehearse=rehearse, timeout_s=timeout_s)

    options = sink_options(at, cookie, spool_max)
    run_sink(make, state, options, json, lambda: make("").check_server())


@connect.command(
    "kafka-sink",
    epilog=examples("penstock connect kafka-sink broker:9092 totals --state totals-sink"),
)
def kafka_sink(
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, separated by commas.")],
    topic: Annotated[str, typer.Argument(help="The topic to write to.")],
    state: StateOption,
    setting: SettingOption = None,
    at: AtOption = SINK,
    cookie: CookieOption = "",
    spool_max: SpoolOption = SPOOL,
    json: JsonOption = False,
) -> None:
    """Write what apps push to a Kafka topic, each commit as one Kafka transaction."""
    with needing("kafka"):
        from penstock.connect.sinks.kafka import KafkaSink

    settings = dict(parse_setting(item) for item in setting or [])

    def make(worker: str) -> KafkaSink:
        return KafkaSink(servers, worker, topic, settings=settings)

    options = sink_options(at, cookie, spool_max)
    run_sink(make, state, options, json, lambda: make("").check_server())


def run_sink(
    make: TargetMaker,
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
        note(f"the target is unavailable ({hide(str(error))}): messages wait in {state}")
    stop = threading.Event()
    with stopping(stop, "closing connections"), SinkHost(make, state, options, note) as host:
        say_listening(*host.address, json)
        while not stop.wait(TICK_S):
            host.check()


def sink_options(at: str, cookie: str, spool_max: str) -> SinkOptions:
    size = parse_size(spool_max, "--spool-max")
    return SinkOptions(address=at, cookie=cookie, spool_bytes_max=size)


@connect.command("dead", epilog=examples("penstock connect dead postgres-sink"))
def dead(
    state: Annotated[Path, typer.Argument(metavar="DIR", help="The sink's directory (--state).")],
    json: JsonOption = False,
) -> None:
    """List the messages that a sink's target refused after they were committed."""
    for message in read_dead(state):
        if json:
            say_json(_dead_row(message))
        else:
            name, place, _, kept, error = message
            say(f"{name} message {place.messages}: {error}")
            say(f"  {kept.data[:DATA_CHARS_MAX].decode(errors='backslashreplace')}")


def _dead_row(dead: DeadMessage) -> dict[str, JsonValue]:
    name, place, time_ms, kept, error = dead
    return {
        "worker": name, "message": place.messages, "offset": place.offset, "time_ms": time_ms,
        "key": None if kept.key is None else kept.key.decode(errors="backslashreplace"),
        "data": kept.data.decode(errors="backslashreplace"), "error": error,
    }  # fmt: skip
