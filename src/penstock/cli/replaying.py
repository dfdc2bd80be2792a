"""`penstock dead replay`: dead letters, sent again; each once."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.cli.dead import (
    REPLAYED_HEADER,
    AgentOption,
    ErrorOption,
    GroupOption,
    LetterKeyOption,
    LetterRange,
    LettersArgument,
    Wanted,
    find_letters,
    find_origin,
    letter_at,
    read_letters,
    show_data,
)
from penstock.cli.finding import find_stream
from penstock.cli.formats import as_json
from penstock.cli.lines import InputLine, chunks_of_lines, naming, parse_bytes_text, parse_data
from penstock.cli.options import (
    DryRunOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    TimeoutOption,
    open_named,
    parse_duration,
)
from penstock.cli.output import count, note, progress_bar, say, say_json, stderr, stopping
from penstock.cli.reading import UntilOption, WhereOption
from penstock.cli.waiting import TIMEOUT, Attempts
from penstock.errors import FencedError, PenstockError, RecordError, UsageError
from penstock.groups.control import check_group
from penstock.groups.letters import group_of, make_replays_stream
from penstock.groups.names import GroupName
from penstock.log.api import Log
from penstock.log.batch import json_data
from penstock.log.declaring.names import parse_stream
from penstock.log.declaring.objects import Stream
from penstock.log.letters import DEAD_CHARS_MAX, DeadLetter, Letter, Resend, Resender
from penstock.log.writing.compose import EventOptions
from penstock.log.writing.partitioning import places
from penstock.records.event import StoredEvent

SOURCE = "penstock-dead"
CHUNK_LETTERS = 500
CHUNK_CHARS = 4 << 20
FAILURES_SHOWN = 20
INTERRUPTED = 130


class PartlySentError(PenstockError):
    """Some letters were sent again before the failure, others were not."""

    code = "partly_sent"


class Edit(NamedTuple):
    """What a letter's event is to hold instead; `None` leaves it as it was."""

    data: bytes | None = None
    key: str | None = None


class Tally(msgspec.Struct):
    """What became of the letters."""

    sent: int = 0
    before: int = 0
    failed: int = 0


def replay_letters(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: LettersArgument,
    places_: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLACE",
            show_default=False,
            help="Places of letters as PARTITION:OFFSET, or - to read lines as printed by "
            "`dead list --json`, in which data and key may be edited.",
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Replay all letters that have not been replayed yet.")
    ] = False,
    agent: AgentOption = None,
    group: GroupOption = None,
    error: ErrorOption = None,
    key: LetterKeyOption = None,
    start: WhereOption = None,
    until: UntilOption = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="JSON", help="Send this data instead; for one letter."),
    ] = None,
    edit: Annotated[
        bool, typer.Option("--edit", help="Edit the data in $EDITOR first; for one letter.")
    ] = False,
    into: Annotated[
        str | None,
        typer.Option(
            "--into", metavar="STREAM", help="Send to this stream instead of the original one."
        ),
    ] = None,
    dry_run: DryRunOption = False,
    timeout: TimeoutOption = TIMEOUT,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Send dead letters to their original stream again, each once, as new events.

    Every reader of that stream sees such an event, not only the one that failed; a letter of a
    group goes to that group alone, with the id of its message. The event's header `replayof`
    names the letter. The commit that sends a letter also records that it was sent: run again,
    even after a crash, the command continues with what is left.
    """
    wanted = Wanted(agent, error, key, group)
    is_chosen = all_ or not wanted.is_any or start is not None or until is not None
    _check(places_, is_chosen, has_edit=data is not None or edit)
    stretch = LetterRange.parse(start, until)
    timeout_ms = parse_duration(timeout, "--timeout")
    stop = threading.Event()
    with (
        open_named(context, log, log_option) as opened,
        stopping(stop, "committing the letters in flight"),
        Attempts(opened.url, timeout_ms) as attempts,
    ):
        letters = find_letters(opened, stream)
        replay = Replay(opened, letters, into, attempts, dry_run=dry_run, json=json)
        replay.open()
        is_one = bool(places_) and places_ != ["-"] and len(places_ or ()) == 1
        with progress_bar("replaying", "", shown=is_chosen) as report:
            if places_ == ["-"]:
                chosen = _lines(opened, letters)
            elif places_:
                edited = _read_edit(opened, letters, places_[0], data, edit) if is_one else Edit()
                chosen = ((letter_at(opened, letters, place), edited) for place in places_)
            else:
                span = stretch.find(opened, letters)
                found = read_letters(opened, letters, stretch.options, span, report)
                chosen = ((one, Edit()) for one in found if wanted.fits(one.event.data))
            replay.run(chosen, stop, is_one=is_one)
    replay.show()
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)
    if replay.tally.failed:
        raise typer.Exit(1)


def _check(places_: list[str] | None, is_chosen: bool, *, has_edit: bool) -> None:
    if not places_ and not is_chosen:
        raise UsageError(
            "no letters are selected: give their places, --all, or a filter (--agent, --group, "
            "--error, --key, --from, --until)"
        )
    if places_ and is_chosen:
        raise UsageError("select letters by their places or with --all and filters, not both")
    if places_ and "-" in places_ and len(places_) > 1:
        raise UsageError("- reads the places from standard input: give no other places")
    if has_edit and (places_ is None or len(places_) != 1 or places_ == ["-"]):
        raise UsageError(
            "--data and --edit are for one letter: for several, edit the lines of "
            "`dead list --json` and replay them with -"
        )


class Replay:
    """Sends letters again, a chunk of them in one commit."""

    def __init__(
        self,
        log: Log,
        letters: Stream,
        into: str | None,
        attempts: Attempts,
        *,
        dry_run: bool,
        json: bool,
    ) -> None:
        self._log = log
        self._letters = letters
        self._into = None if into is None else find_stream(log, into)
        self._attempts = attempts
        self._dry_run = dry_run
        self._json = json
        self._resender = Resender(log, letters, SOURCE)
        self._replays: dict[GroupName, Stream] = {}
        self._chunk: list[Resend] = []
        self._target: Stream | None = None
        self._chars = 0
        self._pending: set[tuple[int, int]] = set()
        self.tally = Tally()

    def open(self) -> None:
        """See what was sent before; whoever else sends these again is fenced."""
        if self._dry_run:
            self._resender.sent.load()
        else:
            self._attempts.until_done(self._resender.open)

    def run(
        self, chosen: Iterator[tuple[Letter, Edit]], stop: threading.Event, *, is_one: bool
    ) -> None:
        """Send what is chosen, until it is stopped. Raises what is wrong, if it is one letter."""
        try:
            for letter, edit in chosen:
                try:
                    self._add(letter, edit)
                except UsageError as error:
                    if is_one:
                        raise
                    self._tell(letter, "failed", reason=str(error))
                if stop.is_set():
                    break
            self._send()
        except FencedError as error:
            raise FencedError(
                f"another `penstock dead replay` of {self._letters.name} has started and continues "
                f"with what is left; this one replayed {count(self.tally.sent, 'letter')}"
            ) from error
        except PenstockError as error:
            if not self.tally.sent:
                raise
            raise PartlySentError(
                f"{error}; {count(self.tally.sent, 'letter')} replayed before that: run the "
                "command again to continue with what is left"
            ) from error

    def _add(self, letter: Letter, edit: Edit) -> None:
        again = self._resender.sent.find(letter)
        place = (letter.partition, letter.offset)
        if again is not None or place in self._pending:
            into = None if again is None else again.into
            self._tell(letter, "sent before", into=into)
            return
        target, made = self._prepare(letter, edit)
        self._resender.compose(target, [made])  # whatever is wrong with it is told now
        is_full = len(self._chunk) >= CHUNK_LETTERS or self._chars >= CHUNK_CHARS
        if self._target is not None and (is_full or target.id != self._target.id):
            self._send()
        self._target = target
        self._chunk.append(made)
        self._pending.add(place)
        self._chars += len(letter.event.data.data)

    def _prepare(self, letter: Letter, edit: Edit) -> tuple[Stream, Resend]:
        """The event that a letter is to be."""
        held = letter.event.data
        if not held.stream:
            raise UsageError("it comes from a timer, which has no event to send")
        group = group_of(held, self._letters)
        if self._into is not None:
            target = self._into
        elif group is not None:
            target = self._find_replays(group)
        else:
            target = find_stream(self._log, held.stream)
        origin = find_origin(self._log, held)
        is_home = self._into is None or str(target.name) == held.stream
        data = _data(target, held, edit, origin, is_home)
        key = edit.key or (held.key if origin is None else origin.key)
        headers = {} if origin is None else dict(origin.headers)
        options = EventOptions(
            key=None if target.spec.key and data is not None else key,
            id=self._id(letter),
            time=None if origin is None or target.spec.time else origin.time,
            type=origin.type if origin is not None and is_home else None,
            headers={**headers, REPLAYED_HEADER: f"{self._letters.name}/{letter.place}"},
        )
        return target, Resend(letter, data, options)

    def _find_replays(self, group: GroupName) -> Stream:
        """Where letters of a group go; in a dry run it is not made, but takes the same."""
        if group not in self._replays:
            check_group(self._log, group)
            if self._dry_run:
                like, name = find_stream(self._log, group.stream), parse_stream(group.replays)
                self._replays[group] = msgspec.structs.replace(like, name=name)
            else:
                self._replays[group] = make_replays_stream(self._log, group)
        return self._replays[group]

    def _id(self, letter: Letter) -> str:
        """The id of the event that is sent: a connector's message, which was no event yet, and a
        group's, which nobody else sees, have their own; else one that names the letter, so that
        it is another event and yet always the same.
        """
        held = letter.event.data
        is_groups = self._into is None and group_of(held, self._letters) is not None
        if held.id and (not held.agent or is_groups):
            return held.id
        name = self._letters
        return f"{name.name}/{name.id}/{letter.partition}/{letter.offset}"

    def _send(self) -> None:
        chunk, target = self._chunk, self._target
        if not chunk or target is None:
            return
        self._chunk, self._chars, self._target = [], 0, None
        self._pending.clear()
        name = str(target.name)
        if self._dry_run:
            for one in chunk:
                self._tell(one.letter, "sent", into=name)
            return
        part = self._resender.compose(target, chunk)
        done = self._attempts.until_done(lambda: self._resender.send(part, chunk))
        found = places(done.placements[0], part)
        for one, (partition, offset) in zip(chunk, found, strict=True):
            if offset is None:  # the stream held an event with this id: a connector sent it again
                self._tell(one.letter, "sent before", into=name)
            else:
                self._tell(one.letter, "sent", into=name, at=f"{partition}:{offset}")

    def _tell(
        self,
        letter: Letter,
        what: str,
        *,
        into: str | None = None,
        at: str | None = None,
        reason: str | None = None,
    ) -> None:
        match what:
            case "sent":
                self.tally.sent += 1
            case "sent before":
                self.tally.before += 1
            case _:
                self.tally.failed += 1
        if self._json:
            say_json(
                {"letter": letter.place, "state": what, "into": into, "at": at, "reason": reason}
            )
        elif what == "failed" and self.tally.failed <= FAILURES_SHOWN:
            note(f"{self._letters.name} {letter.place} cannot be replayed: {reason}")

    def show(self) -> None:
        """Say what became of them all."""
        if self._json:
            say_json(self.tally)
            return
        would = "would replay" if self._dry_run else "replayed"
        say(f"{would} {count(self.tally.sent, 'letter')} from {self._letters.name}")
        if self.tally.before:
            note(f"{count(self.tally.before, 'letter')} had already been sent")
        if self.tally.failed > FAILURES_SHOWN:
            note(f"… and {self.tally.failed - FAILURES_SHOWN:,} more cannot be replayed")


def _data(
    target: Stream,
    letter: DeadLetter,
    edit: Edit,
    origin: StoredEvent[object] | None,
    is_home: bool,
) -> object:
    """What is sent: what was edited, the event as it was, or what the letter tells of it."""
    if edit.data is not None:
        return parse_data(target, edit.data)
    if origin is not None and is_home:
        return origin.data
    if origin is None and not letter.data:
        raise UsageError("none of its data could be read: supply the data (--data, --edit)")
    if origin is None and len(letter.data) >= DEAD_CHARS_MAX:
        raise UsageError(
            f"only its first {DEAD_CHARS_MAX:,} characters are kept, and the event itself is gone: "
            "supply the whole data (--data)"
        )
    text = letter.data if origin is None else as_json(json_data(origin.data))
    try:
        if target.spec.content == "bytes" and letter.agent:
            return parse_bytes_text(text.encode())
        return parse_data(target, text.encode())
    except RecordError as error:
        raise RecordError(f"{error}; correct the data (--data, --edit)") from None


# Editing


class _EditedLine(msgspec.Struct):
    """A line of `dead list --json`; what is not to be edited is passed over."""

    place: str
    letters: str | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    key: str | None = None


def _lines(log: Log, letters: Stream) -> Iterator[tuple[Letter, Edit]]:
    """Letters and their edits from standard input."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: there are no lines to read")
    target_of: dict[str, Stream] = {}
    for chunk in chunks_of_lines(sys.stdin.buffer):
        for line in chunk:
            with naming(line):
                yield _parse_line(log, letters, line, target_of)


def _parse_line(
    log: Log, letters: Stream, line: InputLine, targets: dict[str, Stream]
) -> tuple[Letter, Edit]:
    try:
        found = msgspec.json.decode(line.text, type=_EditedLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a line of `dead list --json`: {error}") from None
    if found.letters not in (None, str(letters.name)):
        raise UsageError(f"this letter is from {found.letters}, not from {letters.name}")
    letter = letter_at(log, letters, found.place)
    held = letter.event.data
    key = found.key if found.key != held.key else None
    if found.data is msgspec.UNSET or msgspec.json.decode(found.data) == show_data(held):
        return letter, Edit(key=key)
    text = bytes(found.data)
    if held.stream and held.stream not in targets:
        targets[held.stream] = find_stream(log, held.stream)
    if held.stream and targets[held.stream].spec.content == "bytes":
        text = parse_bytes_text(text)
    return letter, Edit(text, key)


def _read_edit(log: Log, letters: Stream, place: str, data: str | None, edit: bool) -> Edit:
    if data is not None and edit:
        raise UsageError("--data and --edit cannot be combined: omit one")
    if data is not None:
        return Edit(data.encode())
    if not edit:
        return Edit()
    held = letter_at(log, letters, place).event.data
    return Edit(_edit_in_editor(find_stream(log, held.stream) if held.stream else None, held))


def _edit_in_editor(target: Stream | None, letter: DeadLetter) -> bytes:
    """What the user's editor makes of a letter's data; again, as long as it does not fit."""
    if not (sys.stdin and sys.stdin.isatty() and stderr.is_terminal):
        raise UsageError("--edit needs a terminal: give the data with --data")
    shown = show_data(letter)
    text = shown if isinstance(shown, str) else msgspec.json.format(as_json(shown), indent=2)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "letter.json")
        path.write_text(text, "utf-8")
        while True:
            try:
                subprocess.run([*shlex.split(editor), str(path)], check=True)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                raise UsageError(f"the editor ({editor}) failed: {error}") from None
            made = path.read_bytes()
            if made == text.encode():
                note("the data was not changed: nothing was sent")
                raise typer.Exit(1)
            try:
                if target is not None:
                    parse_data(target, made)
                return made
            except PenstockError as error:
                note(f"the data does not fit {'' if target is None else target.name}: {error}")
            if not typer.confirm("Edit it again?", default=True, err=True):
                note("nothing was sent")
                raise typer.Exit(1)
