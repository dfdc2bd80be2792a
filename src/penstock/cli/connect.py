"""Connectors that ship, as programs: `penstock connect NAME …`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import examples
from penstock.cli.output import note, say, stopping
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
    str, typer.Option("--to", metavar="HOST:PORT", help="Where `penstock listen` listens.")
]
CookieOption = Annotated[
    str, typer.Option(envvar="PENSTOCK_COOKIE", help="What the other side wants to know.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="The connector stream's name; by default the source's.")
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
HostOption = Annotated[str, typer.Option(help="The address to listen at.")]
PortOption = Annotated[int, typer.Option(help="The port; 0 takes a free one.")]
LISTENER = "127.0.0.1:6067"
SINK_PORT = 6068


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
    source = FileSource(name or path.name, path.resolve(), until_end=until_end, on_gone=on_gone)
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
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any setting of librdkafka; may be repeated."),
    ] = None,
    to: ToOption = LISTENER,
    cookie: CookieOption = "",
    instance: InstanceOption = "",
) -> None:
    """Send the messages of Kafka's topics; each partition is a connector stream."""
    # Needs an extra.
    from penstock.connect.sources.kafka import KafkaTopics

    options = ConnectorOptions(program="kafka", instance=instance, cookie=cookie)
    found = KafkaTopics(
        to, servers, topics, group, start=start, on_gone=on_gone, options=options,
        settings=dict(_setting(item) for item in setting or []),
    )  # fmt: skip
    stop = threading.Event()
    with stopping(stop, "the connection is ended"), found:
        while not stop.wait(TICK_S):
            found.check()


def run_source(source: Source, to: str, cookie: str, instance: str) -> None:
    """Run a source until it ends or is stopped; raises why it cannot go on."""
    options = ConnectorOptions(program=type(source).__name__, instance=instance, cookie=cookie)
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
    if not name or not mark:
        raise UsageError(f"{text!r} is no setting: write NAME=VALUE")
    return name, value


# Sinks


@connect.command("file-sink", epilog=examples("penstock connect file-sink out --port 6068"))
def file_sink(
    folder: Annotated[Path, typer.Argument(help="Where the files are; one for each worker.")],
    host: HostOption = "127.0.0.1",
    port: PortOption = SINK_PORT,
    cookie: CookieOption = "",
) -> None:
    """Append what apps push to files; what is not committed is cut off again."""
    run_sink(
        lambda worker: FileSink(folder, worker), folder,
        SinkOptions(host=host, port=port, cookie=cookie),
    )  # fmt: skip


def run_sink(make: Callable[[str], Sink], state: Path, options: SinkOptions) -> None:
    """Run a sink until it is stopped."""
    if options.host not in ("127.0.0.1", "::1", "localhost") and not options.cookie:
        raise UsageError(f"anybody who reaches {options.host} could write: set a cookie (--cookie)")
    stop = threading.Event()
    with stopping(stop, "connections are ended"), SinkHost(make, state, options, note) as host:
        say("listening at {}:{}".format(*host.address))
        stop.wait()
