"""What an agent sends: collected by stream, and turned into columns once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa

from penstock.app.declaring.definitions import Agent
from penstock.app.declaring.streams import AppStream, Emit
from penstock.app.tasks.task import derived_id
from penstock.errors import RecordError
from penstock.log.api import Log, Part
from penstock.log.declaring.objects import Stream
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.arrow import RecordCodec, codec_of, codec_of_schema
from penstock.records.event import DATA, ENVELOPE, key_bytes
from penstock.records.schema import Record

_PLAIN = EventOptions()


class _Outbox:
    """Events on their way to one stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.datas: list[object] = []
        self.ids: list[str] = []
        self.options: list[EventOptions] = []
        self.has_options = False


_Emission = tuple[_Outbox, object, EventOptions]


class Emissions:
    """Collects what an agent yields, and knows which stream each event goes to."""

    def __init__(self, log: Log, agent: Agent, query: str) -> None:
        self._query = query
        self._agent = agent
        self._composer = Composer(query, log.limits)
        self.rows = 0
        streams: list[AppStream[object]] = [p for p in agent.outputs if isinstance(p, AppStream)]
        self._boxes = {s.name: _Outbox(log.stream(s.name)) for s in streams}
        chosen = [s for s in streams if s is not agent.dead]
        classes = [s.record for s in chosen]
        self._by_class = {
            s.record: self._boxes[s.name]
            for s in chosen
            if s.record is not None and classes.count(s.record) == 1
        }
        self._only = self._boxes[chosen[0].name] if len(chosen) == 1 else None
        self._names = ", ".join(s.name for s in chosen)

    def collect(self, result: object, *, check: bool) -> list[_Emission]:
        """The events that one call returned or yielded; a generator is run to its end.

        With `check`, each is validated at once, so that an invalid one is an error of the call.
        """
        if isinstance(result, Record | Emit | dict | str | bytes):
            yielded: Iterable[object] = (result,)
        else:
            yielded = result  # type: ignore[assignment]
        made: list[_Emission] = []
        for item in yielded:
            box, data, options = self._address(item)
            if check:
                self._composer.admit(box.stream, data, options)
            made.append((box, data, options))
        return made

    def put(self, made: Sequence[_Emission], id_: str) -> None:
        """Send the events of a call that was made for the event with this id."""
        for n, (box, data, options) in enumerate(made):
            self._put(box, data, options, id_, n)

    def add(self, stream: str, data: Record, id_: str) -> None:
        """Send an event to a stream by name, on behalf of the agent."""
        self._put(self._boxes[stream], data, _PLAIN, id_, -1)

    def _put(self, box: _Outbox, data: object, options: EventOptions, id_: str, n: int) -> None:
        box.datas.append(data)
        box.ids.append(str(options.id) if options.id else derived_id(self._query, id_, n))
        box.options.append(options)
        box.has_options = box.has_options or options is not _PLAIN
        self.rows += 1

    def _address(self, item: object) -> _Emission:
        if isinstance(item, Emit):
            box = self._boxes.get(item.stream)
            if box is None:
                raise RecordError(
                    f"agent {self._agent.name} sends to {item.stream}, which is not in its to=: "
                    "add it there"
                )
            return box, item.data, item.options
        box = self._by_class.get(type(item)) if isinstance(item, Record) else None
        box = box or self._only
        if box is None:
            raise RecordError(
                f"agent {self._agent.name} yields {type(item).__name__}, which does not identify "
                f"one of its output streams ({self._names or 'it has none'}): yield "
                "stream.new(…), or name the stream in to="
            )
        return box, item, _PLAIN

    def parts(self, composer: Composer) -> Iterator[Part]:
        """Everything collected, as one part for each stream."""
        for box in self._boxes.values():
            if box.datas:
                yield composer.arrow_part(box.stream, _columns(box))


def _columns(box: _Outbox) -> pa.RecordBatch:
    batch = _data(box)
    columns, fields = list(batch.columns), list(batch.schema)
    columns.append(pa.array(box.ids, pa.string()))
    fields.append(pa.field("_id", pa.string()))
    if box.has_options:
        given: dict[str, list[object]] = {
            "_key": [key_bytes(o.key) for o in box.options],
            "_time": [o.time for o in box.options],
            "_headers": [o.headers for o in box.options],
        }
        for name, values in given.items():
            if any(value is not None for value in values):
                columns.append(pa.array(values, ENVELOPE.field(name).type))
                fields.append(pa.field(name, ENVELOPE.field(name).type))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _data(box: _Outbox) -> pa.RecordBatch:
    if box.stream.record is None:
        kind = pa.binary() if box.stream.spec.content == "bytes" else pa.string()
        is_json = box.stream.spec.content == "json"
        texts = [msgspec.json.encode(d).decode() if is_json else d for d in box.datas]
        return pa.RecordBatch.from_arrays([pa.array(texts, kind)], [DATA])
    first = box.datas[0]
    codec = (
        codec_of(type(first)) if isinstance(first, Record) else codec_of_schema(box.stream.record)
    )
    records = [
        data if isinstance(data, Record) else convert_data(codec, data) for data in box.datas
    ]
    try:
        return codec.to_arrow(records)
    except (pa.ArrowException, TypeError, ValueError, AttributeError):
        for record in records:
            codec.validate(record)  # raises an error that names the invalid field
        raise


def convert_data(codec: RecordCodec, data: object) -> Record:
    """Convert a dict to a record; `RecordError` says what does not fit."""
    try:
        return msgspec.convert(data, codec.record)
    except msgspec.ValidationError as error:
        raise RecordError(f"{codec.schema.name}: {error}") from None
