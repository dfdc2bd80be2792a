"""What a log on Kafka has beside others: brokers to look at, and topics to adopt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from penstock.cli.options import JsonOption, LogOption, LogOptionsOption, examples, open_named
from penstock.cli.output import count, note, say, say_json, table
from penstock.cli.streams import (
    BytesOption,
    FieldsOption,
    KeyOption,
    NewStreamArgument,
    RecordOption,
    TableOption,
    TimeOption,
    streams,
    what_it_holds,
)
from penstock.errors import UsageError
from penstock.log.api import Log
from penstock.log.declaring.objects import StreamSpec

if TYPE_CHECKING:
    from penstock.log.kafka.log import KafkaLog


def register(app: typer.Typer) -> None:
    app.command(
        "cluster",
        epilog=examples("penstock --log kafka://broker:9092 cluster", "penstock cluster --behind"),
    )(cluster)


def cluster(
    context: typer.Context,
    behind: Annotated[
        bool,
        typer.Option(
            "--behind", help="Only partitions without a leader, or with too few replicas in sync."
        ),
    ] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show brokers and racks, and each partition's leader and replicas.

    Exits with 1 if a partition has no leader, or fewer replicas in sync than it should have.
    """
    with open_named(context, log, log_option) as opened:
        found = _on_kafka(opened).health()
    bad = [p for p in found.partitions if p.leader is None or p.is_behind]
    shown = bad if behind else list(found.partitions)
    if json:
        say_json({"cluster": found.cluster, "brokers": found.brokers, "partitions": shown})
    else:
        table(
            ("broker", "address", "rack", "leads", "holds", ""),
            [
                (b.id, b.address, b.rack, b.leads, b.holds, "controller" if b.is_controller else "")
                for b in found.brokers
            ],
        )
        if shown:
            say("")
            table(
                ("stream", "partition", "leader", "replicas", "in sync", ""),
                [
                    (
                        p.stream,
                        p.partition,
                        "none" if p.leader is None else p.leader,
                        _list(p.replicas),
                        _list(p.in_sync),
                        _state(p.is_behind, p.is_in_one_rack),
                    )
                    for p in shown
                ],
            )
    if bad:
        note(
            f"{len(bad)} of {len(found.partitions)} partitions have no leader, or too few replicas "
            "in sync"
        )
        raise typer.Exit(1)


@streams.command(
    "adopt",
    epilog=examples(
        "penstock stream adopt orders -F user=str -F amount=float --key user",
        "penstock stream adopt legacy.clicks --bytes",
    ),
)
def adopt_stream(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: NewStreamArgument,
    record: RecordOption = None,
    field: FieldsOption = None,
    bytes_: BytesOption = False,
    key: KeyOption = None,
    time: TimeOption = None,
    table_: TableOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Turn the Kafka topic NAMESPACE.NAME, which another program created, into a stream.

    Its messages stay as they are, and other programs may continue to write to it.
    """
    schema, content = what_it_holds(stream, record, field, bytes_)
    spec = StreamSpec(name=stream, record=schema, content=content, key=key, time=time, table=table_)
    with open_named(context, log, log_option, create=True) as opened:
        _on_kafka(opened).adopt(spec)
        made = opened.stream(stream)
    if json:
        say_json({"adopted": str(made.name), "partitions": made.partitions})
    else:
        say(f"adopted stream {made.name} with {count(made.partitions, 'partition')}")


def _on_kafka(log: Log) -> KafkaLog:
    """The log as one on Kafka; `UsageError` if it is not."""
    if not log.url.startswith("kafka://"):
        raise UsageError(
            f"{log.url} is an embedded log, which has no brokers or topics: use `penstock doctor` "
            "to check it"
        )
    return cast("KafkaLog", log)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _state(is_behind: bool, is_in_one_rack: bool) -> str:
    if is_behind:
        return "behind"
    return "in one rack" if is_in_one_rack else ""
