"""`penstock dead …`: dead letters, to look at; `replaying` sends them again."""

from __future__ import annotations

import datetime as dt
import re
import textwrap
from collections import deque
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.cli.formats import as_json
from penstock.cli.options import JsonOption, LogOption, LogOptionsOption, examples, open_to_read
from penstock.cli.output import note, progress_bar, say, say_json, table
from penstock.cli.reading import (
    LAST_MAX,
    LastOption,
    UntilOption,
    WhereOption,
    parse_end,
    parse_start,
    read_reporting,
    report_damage,
)
from penstock.errors import LimitError, PenstockError, UnknownObjectError, UsageError
from penstock.groups.letters import GROUP_PREFIX
from penstock.log.api import Log, Report
from penstock.log.declaring.names import guess
from penstock.log.declaring.objects import Stream
from penstock.log.letters import (
    DeadLetter,
    Letter,
    SentAgain,
    dead_name,
    holds_letters,
    letter_streams,
    letters_in,
)
from penstock.log.reading.read import ReadOptions, Span, span_of
from penstock.records.event import JsonValue, StoredEvent

LAST = 50
HISTORY_MAX = 20
REPLAYED_HEADER = "replayof"
"""The header of an event that was a dead letter: the place of that letter."""

dead = typer.Typer(no_args_is_help=True, help="List, show and replay dead letters.")
LettersArgument = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        show_default=False,
        help="The dead-letter stream NAME_dead, or NAME, the stream or agent it belongs to.",
        autocompletion=lambda ctx, incomplete: complete_letters(ctx, incomplete),  # noqa: PLW0108
    ),
]
AgentOption = Annotated[
    str | None, typer.Option("--agent", metavar="NAME", help="Only letters from this agent.")
]
GroupOption = Annotated[
    str | None, typer.Option("--group", metavar="NAME", help="Only letters of this group.")
]
ErrorOption = Annotated[
    str | None,
    typer.Option("--error", metavar="TEXT", help="Only letters whose error contains this."),
]
LetterKeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Only letters for events with this key.")
]
_PLACE = re.compile(r"(?:(\d+):)?(\d+)")


class Wanted(NamedTuple):
    """Which letters: what they say, and where they lie."""

    agent: str | None = None
    error: str | None = None
    key: str | None = None
    group: str | None = None
    is_open: bool = False

    def fits(self, letter: DeadLetter) -> bool:
        return (
            (self.agent is None or letter.agent == self.agent)
            and (self.group is None or letter.agent == f"{GROUP_PREFIX}{self.group}")
            and (self.key is None or letter.key == self.key)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
        )

    @property
    def is_any(self) -> bool:
        return self == Wanted()


class LetterRange(NamedTuple):
    """From where and until where letters are looked at."""

    options: ReadOptions
    until: int | dt.datetime | None

    @staticmethod
    def parse(start: str | None, until: str | None) -> LetterRange:
        options = ReadOptions(start=parse_start(start or "earliest"), on_damage=report_damage)
        return LetterRange(options, None if until is None else parse_end(until))

    def find(self, log: Log, letters: Stream, last: int | None = None) -> Span:
        is_whole = self.options.start == "earliest"
        name = str(letters.name)
        return span_of(log, name, self.options, until=self.until, last=last if is_whole else None)


def register(app: typer.Typer) -> None:
    from penstock.cli.replaying import replay_letters

    dead.command(
        "replay",
        epilog=examples(
            "penstock dead replay orders 0:12",
            "penstock dead replay orders --all --dry-run",
            "penstock dead replay orders --error KeyError",
            """penstock dead replay orders 0:12 --data '{"user": "ada", "amount": 3}'""",
            "penstock dead list orders --json | jq -c '.data.amount = 0' "
            "| penstock dead replay orders -",
        ),
    )(replay_letters)
    app.add_typer(dead, name="dead")


def complete_letters(context: typer.Context, incomplete: str) -> list[str]:
    """Names of streams of dead letters for the shell."""
    try:
        with open_to_read(context, context.params.get("log")) as log:
            names = [str(stream.name) for stream in letter_streams(log)]
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete)]


def find_letters(log: Log, name: str) -> Stream:
    """The stream of dead letters that is called so, or that belongs to what is."""
    known = {str(stream.name): stream for stream in letter_streams(log)}
    found = known.get(name) or known.get(dead_name(name))
    if found is not None:
        return found
    own = guess(name, [*known, *(each.removesuffix("_dead") for each in known)])
    hint = own or (
        f"the log has {', '.join(sorted(known))}"
        if known
        else "the log has none; see on_error, on_damage and `listen --on-damage`"
    )
    raise UnknownObjectError(f"there are no dead letters for {name}: {hint}")


def parse_place(text: str, stream: Stream) -> tuple[int, int]:
    """PARTITION:OFFSET, as `dead list` prints it; the partition may be left out if there is one."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a letter's place: write PARTITION:OFFSET, such as 0:12")
    if match[1] is None and stream.partitions > 1:
        raise UsageError(f"{stream.name} has {stream.partitions} partitions: write 0:{text}")
    partition = int(match[1] or 0)
    if partition >= stream.partitions:
        raise UsageError(
            f"stream {stream.name} has no partition {partition}: its partitions are 0 to "
            f"{stream.partitions - 1}"
        )
    return partition, int(match[2])


def letter_at(log: Log, stream: Stream, place: str) -> Letter:
    """The letter at a place."""
    partition, offset = parse_place(place, stream)
    for batch in log.read(str(stream.name), partition, offset, offset + 1):
        for letter in letters_in(batch):
            return letter
    raise UnknownObjectError(
        f"{stream.name} has no letter at {place}: see `penstock dead list {stream.name}`"
    )


def read_letters(
    log: Log, stream: Stream, options: ReadOptions, span: Span, report: Report
) -> Iterator[Letter]:
    """The letters of a stream, in order; reports how far it is."""
    for batch in read_reporting(log, str(stream.name), options, span, report):
        yield from letters_in(batch)


# Looking


@dead.command(
    "list",
    epilog=examples(
        "penstock dead list",
        "penstock dead list orders --open",
        "penstock dead list orders --error KeyError --last 10 --json",
    ),
)
def list_letters(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: Annotated[
        str | None,
        typer.Argument(
            metavar="STREAM", show_default=False, help="Only this stream, named as in `dead show`."
        ),
    ] = None,
    agent: AgentOption = None,
    group: GroupOption = None,
    error: ErrorOption = None,
    key: LetterKeyOption = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Only letters that have not been replayed.")
    ] = False,
    start: WhereOption = None,
    until: UntilOption = None,
    last: LastOption = None,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List dead letters from agents, groups, listeners and damaged events, newest last.

    Shows the last 50 unless `--last` or `--from` is given. A place is PARTITION:OFFSET.
    """
    if last is not None and last > LAST_MAX:
        raise LimitError(f"--last is {last}; at most {LAST_MAX} are allowed: use --from")
    wanted = Wanted(agent, error, key, group, open_)
    stretch = LetterRange.parse(start, until)
    most = last or (None if start else LAST)
    with open_to_read(context, log, log_option) as opened:
        found = [find_letters(opened, stream)] if stream else letter_streams(opened)
        with progress_bar("reading", "") as report:
            rows = [
                row
                for letters in found
                for row in _rows(opened, letters, stretch, wanted, most, report)
            ]
    rows.sort(key=lambda row: str(row["time"]))
    rows, left_out = (rows[-most:], max(0, len(rows) - most)) if most else (rows, 0)
    if json:
        for row in rows:
            say_json(row)
    elif rows:
        _show(rows, with_stream=len({str(row["letters"]) for row in rows}) > 1)
    if not rows:
        note(f"there are no {'' if wanted.is_any else 'matching '}dead letters")
    elif left_out or (last is None and len(rows) == most):
        note(f"these are the last {most}: use --last N to see more")


def _rows(
    log: Log,
    letters: Stream,
    stretch: LetterRange,
    wanted: Wanted,
    most: int | None,
    report: Report,
) -> list[dict[str, JsonValue]]:
    """A stream's letters as they are shown, at most the last `most` of them."""
    span = stretch.find(log, letters, last=most if wanted.is_any else None)
    sent = SentAgain(log, letters).load()
    kept: deque[Letter] = deque(maxlen=most)
    for letter in read_letters(log, letters, stretch.options, span, report):
        if wanted.fits(letter.event.data) and not (wanted.is_open and sent.find(letter)):
            kept.append(letter)
    return [letter_row(letters, letter, sent) for letter in kept]


def letter_row(letters: Stream, letter: Letter, sent: SentAgain) -> dict[str, JsonValue]:
    """A letter as JSON; its data too, where that is JSON, so that it can be edited."""
    held, again = letter.event.data, sent.find(letter)
    return {
        "letters": str(letters.name),
        "place": letter.place,
        "time": _iso(letter.event.time),
        "of": kind_of(held),
        "agent": held.agent if kind_of(held) in ("agent", "timer") else None,
        "group": held.agent.removeprefix(GROUP_PREFIX) if kind_of(held) == "group" else None,
        "stream": held.stream or None,
        "partition": held.partition,
        "offset": held.offset,
        "id": held.id or None,
        "key": held.key,
        "tries": held.tries,
        "error": held.error,
        "data": show_data(held),
        "sent_into": None if again is None else again.into,
    }


def show_data(letter: DeadLetter) -> JsonValue:
    """A letter's data as JSON, or as text if it is not JSON."""
    try:
        found: JsonValue = msgspec.json.decode(letter.data)
    except (msgspec.DecodeError, RecursionError):
        return letter.data
    return found


def kind_of(letter: DeadLetter) -> str:
    """What could not handle the event."""
    if letter.agent.startswith(GROUP_PREFIX):
        return "group"
    if letter.agent:
        return "agent" if letter.stream else "timer"
    return "connector" if letter.id else "damage"


def _iso(time: dt.datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _show(rows: list[dict[str, JsonValue]], *, with_stream: bool) -> None:
    own = ["letters"] if with_stream else []
    columns = [*own, "place", "time", "from", "key", "replayed", "error"]
    made: list[list[object]] = []
    for row in rows:
        time = str(row["time"])[:19].replace("T", " ")
        is_sent = row["sent_into"] is not None
        of = f"group {row['group']}" if row["group"] else row["agent"] or row["of"]
        rest = [row["place"], time, of, row["key"], is_sent, row["error"]]
        made.append([*(row[name] for name in own), *rest])
    table(columns, made, cut="error")


@dead.command(
    "show",
    epilog=examples("penstock dead show orders 0:12", "penstock dead show orders 0:12 --json"),
)
def show_letter(
    context: typer.Context,
    stream: LettersArgument,
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="PARTITION:OFFSET, as `dead list` prints it.")
    ],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show a dead letter in full: its data, error and origin, and whether it was replayed."""
    with open_to_read(context, log, log_option) as opened:
        found = find_letters(opened, stream)
        letter = letter_at(opened, found, place)
        origin = find_origin(opened, letter.event.data)
        row = letter_row(found, letter, SentAgain(opened, found).load())
        history = list(_history(opened, found, letter))
    row["traceback"] = letter.event.data.traceback or None
    row["origin"] = _state_of(letter.event.data, origin)
    if json:
        say_json({**row, "history": history})
        return
    _show_one(row, history)


def _state_of(letter: DeadLetter, origin: StoredEvent[object] | None) -> str | None:
    """Whether the event that failed can still be read; of others nothing was ever stored."""
    if kind_of(letter) not in ("agent", "group"):
        return None
    return "gone" if origin is None else "there"


def _show_one(row: dict[str, JsonValue], history: list[dict[str, JsonValue]]) -> None:
    came = "a timer"
    if row["stream"]:
        came = f"{row['stream']} {row['partition']}:{row['offset']}"
        came += " (no longer there)" if row["origin"] == "gone" else ""
    again = "no" if row["sent_into"] is None else f"yes, to {row['sent_into']}"
    facts = [
        ("written", str(row["time"])),
        ("by", " ".join(filter(None, [str(row["of"]), str(row["agent"] or row["group"] or "")]))),
        ("tries", row["tries"]),
        ("came from", came),
        ("id", row["id"]),
        ("key", row["key"]),
        ("replayed", again),
        ("error", row["error"]),
    ]
    letter = f"{row['letters']} {row['place']}"
    table(("letter", letter), [fact for fact in facts if fact[1] is not None])
    if row["traceback"]:
        say("\ntraceback\n" + textwrap.indent(str(row["traceback"]).rstrip(), "  "))
    data = row["data"]
    shown = data if isinstance(data, str) else msgspec.json.format(as_json(data), indent=2)
    say("\ndata\n" + textwrap.indent(shown, "  "))
    if len(history) > 1:
        say("\nhistory")
        columns = ("letter", "time", "error")
        table(columns, [[one[name] for name in columns] for one in history], cut="error")


def find_origin(log: Log, letter: DeadLetter) -> StoredEvent[object] | None:
    """The event that a letter is about, if it is still where it was."""
    if not letter.stream or not letter.id or not letter.agent:
        return None
    try:
        for batch in log.read(letter.stream, letter.partition, letter.offset, letter.offset + 1):
            for event in batch.events():
                return event if event.id == letter.id else None
    except PenstockError:
        return None
    return None


def _history(log: Log, letters: Stream, letter: Letter) -> Iterator[dict[str, JsonValue]]:
    """This letter, and the letters that its event was before: the newest first."""
    seen: list[tuple[Stream, Letter]] = [(letters, letter)]
    while seen and len(seen) <= HISTORY_MAX:
        stream, one = seen[-1]
        yield {
            "letter": f"{stream.name} {one.place}",
            "time": _iso(one.event.time),
            "error": one.event.data.error,
        }
        origin = find_origin(log, one.event.data)
        before = None if origin is None else _letter_before(log, origin)
        if before is None:
            return
        seen.append(before)


def _letter_before(log: Log, event: StoredEvent[object]) -> tuple[Stream, Letter] | None:
    """The letter that an event was sent again from."""
    name, _, place = event.headers.get(REPLAYED_HEADER, "").rpartition("/")
    if not name:
        return None
    try:
        stream = log.stream(name)
        return (stream, letter_at(log, stream, place)) if holds_letters(stream) else None
    except PenstockError:
        return None
